"""Training runs: one loop, run directory, checkpoints, console."""

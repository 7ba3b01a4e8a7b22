"""The engine: one step of forward learning, from counts to gradients."""

"""The engine: one training step by forward passes, from allocation to gradients."""

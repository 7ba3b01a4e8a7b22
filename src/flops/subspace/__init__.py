"""Shaped noise: where the gradient lives, learned from the queries."""

"""Shaped noise: the subspace of the gradient, learned from the queries."""

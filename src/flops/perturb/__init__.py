"""Perturbations: keyed random numbers, noise on activations and on parameters."""

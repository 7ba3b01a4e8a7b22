"""Experiments: comparisons and studies of the paper's claims."""

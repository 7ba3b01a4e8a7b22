"""Diagnostics: quality of gradient estimates, and a sigma sweep."""

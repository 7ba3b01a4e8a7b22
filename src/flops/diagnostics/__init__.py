"""Diagnostics: how good gradient estimates are, and at which sigma."""

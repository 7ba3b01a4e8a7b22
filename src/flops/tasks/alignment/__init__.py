"""Alignment: an adapter between two frozen models."""

"""Prompt tuning of a model behind a service."""

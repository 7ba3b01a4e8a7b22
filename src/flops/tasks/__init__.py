"""Applications: models, data and metrics of each."""

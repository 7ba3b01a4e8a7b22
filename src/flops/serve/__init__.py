"""The HTTP service and its client."""

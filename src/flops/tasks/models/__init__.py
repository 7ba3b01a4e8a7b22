"""Models that several tasks share."""

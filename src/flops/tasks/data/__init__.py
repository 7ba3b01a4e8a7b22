"""Data sets: images, captions, splits."""

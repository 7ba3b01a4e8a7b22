"""Atomic writes, full disks, lock files and JSON parsing."""

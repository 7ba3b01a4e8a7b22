"""Benchmarks: `python -m benchmarks` (or `make bench`) prints tables and writes results.json."""

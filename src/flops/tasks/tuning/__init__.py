"""Tuning from the command line: methods, runs with journals, tables; for any objective."""

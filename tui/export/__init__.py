"""Metrics of a job for other programs: ``prometheus`` text, and CSV ``tables``."""

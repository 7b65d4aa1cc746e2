"""Raises alerts on what a job does, and tells them."""

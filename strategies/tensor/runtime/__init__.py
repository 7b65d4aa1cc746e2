"""Runs a model on the parts that a plan gives each rank."""

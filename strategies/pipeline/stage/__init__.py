"""Runs a module's own step as one stage: what other stages compute is received, not computed."""

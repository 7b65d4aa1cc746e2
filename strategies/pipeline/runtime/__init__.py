"""Runs one step of a schedule on one rank: computes, hands over, and fails together."""

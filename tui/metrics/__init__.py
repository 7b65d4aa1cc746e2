"""What a snapshot means: pure functions from a job to the figures that are shown of it."""

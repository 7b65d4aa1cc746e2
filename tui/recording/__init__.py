"""Sends what is seen of a job elsewhere: into a file, down a pipe."""

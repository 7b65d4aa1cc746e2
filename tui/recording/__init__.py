"""Writes the frames of a job elsewhere: ``record`` to a file, ``stream`` to a pipe."""

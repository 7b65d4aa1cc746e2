"""The config of a run: its schema, how a file and overrides become one, and the shipped recipes."""

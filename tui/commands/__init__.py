"""The commands of the dashboard as functions that return an exit code.

Data go to stdout, everything else to stderr. Textual is imported only when a screen is opened.
"""

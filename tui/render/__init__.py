"""Pure functions from the dashboard's state to lines of text; no terminal, no textual."""

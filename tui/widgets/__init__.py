"""The one Textual widget of the dashboard: ``canvas`` paints the lines that panels return."""

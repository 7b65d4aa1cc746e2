"""The one widget of the dashboard; it paints what functions of ``drawing`` give."""

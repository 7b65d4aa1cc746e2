"""Jobs on other hosts, over the user's own ssh."""

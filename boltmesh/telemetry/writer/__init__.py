"""What a rank writes while it runs."""

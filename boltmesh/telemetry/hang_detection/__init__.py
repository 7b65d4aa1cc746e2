"""Says why collectives do not advance: which group and call, who is missing, and where they are."""

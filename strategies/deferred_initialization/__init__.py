"""Building models that are larger than one rank's memory: unit by unit."""

"""``torchmetrics`` objects of a module that several ranks run on parts of one batch."""

"""Layers that look at all rows of a batch, which a pipeline cuts into microbatches."""

from collections.abc import Iterable

from torch import nn
from torch.nn import Module


def vector_norms(module: Module) -> list[nn.BatchNorm1d]:
    """Return the layers that have no moments of one row."""
    return [each for each in module.modules() if isinstance(each, nn.BatchNorm1d)]


def fewest_rows(norms: Iterable[nn.BatchNorm1d]) -> int:
    """Return how many rows a microbatch needs: two where one of the layers takes moments of it."""
    takes_moments = any(each.training or each.running_mean is None for each in norms)
    return 2 if takes_moments else 1

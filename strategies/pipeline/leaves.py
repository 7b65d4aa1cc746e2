"""What a branch of a loss's graph comes from: parameters, rows, or scalars of layers."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter


@dataclass(frozen=True)
class Leaves:
    """What a branch of a graph comes from."""

    parameters: bool = False
    rows: bool = False
    """Values with rows, or what is not known."""
    scalars: bool = False
    """Values without rows that other layers made."""


def variables_behind(node: Node | None) -> Iterator[Tensor]:
    """Yield the tensors that a branch of a graph begins from, of which gradients are kept.

    Args:
        node: Its first node, None for what needs no gradient.
    """
    seen: set[Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        pending.extend(after for after, _ in each.next_functions)
        variable = getattr(each, "variable", None)
        if variable is not None:
            yield variable


def leaves_of(node: Node, rows: Collection[int], scalars: Collection[int]) -> Leaves:
    """Return what a branch comes from.

    Args:
        node: Its first node.
        rows: Values with rows, by identity.
        scalars: Values without, by identity.
    """
    has_parameters = has_rows = has_scalars = False
    for variable in variables_behind(node):
        if id(variable) in scalars:
            has_scalars = True
        elif isinstance(variable, Parameter) and id(variable) not in rows:
            has_parameters = True
        else:
            has_rows = True
    return Leaves(has_parameters, has_rows, has_scalars)

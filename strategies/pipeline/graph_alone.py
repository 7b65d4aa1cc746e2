"""What the graph of a scalar tells alone, where nothing was tried.

Of losses that a layer makes, and of logged values before they are tried.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.leaves import Leaves
from boltmesh.strategies.pipeline.losses import Form, Kind, Term, terms_of
from boltmesh.strategies.pipeline.operators import plain_name


def read_open(node: Node | None, rows: int) -> list[tuple[Term, Kind]]:
    """Return terms and kinds of a loss by its graph alone.

    For losses that a layer makes, of which no proof is at hand.

    Args:
        node: Where the graph begins.
        rows: What a scalar that another stage made is worth.

    Raises:
        ConfigError: When the graph leaves a doubt.
    """
    found = terms_of(node, Form(), lambda _: Leaves(rows=True))
    return [kind_alone(each.counting(), rows) for each in found]


def kind_alone(term: Term, rows: int) -> tuple[Term, Kind]:
    """Return a term and its kind, as far as the graph alone tells.

    Raises:
        ConfigError: When the graph leaves a doubt.
    """
    variable = getattr(term.end, "variable", None)
    if not term.is_reduced and variable is not None:
        if isinstance(variable, Parameter):
            return term, "penalty"
        return replace(term, count=float(rows), size=float(rows), operator="a layer"), "mean"
    if term.reductions == {"mean"} or ("tensor" in term.divisors and term.reductions == {"sum"}):
        return term, "mean"
    if term.reductions == {"sum"} and not term.divisors:
        return term, "sum"
    if term.reductions == {"sum"}:
        doubt = "a sum and a number, and it cannot be told whether that counts rows"
    elif not term.reductions:
        doubt = f"{plain_name(term.end)}, which says nothing of rows"
    else:
        doubt = "a sum of means, or a mean of sums, over rows"
    raise ConfigError(
        f"A part of training_step's loss is made of {doubt}. If a layer with parameters makes it, "
        f"return losses of single rows from there and take their mean in training_step, or take "
        f"the mean with torch.mean or reduction='mean'; or use microbatches=1."
    )


@dataclass(frozen=True)
class Count:
    """What a scalar was made of, as far as its graph tells."""

    count: Tensor | float
    is_sum: bool
    is_certain: bool
    """Whether the graph leaves no doubt."""


def count_of(value: Tensor) -> Count | None:
    """Return what a scalar with a graph was averaged over; None where its graph does not tell."""
    if value.grad_fn is None:
        return None
    try:
        terms = list(terms_of(value.grad_fn, Form(), lambda _: Leaves(rows=True)))
    except ConfigError:
        return None
    if not terms or not all(each.is_reduced for each in terms):
        return None
    sums = {each.reductions == {"sum"} and not each.divisors for each in terms}
    if len(sums) > 1:
        return None
    try:
        is_certain = bool([kind_alone(each, 1) for each in terms])
    except ConfigError:
        is_certain = False
    return Count(terms[0].counting().count, sums.pop(), is_certain)

"""Reads the divisors of a loss from its autograd graph.

The mean of means is not the mean if microbatches hold different numbers of rows, or of tokens that
count. From a loss down to the values of the rows, the graph has every reduction and every scalar
factor. Their product is the *count* of a term: the divisor of a sum. One graph does not show
whether a count grows with the rows or is a constant of the user; ``calibration`` tests it, and
proves what was read.

``source_of_branch`` returns the inputs of a branch: rows, or scalars of layers. ``read_open`` is
for losses that a layer computes, and for logged values before they are tried: it uses the graph
alone.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.loss.autograd_nodes import (
    Factor,
    SumOverRanksNode,
    factor_of,
    is_sum,
    is_transparent,
    masks_of,
    operands,
    plain_name,
    reduction_of,
    selection_of_rows,
    sum_over_ranks,
)


class BatchLossError(ConfigError):
    """The losses of microbatches do not add up to the batch's loss.

    Args:
        what: Facts about the loss, as sentences.
        instead: An alternative for the user, as the end of a sentence.
    """

    def __init__(self, what: str, instead: str = "") -> None:
        super().__init__(
            f"{what} Other schedules than gpipe differentiate each microbatch by itself: use "
            f"schedule='gpipe', which computes the loss of the whole batch at once{instead}."
        )
        self.what, self.instead = what, instead

    def without_joining(self, reason: str) -> ConfigError:
        """Return the error for a step whose microbatches cannot be joined.

        Args:
            reason: Why they cannot be joined.
        """
        return ConfigError(
            f"{self.what} schedule='gpipe' cannot compute it for the whole batch either, since "
            f"{reason}. Use microbatches=1{self.instead}."
        )


_MEAN = ", or a loss that is a mean or a sum over the rows of losses of single rows"


@dataclass(frozen=True)
class Source:
    """Inputs of a branch of a graph, parameters excluded."""

    rows: bool = False
    """Values with rows, or unknown values."""
    scalars: bool = False
    """Values without rows that other layers made."""


SourceOf = Callable[[Node], Source]
"""Returns the inputs of the branch that begins at a node."""


def variables_behind(node: Node | None) -> Iterator[Tensor]:
    """Yield the leaf tensors of a branch of a graph, of any shape.

    Args:
        node: The branch's first node; None for a tensor that needs no gradient.
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


def source_of_branch(node: Node, rows: Collection[int], scalars: Collection[int]) -> Source:
    """Return the inputs of a branch.

    Args:
        node: The branch's first node.
        rows: Values with rows, by identity.
        scalars: Values without rows, by identity.
    """
    has_rows = has_scalars = False
    for variable in variables_behind(node):
        if id(variable) in scalars:
            has_scalars = True
        elif not isinstance(variable, Parameter) or id(variable) in rows:
            has_rows = True
    return Source(has_rows, has_scalars)


Kind = Literal["mean", "sum", "penalty", "received"]
"""Relation of a term to the rows of a batch: their mean or their sum, independent of them
(``penalty``), or a scalar that a layer made (``received``)."""

Place = tuple[int, ...]
"""Path to a node: the index of the operand that was followed at each node from the loss on."""

MOST_NODES = 256
"""Most nodes that are read of a loss. The proof fails if the rest of it matters."""

_STACKS = ("StackBackward0", "CatBackward0")
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class Term:
    """A summand of a loss, without its divisors."""

    place: Place
    count: Tensor | float
    """Product of its divisors, a number or a tensor of shape ``()``."""
    size: float
    """Approximate ``count``, at least 1 and known without device synchronization."""
    operator: str
    """torch's name of the reduction, for messages."""
    end: Node
    """Node at which reading ended."""
    is_reduced: bool
    has_divisor: bool
    """Whether ``count`` has a factor other than the sizes of reductions."""
    reductions: frozenset[Literal["mean", "sum"]]
    """Reductions over rows, as far as the graph shows."""
    divisors: frozenset[Literal["number", "tensor"]]
    """Kinds of the other factors that it was divided by or multiplied with."""
    empty: tuple[Tensor | bool, ...] = ()
    """Flags, set if a mask hides all elements; tensors are bool of shape ``()``."""

    def counting(self, rows: float | None = None) -> "Term":
        """Return the term, with a count of 0 if masks hide all elements.

        A loss that divides by ``max(n, 1)`` has a count of 1 then.

        Args:
            rows: The count of a loss that counts rows, hidden or not; such a count is kept.
        """
        count = self.count
        for each in self.empty if self.has_divisor else ():
            if isinstance(each, Tensor):
                counted = (
                    count.to(each.device)
                    if isinstance(count, Tensor)
                    else torch.full((), count, device=each.device)  # no copy to wait for
                )
                hides = each
                if rows is not None:
                    hides = each & ~((counted - rows).abs() <= 1e-5 * rows)
                count = torch.where(hides, torch.zeros_like(counted), counted)
            elif each and (rows is None or not math.isclose(float(count), rows, rel_tol=1e-5)):
                count = 0.0
        return self if count is self.count else replace(self, count=count)


@dataclass(frozen=True)
class Visit:
    """How one node of a loss is read."""

    name: str
    follow: tuple[int, ...]
    """Operands that are read next; empty at the end of a term."""
    takes_factor: bool = False
    """Whether the other operand is a scalar that the term is multiplied or divided by."""


@dataclass
class Form:
    """Structure of a loss's graph, from its first reading."""

    visits: dict[Place, Visit] = field(default_factory=dict)
    kinds: dict[Place, Kind] = field(default_factory=dict)
    """Kind of every term, by its place."""
    per_row: dict[Place, float] = field(default_factory=dict)
    """Divisor per row of a term, if it was the same for all rows tried."""
    constants: set[Place] = field(default_factory=set)
    """Places of factors that are no counts: they were the same for all rows tried. They may still
    differ between microbatches, such as a random number."""
    doubtful: dict[Place, float] = field(default_factory=dict)
    """Divisors among ``constants`` that may be counts of something that the rows did not have: a
    loss that divides by ``max(n, 1)`` has 1 for 0 and for 1."""
    off: set[Place] = field(default_factory=set)
    """Places at which a term was multiplied by 0, which proves nothing about the term."""
    factors: dict[Place, list[Factor]] | None = None
    """Collects the factors of the losses that are read; None to collect none."""


class OtherFormError(Exception):
    """A loss does not have the expected form."""


@dataclass
class _Position:
    """A node during reading, and the facts collected before it.

    It moves along a branch, because losses are read in every microbatch; at a fork each further
    branch gets a copy.
    """

    node: Node | None
    place: Place = ()
    count: Tensor | float = 1.0
    size: float = 1.0
    operator: str = ""
    is_reduced: bool = False
    has_divisor: bool = False
    reductions: frozenset[Literal["mean", "sum"]] = frozenset()
    divisors: frozenset[Literal["number", "tensor"]] = frozenset()
    empty: tuple[Tensor | bool, ...] = ()
    is_mixed: bool = False
    """Whether rows of several branches were added: one branch's masks then prove nothing."""
    over_ranks: SumOverRanksNode | None = None
    """The last sum over ranks so far: behind it ranks have different values."""

    def move_behind_transparent(self) -> Node | None:
        """Move to the next node that is not transparent, and return it."""
        node = self.node
        while node is not None and is_transparent(node):
            over_ranks = sum_over_ranks(node)
            if over_ranks is not None:
                self.over_ranks = over_ranks
                self.size *= over_ranks.num_summed
            node = node.next_functions[0][0]
        self.node = node
        return node

    def add_empty(self, flags: tuple[Tensor | bool, ...]) -> None:
        """Add flags of masks that hide all elements, combined over ranks."""
        if flags and self.over_ranks is not None:
            flags = self.over_ranks.on_all_ranks(flags)
        self.empty = (*self.empty, *flags)


def read(loss: Tensor, form: Form) -> list[Term]:
    """Return the terms of a loss whose form is known.

    Args:
        loss: Shape ``()``, with its graph.
        form: The known form.

    Raises:
        OtherFormError: The loss has another form.
    """
    return list(terms_of(loss.grad_fn, form))


def find_form(loss: Tensor, source_of: SourceOf) -> Form:
    """Return the form of a loss, without kinds.

    Args:
        loss: Shape ``()``, with its graph.
        source_of: Returns the inputs of a branch.

    Raises:
        ConfigError: A scalar of the batch goes through a function that is not linear, so that no
            weights make the losses of microbatches add up to the batch's.
    """
    form = Form()
    for _ in terms_of(loss.grad_fn, form, source_of):
        pass  # reading them fills the form
    return form


def terms_of(start: Node | None, form: Form, source_of: SourceOf | None = None) -> Iterator[Term]:
    """Yield the terms behind a node.

    Args:
        start: The first node.
        form: The known form of the graph; new nodes are added to it.
        source_of: Returns the inputs of a branch. None adds no nodes to the form.

    Raises:
        OtherFormError: The graph has another form.
        ConfigError: See :func:`find_form`.
    """
    pending = [_Position(start)]
    while pending:
        position = pending.pop()
        node = position.move_behind_transparent()
        if node is None:
            continue
        if source_of is not None and position.place not in form.visits:
            is_full = len(form.visits) >= MOST_NODES
            form.visits[position.place] = _visit(position, source_of, is_full=is_full)
        visit = form.visits.get(position.place)
        # Rows may come from anywhere, and a scalar that was tried from the layer that makes it.
        may_be_any = position.is_reduced or (visit is not None and visit.name == _LEAF)
        if visit is None or (visit.name != node.name() and (visit.follow or not may_be_any)):
            raise OtherFormError(node.name())
        _gather(position, visit, form)
        if not visit.follow:
            if (selection := selection_of_rows(node)) is not None:
                raise BatchLossError(_not_linear(selection, "chooses among rows"), _MEAN)
            yield _term(position)
            continue
        after, place = node.next_functions, position.place
        for number, index in enumerate(reversed(visit.follow)):
            if index >= len(after):
                raise OtherFormError(node.name())
            branch = position if number + 1 == len(visit.follow) else replace(position)
            branch.node, branch.place = after[index][0], (*place, index)
            pending.append(branch)


def _visit(position: _Position, source_of: SourceOf, *, is_full: bool) -> Visit:
    """Decide how a new node is read."""
    node = position.node
    assert node is not None
    name = node.name()
    end = Visit(name, ())
    if name == _LEAF or is_full:
        return end
    reduction = reduction_of(node)
    if reduction is not None:
        return Visit(name, (0,) if reduction.goes_on else ())
    if is_sum(node):
        return Visit(name, tuple(operands(node)))
    factor = factor_of(node)
    if factor is not None:
        return _visit_of_product(position, node, factor, source_of)
    if position.is_reduced:
        # Behind a reduction are values of rows, which are not read.
        return Visit(name, tuple(operands(node))) if masks_of(node) else end
    source = source_of(node)
    if source.rows or source.scalars:
        raise BatchLossError(_not_linear(node, "is not linear in the batch's mean"), _MEAN)
    return end


def _visit_of_product(
    position: _Position, node: Node, factor: Factor, source_of: SourceOf
) -> Visit:
    name = node.name()
    # Behind a reduction are rows, and a factor of a single row is no count.
    is_scalar = factor.is_scalar and not (position.is_reduced and factor.may_be_of_row)
    branches = operands(node)
    onward = []
    for each in branches:
        branch = node.next_functions[each][0]
        assert branch is not None
        source = source_of(branch)
        if source.rows or source.scalars:
            onward.append(each)
    if not onward:  # only parameters
        return Visit(name, branches[:1], is_scalar and len(branches) == 1)
    if len(onward) == 1 and (onward == [0] or not factor.is_division):
        return Visit(name, tuple(onward), is_scalar and len(branches) == 1)
    if position.is_reduced:
        return Visit(name, ())
    what = "divides by a number that is made of the batch and trained" if factor.is_division else (
        "multiplies two numbers that are made of the batch"
    )  # fmt: skip
    raise BatchLossError(_not_linear(node, what), _MEAN)


def _not_linear(node: Node, what: str) -> str:
    return (
        f"The loss of training_step cannot be put together from microbatches: {plain_name(node)} "
        f"{what}."
    )


def _gather(position: _Position, visit: Visit, form: Form) -> None:
    """Update the position by its node's reduction, factor or mask."""
    node = position.node
    assert node is not None
    reduction = None if node.name() == _LEAF else reduction_of(node)
    if reduction is not None:
        kind: Literal["mean", "sum"] = "mean" if reduction.is_mean else "sum"
        position.count = position.count * reduction.count
        if position.over_ranks is None:
            position.size *= max(reduction.size, 1.0)
        position.operator = position.operator or plain_name(node)
        position.is_reduced = True
        if reduction.is_over_rows:
            position.reductions |= {kind}
        position.add_empty(reduction.empty)
    elif visit.takes_factor:
        _gather_factor(position, node, form)
    elif position.is_reduced and is_sum(node):
        position.is_mixed = position.is_mixed or not node.name().endswith(_STACKS)
    elif position.is_reduced and position.has_divisor and not position.is_mixed:
        position.add_empty(masks_of(node))


def _gather_factor(position: _Position, node: Node, form: Form) -> None:
    factor = factor_of(node)
    if factor is None or not factor.is_scalar:
        raise OtherFormError(node.name())
    if form.factors is not None:
        form.factors.setdefault(position.place, []).append(factor)
    if position.place in form.off and not factor.is_zero:
        raise OtherFormError(node.name())
    if position.place in form.constants:
        known = form.doubtful.get(position.place)
        if known is not None and not math.isclose(factor.divisor, known, rel_tol=1e-6):
            raise OtherFormError(node.name())
        return
    position.count = factor.divide(position.count)
    position.size *= factor.size
    position.has_divisor = True
    position.divisors |= {"number" if factor.is_number else "tensor"}


def _term(position: _Position) -> Term:
    count = position.count
    assert position.node is not None
    return Term(
        position.place,
        count.detach().float() if isinstance(count, Tensor) else count,
        position.size,
        position.operator,
        position.node,
        position.is_reduced,
        position.has_divisor,
        position.reductions,
        position.divisors,
        position.empty,
    )


def read_open(node: Node | None, rows: int) -> list[tuple[Term, Kind]]:
    """Return the terms and kinds of a loss from its graph alone.

    For losses that a layer computes, which are not proved.

    Args:
        node: First node of the graph.
        rows: The count of a scalar that another stage made.

    Raises:
        ConfigError: The graph is ambiguous.
    """
    terms = terms_of(node, Form(), lambda _: Source(rows=True))
    return [kind_alone(each.counting(), rows) for each in terms]


def kind_alone(term: Term, rows: int) -> tuple[Term, Kind]:
    """Return a term and its kind, as far as the graph alone shows.

    Raises:
        ConfigError: The graph is ambiguous.
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
        doubt = "a sum and a number, which may or may not count rows"
    elif not term.reductions:
        doubt = f"{plain_name(term.end)}, which says nothing of rows"
    else:
        doubt = "a sum of means, or a mean of sums, over rows"
    raise BatchLossError(
        f"A part of training_step's loss is made of {doubt}. If a layer with parameters makes it, "
        f"return losses of single rows from there and take their mean in training_step, or take "
        f"the mean with torch.mean or reduction='mean'."
    )

"""Divisors of a loss, read from the graph that autograd keeps of it.

The mean of means is not the mean where microbatches hold different numbers of rows, or of tokens
that count. From a loss down to the values of the rows, the graph has every reduction and every
scalar factor on the way. Their product is the *count* of a term: what a sum was divided by. Whether
a count grows with the rows or is a constant of the user's cannot be seen in one graph;
``calibration`` finds out, and proves what was read.

``source_of_branch`` returns what a branch is made of: rows, or scalars of layers.
``read_open`` is for losses that a layer makes, and for logged values before they are tried: it has
the graph alone.
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
    """A loss that the losses of microbatches do not add up to.

    Args:
        what: What is true of it, as sentences.
        instead: What else to write, as the end of a sentence.
    """

    def __init__(self, what: str, instead: str = "") -> None:
        super().__init__(
            f"{what} Other schedules than gpipe differentiate each microbatch by itself: use "
            f"schedule='gpipe', which computes the loss of the whole batch at once{instead}."
        )
        self.what, self.instead = what, instead

    def without_joining(self, reason: str) -> ConfigError:
        """Return the same for a step whose microbatches cannot be joined.

        Args:
            reason: Why not.
        """
        return ConfigError(
            f"{self.what} schedule='gpipe' cannot compute it for the whole batch either, since "
            f"{reason}. Use microbatches=1{self.instead}."
        )


_MEAN = ", or a loss that is a mean or a sum over the rows of losses of single rows"


@dataclass(frozen=True)
class Source:
    """Values, beside parameters, that a branch of a graph is made of."""

    rows: bool = False
    """Values with rows, or what is not known."""
    scalars: bool = False
    """Values without rows that other layers made."""


SourceOf = Callable[[Node], Source]
"""Returns what the branch that begins at a node is made of."""


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


def source_of_branch(node: Node, rows: Collection[int], scalars: Collection[int]) -> Source:
    """Return what a branch is made of.

    Args:
        node: Its first node.
        rows: Values with rows, by identity.
        scalars: Values without, by identity.
    """
    has_rows = has_scalars = False
    for variable in variables_behind(node):
        if id(variable) in scalars:
            has_scalars = True
        elif not isinstance(variable, Parameter) or id(variable) in rows:
            has_rows = True
    return Source(has_rows, has_scalars)


Kind = Literal["mean", "sum", "penalty", "received"]
"""Relation of a term to the rows of a batch: its mean or its sum, the same whatever the
rows are (``penalty``), or a scalar that a layer made (``received``)."""

Place = tuple[int, ...]
"""Where a node is: which operand was followed at each node from the loss on."""

MOST_NODES = 256
"""Largest number for one loss. Longer sums are read no further; the proof shows if it matters."""

_STACKS = ("StackBackward0", "CatBackward0")
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class Term:
    """One part of a loss: something that is added, less what it was divided by."""

    place: Place
    count: Tensor | float
    """The product of what it was divided by: 0-dim, or a number."""
    size: float
    """About how large ``count`` is; at least 1 and known without asking a device."""
    operator: str
    """torch's name of the reduction, for messages."""
    end: Node
    """Where reading ended."""
    is_reduced: bool
    has_divisor: bool
    """Whether ``count`` has a factor that is not the size of what was reduced."""
    reductions: frozenset[Literal["mean", "sum"]]
    """Those over rows, as far as the graph shows."""
    divisors: frozenset[Literal["number", "tensor"]]
    """Other factors that it was divided by or multiplied with."""
    empty: tuple[Tensor | bool, ...] = ()
    """Whether masks let nothing through, each 0-dim."""

    def counting(self, rows: float | None = None) -> "Term":
        """Return the term with a count of 0 where nothing counts.

        A loss that divides by ``max(n, 1)`` says 1 there.

        Args:
            rows: What it would say if it counted rows that masks do not hide, which is true.
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
    """Operation at one node of a loss."""

    name: str
    follow: tuple[int, ...]
    """Operands to go on with; none at the end of a term."""
    takes_factor: bool = False
    """Whether the other operand is a scalar that the term is multiplied or divided by."""


@dataclass
class Form:
    """The shape of a loss's graph, as it was read once."""

    visits: dict[Place, Visit] = field(default_factory=dict)
    kinds: dict[Place, Kind] = field(default_factory=dict)
    """Kind of every term, by its place."""
    per_row: dict[Place, float] = field(default_factory=dict)
    """By what a term is divided for every row, where that was the same for all rows tried."""
    constants: set[Place] = field(default_factory=set)
    """Where a factor says nothing about a count: it was the same for all rows tried. It may be
    another one in each microbatch all the same, such as a random number."""
    doubtful: dict[Place, float] = field(default_factory=dict)
    """Divisors at such places that may be counts for which the rows had nothing to count: a loss
    that divides by ``max(n, 1)`` says 1 for 0 and for 1."""
    off: set[Place] = field(default_factory=set)
    """Where a term was multiplied by 0, which proves nothing of the term."""
    factors: dict[Place, list[Factor]] | None = None
    """Factors in the losses that are read, while these are gathered."""


class OtherFormError(Exception):
    """A loss does not have the form that it was to be read by."""


@dataclass
class _Position:
    """A node on the way, and what was gathered before it.

    It moves on along a branch, for a loss is read in every microbatch; where branches part, each
    further one gets a copy.
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
    """Whether rows of several branches were added: none of them alone shows if there is nothing."""
    over_ranks: SumOverRanksNode | None = None
    """The last sum over ranks on the way: behind it ranks have other values."""

    def move_behind_transparent(self) -> Node | None:
        """Go on to the first node that says something about a count, and return it."""
        node = self.node
        while node is not None and is_transparent(node):
            over_ranks = sum_over_ranks(node)
            if over_ranks is not None:
                self.over_ranks = over_ranks
                self.size *= over_ranks.num_summed
            node = node.next_functions[0][0]
        self.node = node
        return node

    def add_empty(self, found: tuple[Tensor | bool, ...]) -> None:
        """Take in whether masks let nothing through."""
        if found and self.over_ranks is not None:
            found = self.over_ranks.on_all_ranks(found)
        self.empty = (*self.empty, *found)


def read(loss: Tensor, form: Form) -> list[Term]:
    """Return the terms of a loss whose form is known.

    Raises:
        OtherFormError: When it has another form.
    """
    return list(terms_of(loss.grad_fn, form))


def find_form(loss: Tensor, source_of: SourceOf) -> Form:
    """Return the form of a loss, without kinds.

    Args:
        loss: Scalar, with its graph.
        source_of: Returns the source of a branch.

    Raises:
        ConfigError: When a scalar of the batch goes through a function that is not linear, after
            which no weight makes the losses of microbatches the batch's.
    """
    form = Form()
    for _ in terms_of(loss.grad_fn, form, source_of):
        pass  # reading them fills the form
    return form


def terms_of(start: Node | None, form: Form, source_of: SourceOf | None = None) -> Iterator[Term]:
    """Yield the terms behind a node.

    Args:
        start: Where to begin.
        form: What is known of the graph; what is not is added.
        source_of: Returns the source of a branch. Without it the form is all there is.

    Raises:
        OtherFormError: When the graph has another form.
        ConfigError: As :func:`find_form`.
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


def behind_transparent(node: Node | None) -> Node | None:
    """Return the first node from here on that says something about a count."""
    return _Position(node).move_behind_transparent()


def _visit(position: _Position, source_of: SourceOf, *, is_full: bool) -> Visit:
    """Decide what is done at a node that is met for the first time."""
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
        # Beyond, it is about rows: each is worth what it is worth.
        return Visit(name, tuple(operands(node))) if masks_of(node) else end
    found = source_of(node)
    if found.rows or found.scalars:
        raise BatchLossError(_not_linear(node, "is not linear in the batch's mean"), _MEAN)
    return end


def _visit_of_product(
    position: _Position, node: Node, factor: Factor, source_of: SourceOf
) -> Visit:
    name = node.name()
    # Behind a reduction are rows, and what only one row was multiplied by says nothing of a count.
    is_scalar = factor.is_scalar and not (position.is_reduced and factor.may_be_of_row)
    branches = operands(node)
    onward = []
    for each in branches:
        branch = node.next_functions[each][0]
        assert branch is not None
        found = source_of(branch)
        if found.rows or found.scalars:
            onward.append(each)
    if not onward:  # of parameters alone
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
    """Take in what the position's node says about the count."""
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
    """Return terms and kinds of a loss by its graph alone.

    For losses that a layer makes, of which no proof is at hand.

    Args:
        node: Where the graph begins.
        rows: What a scalar that another stage made is worth.

    Raises:
        ConfigError: When the graph leaves a doubt.
    """
    found = terms_of(node, Form(), lambda _: Source(rows=True))
    return [kind_alone(each.counting(), rows) for each in found]


def kind_alone(term: Term, rows: int) -> tuple[Term, Kind]:
    """Return a term and its kind, as far as the graph alone shows.

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
    raise BatchLossError(
        f"A part of training_step's loss is made of {doubt}. If a layer with parameters makes it, "
        f"return losses of single rows from there and take their mean in training_step, or take "
        f"the mean with torch.mean or reduction='mean'."
    )

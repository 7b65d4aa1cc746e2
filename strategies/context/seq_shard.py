"""A tensor divided along one dim, of which each rank of a context group has some positions.

To the code of a model it has the shape of the whole; inside is a plain tensor of this rank's
positions with its own autograd. So the gradient of a local tensor is always a local tensor of the
same positions, and no operator needs a rule for its backward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.context.exchange import (
    ContextGroup,
    fetch,
    swap_to_heads,
    swap_to_positions,
)
from boltmesh.strategies.context.positions import (
    Balance,
    Intervals,
    Positions,
    divide,
    divide_by_work,
    document_work,
    merged,
)
from boltmesh.strategies.tensor.runtime.dropout import Draws
from boltmesh.strategies.torch_compat.tensors import (
    make_wrapper,
    subclasses_unasked,
    times_written,
    tree_leaves,
    tree_map_only,
)

T = TypeVar("T")
Mechanism = Literal["auto", "keys", "heads", "ring"]


@dataclass
class ContextState:
    """State that all cut tensors of a run share."""

    group: ContextGroup
    attention: Mechanism = "auto"
    balance: Balance = "contiguous"
    max_gather_bytes: int | None = None
    """Larger gathers are refused; None: no limit."""
    gathered: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors that were gathered, by the function that needed them whole."""

    def __post_init__(self) -> None:
        self.draws = Draws(self.group)
        self._kept: dict[Any, tuple[Tensor, Any]] = {}
        self._work: dict[int, Tensor] = {}
        self._divisions: dict[int, Positions] = {}

    def take_batch(self, batch: Any) -> None:
        """Find the documents of a batch, if its sequence is divided by them. Local."""
        if self.balance == "documents":
            self._work, self._divisions = document_work(tree_leaves(batch)), {}

    def divide(self, length: int) -> Positions:
        """Return the positions of each rank in a sequence of the batch."""
        if self.balance != "documents":
            return divide(length, self.group.size, self.balance)
        known = self._divisions.get(length)
        if known is None:
            longer = min((each for each in self._work if each >= length), default=0)
            work = self._work[longer][:length] if longer else torch.arange(1, length + 1)
            known = self._divisions[length] = divide_by_work(work, self.group.size)
        return known

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self.group.rank

    def once(self, tensor: Tensor, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return what is made of a tensor, once for the layers of a step unless it has a graph.

        Args:
            tensor: Kept alive meanwhile.
            key: What is made of it, beside the tensor.
            make: Makes it.
        """
        if tensor.requires_grad:
            return make()
        at = id(tensor), times_written(tensor), *key
        if at not in self._kept:
            self._kept[at] = tensor, make()
        made: T = self._kept[at][1]
        return made

    def end_step(self) -> None:
        """Drop what was kept for the layers of one step."""
        self._kept.clear()

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


class SeqShard(Tensor):
    """A tensor of which ``local`` has this rank's positions along dim ``seq_dim``.

    That dim is ``(num_outer, S, num_inner)`` flattened, if batch and sequence are one dim.
    """

    local: Tensor
    seq_dim: int
    positions: Positions
    num_outer: int
    num_inner: int
    state: ContextState
    gathered: tuple[Tensor, int, bool] | None
    """Result of a gather, the version of ``local`` then, and whether it has a graph."""
    was_asked: bool
    """Whether a single position of it was fetched."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedError(
            f"{func} got a tensor whose sequence is divided over ranks from code that hides its "
            f"arguments from torch functions. Compiled and scripted modules, and objects that hold "
            f"tensors, do; run this part as plain PyTorch."
        )

    def like(
        self,
        local: Tensor,
        *,
        dim: int | None = None,
        positions: Positions | None = None,
        num_outer: int | None = None,
        num_inner: int | None = None,
    ) -> "SeqShard":
        """Return a tensor that is cut in the same way, except for the given arguments."""
        return make_cut(
            local,
            self.seq_dim if dim is None else dim,
            positions or self.positions,
            self.state,
            self.num_outer if num_outer is None else num_outer,
            self.num_inner if num_inner is None else num_inner,
        )

    def rebuilder(self) -> "Callable[[Tensor], SeqShard]":
        """Return a function that cuts a tensor in the same way, without keeping this one."""
        return partial(
            make_cut,
            dim=self.seq_dim,
            positions=self.positions,
            state=self.state,
            num_outer=self.num_outer,
            num_inner=self.num_inner,
        )

    @property
    def is_simple(self) -> bool:
        """Whether the sequence is a dim of its own."""
        return self.num_outer == self.num_inner == 1


def on_positions(
    run: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Run a row-wise function on this rank's positions; return a cut tensor.

    Args:
        run: Takes plain tensors of this rank's rows; returns one row for each.
        args: Positional arguments, whose tensors are all cut in the same way, or none is.
        kwargs: Keyword arguments.

    Raises:
        UnsupportedError: If only some tensors are cut.
    """
    given = [each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]
    cut = [each for each in given if isinstance(each, SeqShard)]
    if not cut:
        return run(*args, **kwargs)
    if len(cut) < len(given):
        raise UnsupportedError(
            "Experts are given rows of a divided sequence, and whole choices or weights for them."
        )
    own, named = tree_map_only(SeqShard, lambda each: each.local, (args, dict(kwargs)))
    return next(each for each in cut if each.is_floating_point()).like(run(*own, **named))


_run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def run_functions_by(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Set the function that runs functions on cut tensors. Called once, by its module."""
    global _run  # noqa: PLW0603 - the class is below the rules that make tensors of it
    _run = run


def make_cut(
    local: Tensor,
    dim: int,
    positions: Positions,
    state: ContextState,
    num_outer: int = 1,
    num_inner: int = 1,
) -> SeqShard:
    """Return a cut tensor. Local.

    Args:
        local: This rank's positions, plain, ``(..., num_outer * s * num_inner, ...)``.
        dim: The divided dim.
        positions: The positions of each rank.
        state: State of the run.
        num_outer: Times that the dim contains the sequence, as in a flattened batch.
        num_inner: Elements of the dim per position, as in flattened channels.
    """
    shape = list(local.shape)
    own = num_outer * positions.count(state.rank) * num_inner
    if shape[dim] != own:
        raise AssertionError(
            f"dim {dim} of {tuple(shape)} is not {num_outer} x {positions} x {num_inner}"
        )
    shape[dim] = num_outer * positions.length * num_inner
    made: SeqShard = make_wrapper(SeqShard, local, shape)
    made.local, made.seq_dim, made.positions, made.state = local, dim, positions, state
    made.num_outer, made.num_inner, made.gathered = num_outer, num_inner, None
    made.was_asked = False
    return made


def cut(tensor: Tensor, dim: int, state: ContextState) -> SeqShard:
    """Cut a tensor that every rank has whole, ``(..., S, ...)``. Local."""
    positions = state.divide(tensor.shape[dim])
    return make_cut(part_of(tensor, dim, positions, state), dim, positions, state)


def make_whole(value: Any, why: str) -> Any:
    """Return all positions of a cut tensor, in its shape; others unchanged. Collective.

    Args:
        value: A cut tensor, or any other value.
        why: The function that needs it whole, and the reason.

    Raises:
        UnsupportedError: If the result is larger than ``max_gather_bytes``.
    """
    if not isinstance(value, SeqShard):
        return value
    state, local = value.state, value.local
    known = value.gathered
    if known is not None and known[1:] == _moment(local):
        return known[0] if not isinstance(known[0], SeqShard) else make_whole(known[0], why)
    with subclasses_unasked():
        num_bytes = value.shape.numel() * local.element_size()
        if state.max_gather_bytes is not None and num_bytes > state.max_gather_bytes:
            raise UnsupportedError(
                f"{why} of a tensor of shape {tuple(value.shape)} would gather {num_bytes:,} bytes "
                f"on each rank, and max_gather_bytes={state.max_gather_bytes:,}. Set it higher, or "
                f"write this part without looking along the whole sequence."
            )
        state.gathered[why] = max(state.gathered.get(why, 0), num_bytes)
        everything = [merged([(0, value.positions.length)])] * state.group.size
        joined = _fetch_rows(value, everything, "gather")
    value.gathered = joined, *_moment(local)
    return joined


def _moment(local: Tensor) -> tuple[int, bool]:
    """Return the version of a tensor, and whether it has a graph."""
    return times_written(local), local.requires_grad and torch.is_grad_enabled()


def by_channels(value: SeqShard) -> Tensor:
    """Return all positions of this rank's channels, for a cut tensor ``(B, channels, S, states)``.

    For recurrences, which a model computes position by position. Tensors with other dims, or with
    fewer channels than ranks, are gathered instead. Collective.
    """
    state, local = value.state, value.local
    ranks = state.group.size
    if value.ndim != 4 or value.seq_dim != 2 or not value.is_simple or value.shape[1] < ranks:
        whole: Tensor = make_whole(value, "indexing position by position")
        return whole
    if value.gathered is not None and value.gathered[1:] == _moment(local):
        return value.gathered[0]
    channels = replace(divide(value.shape[1], ranks), are_channels=True)
    heads = _heads_of(channels)
    with subclasses_unasked():
        made = swap_to_heads(local, value.positions, heads, state.group, "channels")
    taken = make_cut(made, 1, channels, state)
    value.gathered = taken, *_moment(local)
    return taken


def by_positions(value: SeqShard, like: SeqShard) -> SeqShard:
    """Convert channels from :func:`by_channels` to positions. Collective.

    Args:
        value: ``(B, channels, S)`` or ``(B, channels, S, states)``, divided along channels.
        like: A cut tensor of that shape, with the positions of the result.
    """
    local, positions, state = value.local, like.positions, value.state
    with subclasses_unasked():
        rows = local.unsqueeze(-1) if local.ndim == 3 else local
        heads = _heads_of(value.positions)
        made = swap_to_positions(rows, positions, heads, state.group, "channels")
        return like.like(made.squeeze(-1) if local.ndim == 3 else made)


def _heads_of(channels: Positions) -> list[list[int]]:
    return [[each for part in parts for each in range(*part)] for parts in channels.parts]


def make_all_whole(tree: Any, why: str) -> Any:
    """Return a nested value with every cut tensor whole. Collective over the group."""
    return tree_map_only(SeqShard, lambda each: make_whole(each, why), tree)


def moved_to(value: SeqShard, positions: Positions) -> SeqShard:
    """Return a tensor of equal shape with another division. Collective if divisions differ."""
    if value.positions.parts == positions.parts:
        return value
    return value.like(_fetch_rows(value, positions.parts, "move"), positions=positions)


def _fetch_rows(value: SeqShard, wants: Sequence[Intervals], purpose: str) -> Tensor:
    """Return the positions that this rank wants, as a plain tensor. Collective."""
    own = value.positions.count(value.state.rank)
    sizes = value.num_outer, own, value.num_inner
    rows: Tensor = value.local.unflatten(value.seq_dim, sizes)  # type: ignore[no-untyped-call]
    rows = fetch(rows, value.seq_dim + 1, value.positions, wants, value.state.group, purpose)
    return rows.flatten(value.seq_dim, value.seq_dim + 2)


def part_of(
    tensor: Tensor,
    dim: int,
    positions: Positions,
    state: ContextState,
    num_outer: int = 1,
    num_inner: int = 1,
) -> Tensor:
    """Return this rank's positions of a tensor that every rank has whole, plain. Local.

    Layers of a step that cut the same mask or table share one part. Arguments as in ``make_cut``,
    with ``num_outer * S * num_inner`` elements along ``dim``.
    """
    own = positions.parts[state.rank]

    def take() -> Tensor:
        sizes = num_outer, positions.length, num_inner
        rows: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
        if len(own) == 1:
            start, stop = own[0]
            return rows.narrow(dim + 1, start, stop - start).flatten(dim, dim + 2)
        return taken_along(rows, dim + 1, own).flatten(dim, dim + 2)

    return state.once(tensor, ("part", dim, own, num_outer, num_inner), take)


def taken_along(tensor: Tensor, dim: int, intervals: Sequence[tuple[int, int]]) -> Tensor:
    """Return the elements of some ranges of ``dim``, joined along it."""
    if len(intervals) == 1 and intervals[0] == (0, tensor.shape[dim]):
        return tensor
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in intervals]
    return torch.cat(pieces, dim) if pieces else tensor.narrow(dim, 0, 0)


@contextmanager
def step_ended(state: ContextState) -> Iterator[None]:
    """Context of a step; afterwards nothing is kept for its layers."""
    try:
        yield
    finally:
        state.end_step()

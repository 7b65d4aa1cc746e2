"""Sequence parallelism: between its matrix products, each rank has a part of the sequence.

A stack of blocks takes the whole sequence, divides it, and returns the whole. Inside, the input of
column products is gathered once, and its gradients are summed and scattered; row products give
each rank its part of their sum. So norms, dropout and the residual stream hold ``1 / size`` of the
activations, at the traffic of plain tensor parallelism.

A length that does not divide is padded with copies of the last position. Only position-wise code
sees them: each gather removes them, so attention does not, and no gradient reaches them. They are
copies, because a norm of zeros may have no finite gradient.

Beside a context axis, the whole is this rank's positions of a divided tensor: these are divided
again over the tensor ranks, and gathered values become tensors divided over the context axis.

Shapes: S positions of the whole along ``dim``, ``s = ceil(S / ranks)`` of a part. Other dims and
dtypes are kept.

Source: Korthikanti et al. 2022, section 4.2, https://arxiv.org/abs/2205.05198
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module
from typing_extensions import Self, override

from boltmesh.errors import LayoutError
from boltmesh.strategies.patch import Around, Changes
from boltmesh.strategies.tensor.plan import ExitPoint, GatherPoint, TensorPlan, WholePoint
from boltmesh.strategies.tensor.runtime.collectives import (
    TensorGroup,
    gather_parts,
    gather_sequence,
    scatter_sum,
    take_part,
)
from boltmesh.strategies.torch_compat.autograd import is_in_backward
from boltmesh.strategies.torch_compat.tensors import times_written


class SequenceParts:
    """Divides and joins the activations of one stack of blocks.

    The length of the whole is known from where the stack was entered. Blocks that are recomputed
    in a backward pass may belong to an earlier entry: one with parts of the same length.
    """

    def __init__(self, group: TensorGroup, dim: int) -> None:
        self._group = group
        self.dim = dim
        """Dim of the sequence."""
        self.is_cut_by_stages = False
        """Whether other ranks run some of the blocks: they do not know the lengths at the stack's
        entry, so all lengths must divide."""
        self._entry = _Length(0, 0)
        self._awaited: WeakSet[_Length] = WeakSet()
        """Lengths of entries whose backward pass is not over."""
        self._entries = [self._entry]
        """Entries that the running block may belong to, one of each length."""
        self._gathered: tuple[Tensor, int, Tensor] | None = None
        """The part gathered last, its version then, and the whole."""

    def split(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a replicated tensor ``(..., S, ...)``: ``(..., s, ...)``.

        s is S / R rounded up: the last position is repeated. Its gradient is gathered.

        Raises:
            LayoutError: If the sequence is too short, or does not divide between pipeline stages.
        """
        total = whole.shape[self.dim]
        whole, cut_again = opened(whole)
        entry = _Length(whole.shape[self.dim], total, cut_again)
        if not entry.whole:
            raise LayoutError(
                f"A sequence of {total} positions leaves a rank of the context axis without any, "
                f"and sequence_parallel divides those of each. Pad sequences to as many positions "
                f"as there are ranks, or set strategy.sequence_parallel=false."
            )
        if self.is_cut_by_stages and entry.whole % self._group.size:
            raise LayoutError(
                f"A stack of blocks that lies on several stages of a pipeline was entered with "
                f"{entry.whole} positions, which {self._group.size} tensor ranks do not divide. "
                f"Pad sequences to a multiple of {self._group.size}, or set "
                f"strategy.sequence_parallel=false."
            )
        self._entry = entry
        self._awaited.add(entry)
        self.begin()
        filled = self._filled(whole, whole.narrow(self.dim, entry.whole - 1, 1).detach())
        part = take_part(filled, self._group, self.dim)
        return cast("Tensor", _HeldLength.apply(part, entry))  # type: ignore[no-untyped-call]

    def join(self, part: Tensor) -> Tensor:
        """Return the whole ``(..., S, ...)`` of a part, for replicated computations. Collective."""
        return self._cut(gather_parts(part, self._group, self.dim))

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a replicated tensor ``(..., S, ...)``, within the stack."""
        whole = opened(whole)[0]
        filled = self._filled(whole, whole.narrow(self.dim, -1, 1).detach())
        return take_part(filled, self._group, self.dim)

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole ``(..., S, ...)`` of a part, for divided computations. Collective.

        An input of several modules is gathered once, until `forget`.
        """
        if self._gathered is not None:
            earlier, version, whole = self._gathered
            if earlier is part and version == times_written(part):
                return whole
        whole = self._cut(gather_sequence(part, self._group, self.dim))
        self._gathered = part, times_written(part), whole
        return whole

    def scatter(self, part: Tensor) -> Tensor:
        """Sum partial ``(..., S, ...)`` over ranks and return this rank's part. Collective."""
        part = opened(part)[0]
        length = part.shape[self.dim]
        filled = self._filled(part, torch.zeros_like(part.narrow(self.dim, length - 1, 1)))
        return scatter_sum(filled, self._group, self.dim)

    def begin(self) -> None:
        """Find the entries that a block may belong to. Called before it runs."""
        entries = [self._entry]
        if is_in_backward():
            entries = [each for each in self._awaited if not each.is_over] or entries
        self._entries = list({(each.whole, each.total): each for each in entries}.values())

    def forget(self) -> None:
        """Release activations. Called after a block."""
        self._gathered = None

    def _filled(self, whole: Tensor, last: Tensor) -> Tensor:
        missing = -whole.shape[self.dim] % self._group.size
        return torch.cat([whole, *[last] * missing], self.dim) if missing else whole

    def _cut(self, filled: Tensor) -> Tensor:
        if self.is_cut_by_stages:
            return filled
        entry = self._entry_of(filled.shape[self.dim])
        if entry.whole < filled.shape[self.dim]:
            filled = filled.narrow(self.dim, 0, entry.whole).contiguous()
        return filled if entry.cut_again is None else entry.cut_again(filled)

    @property
    def is_of_context(self) -> bool:
        """Whether the stack was entered with a sequence that a context axis divides."""
        return self._entry.cut_again is not None

    def _entry_of(self, filled: int) -> "_Length":
        """Return the entry whose sequence was padded to ``filled`` positions."""
        entries = self._entries
        fitting = [each for each in entries if 0 <= filled - each.whole < self._group.size]
        if not fitting:
            raise LayoutError(
                f"Dimension {self.dim} of an activation has {filled} positions on all ranks, and "
                f"the stack of blocks was entered with sequences of "
                f"{sorted({each.whole for each in entries})}. Set strategy.sequence_parallel=false."
            )
        if len(fitting) > 1:
            raise LayoutError(
                f"Blocks are computed again in the backward pass, for sequences of "
                f"{sorted(each.total for each in fitting)} whose parts are equally long. Give them "
                f"lengths that {self._group.size} ranks divide, or set "
                "strategy.sequence_parallel=false."
            )
        return fitting[0]

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


def opened(value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Return this rank's positions of a tensor that a context axis divides, and the inverse.

    For any other tensor return it unchanged, and None.
    """
    rebuilder = getattr(value, "rebuilder", None)
    return (value, None) if rebuilder is None else (cast("Any", value).local, rebuilder())


class _Length:
    """Lengths of the sequences of one forward pass.

    Args:
        whole: Positions of all tensor ranks together.
        total: Positions of the whole sequence; more than that beside a context axis.
        cut_again: Makes positions of this rank a tensor that a context axis divides; None without
            a context axis.
    """

    def __init__(
        self, whole: int, total: int, cut_again: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.whole, self.total, self.cut_again = whole, total, cut_again
        self.is_over = False
        """Whether its backward pass has reached the stack's entry."""


class _HeldLength(Function):
    """Holds a length as long as autograd may reach the stack's entry with it."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, entry: _Length) -> Tensor:
        ctx.entry = entry
        return part.view_as(part)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.entry.is_over = True
        return gradient, None


@dataclass(frozen=True)
class RunningStack:
    """Blocks that run one after the other on a part of the sequence."""

    blocks: tuple[str, ...]
    entry: GatherPoint
    exit: ExitPoint
    parts: SequenceParts
    whole: tuple[str, ...] = ()
    """Modules within blocks that run on the whole sequence."""

    def holds(self, name: str) -> bool:
        """Whether a module or parameter computes with parts of the sequence."""
        return is_below(name, self.blocks) and not is_below(name, self.whole)

    def with_whole_sequence(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a block's arguments with the sequence joined. Collective over the group."""
        return with_argument(args, kwargs, self.entry.argument, self.parts.join)

    def with_own_part(self, output: Any) -> Any:
        """Return a block's output with this rank's part of the sequence."""
        return with_output(output, self.exit, self.parts.take)

    def with_joined_output(self, output: Any) -> Any:
        """Return a block's output with the sequence joined. Collective over the group."""
        return with_output(output, self.exit, self.parts.join)


class Stacks:
    """The stacks of a plan in a model.

    Args:
        root: The model.
        plan: The plan; without sequence parallelism there are no stacks.
        group: The ranks that share the model.

    Raises:
        LayoutError: A stack's blocks, entry or exit are not in the model.
    """

    def __init__(self, root: Module, plan: TensorPlan, group: TensorGroup) -> None:
        self._root = root
        self._gathers: dict[str, list[int | str]] = defaultdict(list)
        self._fed: frozenset[str] = frozenset()
        self._whole: list[tuple[WholePoint, SequenceParts]] = []
        self.all: list[RunningStack] = []
        if plan.sequence is None:
            return
        entries = {point.module: point for point in plan.sequence.entries}
        exits = {point.module: point for point in plan.sequence.exits}
        for first, last in plan.sequence.stacks:
            if first not in entries or last not in exits:
                raise LayoutError(
                    f"The tensor plan divides sequences from '{first}' to '{last}', and does not "
                    "say which argument is divided, and which output is joined."
                )
            blocks = tuple(_between(root, first, last))
            parts = SequenceParts(group, plan.sequence.dim)
            points = [each for each in plan.sequence.whole if is_below(each.module, blocks)]
            self._whole += [(each, parts) for each in points]
            names = tuple(each.module for each in points)
            self.all.append(RunningStack(blocks, entries[first], exits[last], parts, names))
        self._fed = frozenset(plan.sequence.fed)
        for point in plan.sequence.gathers:
            self._gathers[point.module].append(point.argument)

    def around(self, name: str) -> RunningStack | None:
        """Return the stack that contains a module or parameter."""
        return next((stack for stack in self.all if stack.holds(name)), None)

    def is_fed(self, name: str) -> bool:
        """Whether a module's input was gathered, so that its gradient is summed there."""
        return name in self._fed

    def put_on(self, changes: Changes) -> None:
        """Wrap the blocks and the modules that gather. The last wrappers that a plan adds."""
        for name, arguments in self._gathers.items():
            stack = self.around(name)
            if stack is None:
                raise LayoutError(f"The tensor plan gathers sequences for '{name}' in no stack.")
            changes.wrap(self._root.get_submodule(name), GatherSequence(stack.parts, arguments))
        for point, parts in self._whole:
            changes.wrap(self._root.get_submodule(point.module), OnWhole(parts, point))
        for stack in self.all:
            for name in stack.blocks:
                entry = stack.entry if name == stack.entry.module else None
                exit_ = stack.exit if name == stack.exit.module else None
                changes.wrap(self._root.get_submodule(name), InStack(stack.parts, entry, exit_))


class GatherSequence:
    """Wrapper of a module that takes the whole sequence in some of its arguments."""

    def __init__(self, parts: SequenceParts, arguments: list[int | str]) -> None:
        self._parts = parts
        self._arguments = arguments

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        for argument in self._arguments:
            args, kwargs = with_argument(args, kwargs, argument, self._parts.gather)
        return forward(*args, **kwargs)


class OnWhole:
    """Wrapper of a module in a stack that takes and returns the whole sequence."""

    def __init__(self, parts: SequenceParts, point: WholePoint) -> None:
        self._parts, self._point = parts, point
        self._exit = ExitPoint(point.module, point.place)

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over the group."""
        join = self._parts.gather if self._point.sums else self._parts.join
        args, kwargs = with_argument(args, kwargs, self._point.argument, join)
        return with_output(forward(*args, **kwargs), self._exit, self._parts.take)


class InStack:
    """Wrapper of a block: the first divides the stack's input, the last joins its output."""

    is_compiled = False
    """Within it all blocks are equal, and the length of the sequence is known."""

    def __init__(
        self, parts: SequenceParts, entry: GatherPoint | None, exit_: ExitPoint | None
    ) -> None:
        self._parts = parts
        self._entry = entry
        self._exit = exit_

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if self._entry is not None:
            args, kwargs = with_argument(args, kwargs, self._entry.argument, self._parts.split)
        self._parts.begin()
        try:
            output = forward(*args, **kwargs)
        finally:
            self._parts.forget()
        if self._exit is None:
            return output
        return with_output(output, self._exit, self._parts.join)


def is_below(name: str, modules: Sequence[str]) -> bool:
    """Whether a module or parameter is one of some modules, or within one."""
    return any(f"{name}.".startswith(f"{each}.") for each in modules)


def with_output(output: Any, point: ExitPoint, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the output of a module with the divided tensor at a place changed.

    Raises:
        LayoutError: If there is none.
    """
    if point.place is None and isinstance(output, Tensor):
        return change(output)
    if isinstance(point.place, int) and type(output) in {tuple, list} and point.place < len(output):
        values = list(output)
        values[point.place] = change(values[point.place])
        return type(output)(values)
    if isinstance(point.place, str) and isinstance(output, dict):
        output[point.place] = change(output[point.place])
        return output
    raise LayoutError(
        f"'{point.module}' gave a divided tensor at {point.place!r} when the tensor plan was made, "
        f"and gives a {type(output).__name__} without it. Give the same kind of value in every "
        f"batch, or set strategy.sequence_parallel=false if it is true."
    )


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: int | str, change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with one of them changed.

    Raises:
        LayoutError: If the argument is missing.
    """
    if isinstance(argument, int) and argument < len(args):
        return (*args[:argument], change(args[argument]), *args[argument + 1 :]), kwargs
    if isinstance(argument, str) and argument in kwargs:
        return args, {**kwargs, argument: change(kwargs[argument])}
    raise LayoutError(
        f"A module took its sequence as argument {argument!r} when the tensor plan was made, and "
        "is called without it. Set strategy.sequence_parallel=false."
    )


def _between(root: Module, first: str, last: str) -> Iterator[str]:
    """Yield the names of the modules from the first to the last of a list."""
    parent, _, start = first.rpartition(".")
    other, _, end = last.rpartition(".")
    names = [name for name, _ in root.get_submodule(parent).named_children()]
    if parent != other or start not in names or end not in names[names.index(start) :]:
        raise LayoutError(
            f"A stack from '{first}' to '{last}' is not one list of modules, so it is not known "
            "which blocks lie between. Set strategy.sequence_parallel=false."
        )
    for name in names[names.index(start) : names.index(end) + 1]:
        yield f"{parent}.{name}" if parent else name

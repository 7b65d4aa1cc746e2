"""Stacks of blocks between which each rank has a part of the sequence."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.plan import ExitPoint, GatherPoint, TensorPlan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.param_swap import Around, Changes
from boltmesh.strategies.tensor.runtime.sequence import SequenceParts


@dataclass(frozen=True)
class RunningStack:
    """Blocks that run one after the other on a part of the sequence."""

    blocks: tuple[str, ...]
    entry: GatherPoint
    exit: ExitPoint
    parts: SequenceParts

    def holds(self, name: str) -> bool:
        """Whether a module or parameter lies in one of the blocks."""
        return any(f"{name}.".startswith(f"{block}.") for block in self.blocks)

    def with_whole_sequence(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a block with the sequence joined. Collective over the group."""
        return _replaced(args, kwargs, self.entry.argument, self.parts.join)

    def with_own_part(self, output: Any) -> Any:
        """Return the output of a block with this rank's part of the sequence."""
        return _changed(output, self.exit, self.parts.take)

    def with_joined_output(self, output: Any) -> Any:
        """Return the output of a block with the sequence joined. Collective over the group."""
        return _changed(output, self.exit, self.parts.join)


class Stacks:
    """The stacks of a plan, in a model.

    Args:
        root: The model.
        plan: Whose sequence is divided, or is not.
        group: Ranks that share it.

    Raises:
        LayoutError: The blocks of a stack, or where it is entered and left, are not in the model.
    """

    def __init__(self, root: Module, plan: TensorPlan, group: TensorGroup) -> None:
        self._root = root
        self._gathers: dict[str, list[int | str]] = defaultdict(list)
        self._fed: frozenset[str] = frozenset()
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
            self.all.append(RunningStack(blocks, entries[first], exits[last], parts))
        self._fed = frozenset(plan.sequence.fed)
        for point in plan.sequence.gathers:
            self._gathers[point.module].append(point.argument)

    def around(self, name: str) -> RunningStack | None:
        """Return the stack that a module or parameter lies in."""
        return next((stack for stack in self.all if stack.holds(name)), None)

    def is_fed(self, name: str) -> bool:
        """Whether what a module takes was gathered, so that its gradient is summed there."""
        return name in self._fed

    def put_on(self, changes: Changes) -> None:
        """Wrap the blocks and the modules that gather: the last wrappers that a plan puts on."""
        for name, arguments in self._gathers.items():
            stack = self.around(name)
            if stack is None:
                raise LayoutError(f"The tensor plan gathers sequences for '{name}' in no stack.")
            changes.wrap(self._root.get_submodule(name), GatherSequence(stack.parts, arguments))
        for stack in self.all:
            for name in stack.blocks:
                entry = stack.entry if name == stack.entry.module else None
                exit_ = stack.exit if name == stack.exit.module else None
                changes.wrap(self._root.get_submodule(name), InStack(stack.parts, entry, exit_))


class GatherSequence:
    """Around a module that takes the whole sequence in some of its arguments."""

    def __init__(self, parts: SequenceParts, arguments: list[int | str]) -> None:
        self._parts = parts
        self._arguments = arguments

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        for argument in self._arguments:
            args, kwargs = _replaced(args, kwargs, argument, self._parts.gather)
        return forward(*args, **kwargs)


class InStack:
    """Around a block: the first divides what enters the stack, the last joins what leaves it."""

    def __init__(
        self, parts: SequenceParts, entry: GatherPoint | None, exit_: ExitPoint | None
    ) -> None:
        self._parts = parts
        self._entry = entry
        self._exit = exit_

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if self._entry is not None:
            args, kwargs = _replaced(args, kwargs, self._entry.argument, self._parts.split)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._parts.forget()
        if self._exit is None:
            return output
        return _changed(output, self._exit, self._parts.join)


def _changed(output: Any, point: ExitPoint, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the output of a block with its sequence changed.

    Raises:
        LayoutError: If it is not where it was.
    """
    if point.place is None and isinstance(output, Tensor):
        return change(output)
    if isinstance(point.place, int) and type(output) in {tuple, list}:
        values = list(output)
        values[point.place] = change(values[point.place])
        return type(output)(values)
    if isinstance(point.place, str) and isinstance(output, dict):
        output[point.place] = change(output[point.place])
        return output
    raise LayoutError(
        f"'{point.module}' gave its sequence at {point.place!r} when the tensor plan was made, "
        f"and gives a {type(output).__name__}. Set strategy.sequence_parallel=false."
    )


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: int | str, change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which one is changed.

    Raises:
        LayoutError: It is missing.
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
    """The modules from the first to the last of a list."""
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

"""Stacks of blocks between which each rank has a part of the sequence."""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.execution.changes import Around, Changes
from boltmesh.strategies.tensor.execution.collectives import reduce_gradient
from boltmesh.strategies.tensor.execution.dropout import DrawOwn, Draws
from boltmesh.strategies.tensor.execution.group import TensorGroup
from boltmesh.strategies.tensor.execution.sequence import SequenceParts
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.torch_compat import tree_leaves, tree_map_only

_MADE_INSIDE = "boltmesh_made_in_stack"
"""On tensors that a block of a stack returns: other blocks use them as they are."""


@dataclass(frozen=True)
class Stack:
    """Blocks that run one after the other on a part of the sequence."""

    blocks: tuple[str, ...]
    parts: SequenceParts

    def holds(self, name: str) -> bool:
        """Whether a module or parameter lies in one of the blocks."""
        return any(f"{name}.".startswith(f"{block}.") for block in self.blocks)


class Stacks:
    """The stacks of a plan, in a model.

    Args:
        root: The model.
        plan: Whose sequence is divided, or is not.
        group: Ranks that share it.

    Raises:
        LayoutError: The first and the last block of a stack are not in one list of modules.
    """

    def __init__(self, root: Module, plan: TensorPlan, group: TensorGroup) -> None:
        self._root = root
        self._plan = plan
        self._group = group
        self._sequence = plan.sequence
        self.all: list[Stack] = []
        for first, last in () if plan.sequence is None else plan.sequence.stacks:
            blocks = tuple(_between(root, first, last))
            self.all.append(Stack(blocks, SequenceParts(group, plan.sequence.dim)))

    def around(self, name: str) -> Stack | None:
        """Return the stack that a module or parameter lies in."""
        return next((stack for stack in self.all if stack.holds(name)), None)

    def partial(self) -> Iterator[str]:
        """Give the whole parameters whose gradients each rank has for its positions only.

        A row's bias is not one of them: it is added behind the sum, which sees to its gradient.
        """
        rows = {
            name.rpartition(".")[0]
            for entry in self._plan.sharded.values()
            if entry.style == "row"
            for name in entry.names
        }
        sharded = {name for entry in self._plan.sharded.values() for name in entry.names}
        for name, _ in self._root.named_parameters(remove_duplicate=False):
            is_free = name not in sharded and name.rpartition(".")[0] not in rows
            if is_free and self.around(name) is not None:
                yield name

    def put_on(self, changes: Changes, draws: Draws) -> None:
        """Wrap the blocks and the modules that gather. The last wrappers that a plan puts on."""
        if self._sequence is None:
            return
        gathered: dict[str, list[int | str]] = defaultdict(list)
        for point in self._sequence.gathers:
            gathered[point.module].append(point.argument)
        for name, arguments in gathered.items():
            stack = self.around(name)
            if stack is None:
                raise LayoutError(f"The tensor plan gathers sequences for '{name}' in no stack.")
            changes.wrap(self._root.get_submodule(name), Gather(stack.parts, arguments))
        for stack in self.all:
            for name in stack.blocks:
                block = self._root.get_submodule(name)
                changes.wrap(block, DrawOwn(draws))
                around = InStack(
                    block,
                    stack.parts,
                    self._group,
                    is_first=name == stack.blocks[0],
                    is_last=name == stack.blocks[-1],
                )
                changes.wrap(block, around)


class Gather:
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
    """Around a block: the first divides its activations, the last joins them.

    Other arguments that have a gradient, such as an encoder's states, are alike on all ranks,
    which use them for their own parts, unless they were made in the stack.
    """

    def __init__(
        self,
        block: Module,
        parts: SequenceParts,
        group: TensorGroup,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._block = block
        self._parts = parts
        self._group = group
        self._is_first = is_first
        self._is_last = is_last

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        place = self._activation(args, kwargs)
        activation = args[place] if isinstance(place, int) else kwargs[place]
        args, kwargs = _replaced(args, kwargs, place, lambda _: None)
        args, kwargs = tree_map_only(Tensor, self._entered, (args, kwargs))
        if self._is_first:
            activation = self._parts.split(activation)
        args, kwargs = _replaced(args, kwargs, place, lambda _: activation)
        output = forward(*args, **kwargs)
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                setattr(value, _MADE_INSIDE, True)
        return self._joined(output) if self._is_last else output

    def _activation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
        """The place or keyword of what goes from block to block: the first argument."""
        parameters = list(inspect.signature(type(self._block).forward).parameters)
        named = parameters[1] if len(parameters) > 1 else ""
        for place, value in [*enumerate(args), (named, kwargs.get(named)), *kwargs.items()]:
            if isinstance(value, Tensor) and value.is_floating_point():
                return place
        raise LayoutError(
            f"Sequence parallelism divides the first activation that a block takes, and "
            f"{type(self._block).__name__} takes none. Set strategy.sequence_parallel=false."
        )

    def _entered(self, value: Tensor) -> Tensor:
        if not value.requires_grad or hasattr(value, _MADE_INSIDE):
            return value
        return reduce_gradient(value, self._group)

    def _joined(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._parts.join(output)
        if type(output) in {tuple, list} and output and isinstance(output[0], Tensor):
            return type(output)([self._parts.join(output[0]), *output[1:]])
        raise LayoutError(
            f"Sequence parallelism joins a tensor, or the first of a tuple, behind the last "
            f"block, which returns a {type(output).__name__}. Set strategy.sequence_parallel=false."
        )


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: int | str, change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which one is changed; it may be missing where it has a default."""
    if isinstance(argument, int):
        if argument < len(args):
            args = (*args[:argument], change(args[argument]), *args[argument + 1 :])
    elif argument in kwargs:
        kwargs = {**kwargs, argument: change(kwargs[argument])}
    return args, kwargs


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

"""Runs a model in which only one block of each kind has values.

The other blocks return their input as their output, or run with the parameters of the first of
their kind and their own settings, so that interactions between blocks are those of training.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.deferred_initialization.materialize import own_tensors
from boltmesh.strategies.deferred_initialization.recording import tensors_of
from boltmesh.strategies.patch import members_replaced, patched
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.torch_compat.tensors import tree_leaves, tree_map_only

_REGISTERED = ("_parameters", "_buffers", "_modules")

_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype)


def kinds_of(blocks: Mapping[str, Module], plan: TensorPlan) -> dict[str, str]:
    """Return, for the name of each block, the first one of its kind, which runs in the same way.

    Blocks of one kind have one class, modules with equal settings, parameters of equal shapes, and
    equal plans. A number that is a block's own index in its list is ignored.

    Args:
        blocks: Blocks by dotted name, in the order in which they run.
        plan: Plan of the model.
    """
    firsts: dict[Any, str] = {}
    return {
        name: firsts.setdefault((_settings(name, block), _planned(name, plan)), name)
        for name, block in blocks.items()
    }


def lasts_of(firsts: Mapping[str, str]) -> dict[str, str]:
    """Return the last block of each kind by the name of the first.

    Args:
        firsts: The first of its kind by name of each block, in the order in which they run.
    """
    return {first: name for name, first in firsts.items()}


def _settings(name: str, block: Module) -> tuple[Any, ...]:
    last = name.rpartition(".")[2]
    place = int(last) if last.isdigit() else None
    settings: list[Any] = [
        (path, tuple(each.shape), each.dtype, each.requires_grad)
        for path, each in block.named_parameters(remove_duplicate=False)
    ]
    for path, module in block.named_modules():
        own = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN) and not (type(value) is int and value == place)
        }
        settings.append((path, type(module), repr(sorted(own.items()))))
    return tuple(settings)


def _planned(block: str, plan: TensorPlan) -> tuple[Any, ...]:
    start = f"{block}."
    sharded = [
        (name.removeprefix(start), each.dim, each.sections, each.style)
        for each in plan.sharded.values()
        for name in each.names
        if name.startswith(start)
    ]
    names = [
        tuple(name.removeprefix(start) for name in each if name.startswith(start))
        for each in (plan.partial, plan.boundaries, plan.fed, plan.local_dropouts)
    ]
    return tuple(sharded), tuple(names), plan.passed.get(block, ())


class BlockShapes:
    """Records during a step in which order blocks run, and which return their input's shape."""

    def __init__(self) -> None:
        self._seen: dict[str, set[object]] = {}

    def allow(self, block: str, first: str) -> bool:
        """Whether a block can return its input in place of the first one's output."""
        seen, given = self._seen.get(block, set()), self._seen.get(first, set())
        return len(seen) == 1 and seen == given and None not in seen

    def in_order(self, blocks: Iterable[str]) -> list[str]:
        """Return the blocks in the order in which they first ran, then those that did not run.

        A model may run its encoders in another order than it holds them (CoCa of open_clip).
        """
        return list(dict.fromkeys([*self._seen, *blocks]))

    @contextmanager
    def watching(self, blocks: Mapping[str, Module]) -> Iterator[None]:
        """Context in which calls of blocks are recorded."""
        with ExitStack() as stack:
            for name, each in blocks.items():
                note = partial(self._note, name)
                stack.enter_context(each.register_forward_hook(note, with_kwargs=True))
            yield

    def _note(self, name: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        handed = _passed(args, kwargs, output)
        self._seen.setdefault(name, set()).add(
            None if handed is None else tuple(_looks(each) for each in tree_leaves(handed))
        )


@contextmanager
def parameters_lent(blocks: Mapping[str, Module], firsts: Mapping[str, str]) -> Iterator[None]:
    """Context in which blocks hold the parameters of the first one of their kind.

    They also hold its other tensors without values, such as buffers of a deferred model.

    Args:
        blocks: Blocks by dotted name.
        firsts: First block of the kind, by name of each block that borrows.
    """
    values = (
        (module, key, getattr(lender, key))
        for name, first in firsts.items()
        for module, lender in zip(blocks[name].modules(), blocks[first].modules(), strict=True)
        for key in _borrowed(module)
    )
    with members_replaced(values):
        yield


def _borrowed(module: Module) -> list[str]:
    """Return the attributes that a module borrows: parameters, lists of them, and meta tensors."""
    others = [each for each in vars(module).items() if each[0] not in _REGISTERED]
    return [
        key
        for key, value in (*own_tensors(module), *others)
        if any(isinstance(each, Parameter) or each.is_meta for each in tensors_of(value))
    ]


@contextmanager
def blocks_passed(blocks: Mapping[str, Module], firsts: Mapping[str, str]) -> Iterator[None]:
    """Context in which blocks return their input, in the shape of the first one's output.

    Args:
        blocks: Blocks by dotted name.
        firsts: First block of the kind, which runs earlier, by name of each block that is skipped.
    """
    given: dict[str, Any] = {}
    with ExitStack() as stack:
        for first in set(firsts.values()):
            stack.enter_context(blocks[first].register_forward_hook(partial(_keep, given, first)))
        for name, first in firsts.items():
            stack.enter_context(patched(blocks[name], forward=partial(_pass_on, given, first)))
        yield


def _keep(given: dict[str, Any], name: str, module: Module, args: Any, output: Any) -> None:
    given[name] = tree_map_only(Tensor, Tensor.detach, output)


def _pass_on(given: dict[str, Any], first: str, /, *args: Any, **kwargs: Any) -> Any:
    output = _passed(args, kwargs, given[first])
    assert output is not None
    # As a block's output is: code behind it may write there, with the input kept for gradients.
    return tree_map_only(Tensor, Tensor.clone, output)


def _passed(args: Any, kwargs: Any, output: Any) -> Any:
    """Return an output with its first float tensor replaced by the input; None if they differ.

    Other members of the output do not change, such as a bias that later blocks use.
    """
    taken = next((each for each in _floats((args, kwargs))), None)
    first = next((each for each in _floats(output)), None)
    if taken is None or first is None:
        return None
    if taken.shape != first.shape or taken.dtype != first.dtype:
        return None
    return tree_map_only(Tensor, lambda each: taken if each is first else each, output)


def _looks(value: Any) -> Any:
    """Return shape and dtype of a tensor, which may have no data; else the class of a value."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _floats(tree: Any) -> Iterable[Tensor]:
    return (
        each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.is_floating_point()
    )

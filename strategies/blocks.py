"""Finds the repeated blocks of a model without any description of it.

Used for the units of ZeRO, the units of pipeline stages, activation checkpointing, and the kinds of
blocks of a tensor plan.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from traceback import walk_tb
from typing import Any

from torch import nn
from torch.nn import Module

from boltmesh.lightning_import import ROOTS

LISTS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
"""Containers of repeated blocks."""

MIN_SHARE = 1 / 200
"""Least share of the model's parameters for which a child of ``nn.Sequential`` is a block alone."""

_Signature = tuple[tuple[str, tuple[int, ...]], ...]


def find_blocks(root: Module) -> dict[str, Module]:
    """Return the repeated blocks by dotted name, in the order of their names in the model.

    In a list, or in the lists of a list with one for each layer: if a class repeats with the same
    shapes, all its members are blocks. Else: modules that an ``nn.Sequential`` calls, and siblings
    of the same class and shapes. Blocks are not nested, and ``root`` is never a block.
    """
    return _Search(root).blocks()


def failing_module(error: BaseException) -> Module | None:
    """Return the innermost module whose code an error came from."""
    innermost_module = None
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, Module):
            innermost_module = module
    return innermost_module


def has_forward(module: Module) -> bool:
    """Whether the module can be called, rather than only hold other modules.

    The forward of a LightningModule only raises.
    """
    for kind in type(module).__mro__:
        if "forward" in vars(kind):
            return kind is not Module and kind.__module__.partition(".")[0] not in ROOTS
    return False


class _Search:
    """One search of a model."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self.total = sum(each.numel() for each in root.parameters())
        self.repeated = _repeated_kinds(root)

    def blocks(self) -> dict[str, Module]:
        return dict(self._within(self.root, "", set()))

    def _within(
        self, module: Module, prefix: str, seen: set[Module]
    ) -> Iterator[tuple[str, Module]]:
        """Yield the blocks below a module that is not a block."""
        children = [(name, each) for name, each in module.named_children() if each not in seen]
        seen.update(each for _, each in children)
        own = (each for _, each in children if not is_torch_class(each))
        twins = Counter(map(_kind_and_shapes, own))
        for name, child in children:
            path = f"{prefix}{name}"
            if not can_be_block(child):
                yield from self._within(child, f"{path}.", seen)
            elif isinstance(module, LISTS) and _kind(child) in self.repeated:
                yield path, child
            elif below := list(self._within(child, f"{path}.", seen)):
                yield from below
            elif self._is_called_in_turn(module, child) or (
                not is_torch_class(child) and twins[_kind_and_shapes(child)] > 1
            ):
                yield path, child

    def _is_called_in_turn(self, parent: Module, child: Module) -> bool:
        if not isinstance(parent, nn.Sequential):
            return False
        return sum(each.numel() for each in child.parameters()) >= MIN_SHARE * self.total


def _repeated_kinds(root: Module) -> set[object]:
    """Return the kinds of blocks that one list holds twice or more with the same shapes.

    A neighbour of the same class may have some parameters more.
    """
    kinds: set[object] = set()
    for each in root.modules():
        if isinstance(each, LISTS):
            candidates = [child for child in _members(each) if can_be_block(child)]
            counts = Counter(map(_kind_and_shapes, candidates))
            kinds.update(kind for (kind, _), count in counts.items() if count > 1)
            # The first block of T5 has one more parameter than the others.
            kinds.update(
                type(one)
                for one, other in pairwise(candidates)
                if type(one) is type(other)
                and not is_torch_class(one)
                and set(_shapes(one)) > set(_shapes(other)) != set()
            )
    return kinds


def _members(modules: Any) -> Iterator[Module]:
    """Yield the members of a list, and those of lists in it, such as a list for each layer.

    Norms in inner lists are left out: they are too small to be blocks.
    """
    # Iterating a list yields a block that it holds twice; ``children()`` does not.
    for member in modules.values() if isinstance(modules, nn.ModuleDict) else modules:
        yield member
        if isinstance(member, nn.ModuleList):
            children: list[Any] = list(member)
            for child in children:
                # x-transformers keeps None where a layer lacks something.
                if child is not None and any(each.ndim > 1 for each in child.parameters()):
                    yield child


def _kind(module: Module) -> object:
    """Return the kind of a module: its class, except for general-purpose classes of torch."""
    return (type(module), _shapes(module)) if is_torch_class(module) else type(module)


def _kind_and_shapes(module: Module) -> tuple[object, _Signature]:
    return _kind(module), _shapes(module)


def _shapes(module: Module) -> _Signature:
    return tuple((name, tuple(each.shape)) for name, each in module.named_parameters())


def is_torch_class(module: Module) -> bool:
    """Whether a module is torch's own: its forward may use its children's parameters directly."""
    return type(module).__module__.startswith("torch.")


def can_be_block(module: Module) -> bool:
    """Whether the module can be called and has parameters."""
    return has_forward(module) and next(module.parameters(), None) is not None

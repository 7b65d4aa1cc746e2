"""Random numbers for divided activations: each rank draws its own.

Generators have equal states on all ranks of a tensor group, so that dropout on whole activations is
the same everywhere. For divided activations another state is used meanwhile, derived from the
generator's and the rank. So no state is kept beside the generators: random numbers repeat per seed,
in a resumed run, and where activation checkpointing repeats a block from the generators' states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from typing_extensions import Self

from boltmesh.strategies.deferred_initialization.recording import default_generator
from boltmesh.strategies.patch import Around, Changes
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.torch_compat.tensors import functions_unwatched

_SPREAD = 0x9E3779B97F4A7C15
"""Odd and without pattern, so that the seeds of neighbouring ranks are unrelated."""

_SEEDS = 2**63

_OFFSET = 4
"""The unit of a CUDA generator's offset."""

_DRAW_NOTHING = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Conv1d,
    nn.Conv2d,
    nn.GELU,
    nn.ReLU,
    nn.SiLU,
    nn.Identity,
)
"""Common modules that draw nothing, and need no wrapper."""


class Draws:
    """The generator of activations, and which of its two states is set.

    Args:
        group: The ranks; their device's generator is used.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._alike: Any = None
        """The state shared by all ranks, while this rank draws its own; else None."""

    @contextmanager
    def own(self, *, everywhere: bool = False) -> Iterator[None]:
        """Context for drawing numbers of this rank's own. Afterwards all ranks have equal states.

        Args:
            everywhere: Whether all ranks are known to draw: a rank whose part is empty could not
                tell otherwise.
        """
        if self._alike is not None:
            yield
            return
        generator = default_generator(self._group.device)
        self._alike = _state_of(generator)
        self._reseed(generator)
        own = _state_of(generator)
        try:
            yield
        finally:
            is_drawn = everywhere or not _is_same(_state_of(generator), own)
            _set_state(generator, self._alike)
            self._alike = None
            if is_drawn:
                # Advance, so that later numbers differ. If nothing is drawn, all later numbers are
                # those of a model on one rank.
                _advance(generator)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Context for drawing equal numbers on all ranks, within ``own``."""
        if self._alike is None:
            yield
            return
        generator = default_generator(self._group.device)
        own = _state_of(generator)
        _set_state(generator, self._alike)
        self._alike = None
        try:
            yield
        finally:
            self._alike = _state_of(generator)
            _set_state(generator, own)

    def _reseed(self, generator: torch.Generator) -> None:
        """Set a state derived from the present one and from the rank."""
        if generator.device.type == "cuda":
            # Reading a number from the device would wait for it; seed and offset are on the host.
            seed = generator.initial_seed() + generator.get_offset() * _SPREAD
        else:
            seed = _drawn_from(generator)
        generator.manual_seed((seed ^ (self._group.rank + 1) * _SPREAD) % _SEEDS)

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


def _drawn_from(generator: torch.Generator) -> int:
    with functions_unwatched():  # a pipeline would take it for data that a layer reads
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _advance(generator: torch.Generator) -> None:
    if generator.device.type == "cuda":
        generator.set_offset(generator.get_offset() + _OFFSET)
    else:
        _drawn_from(generator)


def _set_state(generator: torch.Generator, state: Any) -> None:
    if isinstance(state, Tensor):
        generator.set_state(state)
        return
    seed, offset = state
    generator.manual_seed(seed)
    generator.set_offset(offset)


def _state_of(generator: torch.Generator) -> Any:
    """Return a CUDA generator's seed and offset, or another's state."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _is_same(state: Any, other: Any) -> bool:
    with functions_unwatched():
        return bool(torch.equal(state, other) if isinstance(state, Tensor) else state == other)


class DrawOwn:
    """Wrapper of a module that draws for divided activations."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self._draws.own():
            return forward(*args, **kwargs)


class DrawReplicated:
    """Wrapper of a module that draws for replicated activations, called by a ``DrawOwn``."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self._draws.alike():
            return forward(*args, **kwargs)


def divide_draws(module: Module, listed: set[Module], draws: Draws, changes: Changes) -> None:
    """Let a module draw numbers of its own, but equal ones in its children that are not listed."""
    changes.wrap(module, DrawOwn(draws))
    for child in _called_children(module):
        if child not in listed and type(child) not in _DRAW_NOTHING:
            changes.wrap(child, DrawReplicated(draws))


def _called_children(module: Module) -> Iterator[Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_children(child)
        else:
            yield child

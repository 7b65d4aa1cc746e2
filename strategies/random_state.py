"""The random states of one rank: torch, numpy, Python and its device; broadcasts of them.

Generators that modules hold are restored by ``generators_unchanged``.
"""

import pickle
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.strategies.object_collectives import broadcast_from_rank0

RandomState = dict[str, Any]
"""Plain containers and tensors, so that ``torch.load(weights_only=True)`` can read it."""


def capture_random_state(device: torch.device | None = None) -> RandomState:
    """The states of torch, numpy and Python, and of ``device`` if it has its own generator."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    state: RandomState = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: RandomState, device: torch.device | None = None) -> None:
    """Restore the states returned by ``capture_random_state``."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def random_state_unchanged(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of torch, numpy and Python, and those of a device; None: of all GPUs.

    ``torch.manual_seed`` seeds those of all.
    """
    is_initialized: Any = torch.cuda.is_initialized
    before = capture_random_state(device)
    of_all = torch.cuda.get_rng_state_all() if device is None and is_initialized() else []
    try:
        yield
    finally:
        restore_random_state(before, device)
        if of_all:
            torch.cuda.set_rng_state_all(of_all)


def seed_random_state(seed: int, device: torch.device) -> None:
    """Start the generators of the host and of one device from ``seed``."""
    seed_torch(seed, device)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_torch(seed: int, device: torch.device) -> None:
    """Start torch's generators of the host and of one device from ``seed``.

    ``torch.manual_seed`` seeds those of all devices, and takes 0.2 ms to find them.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def share_random_state(group: ProcessGroup, device: torch.device) -> None:
    """Set the generators of all ranks of a group to the state of the first one's.

    Loaders, samplers and collate functions draw from them, and every rank has its own copy of
    these. No effect if all ranks were seeded equally. Collective over the group.
    """
    state = capture_random_state(device) if group.rank() == 0 else None
    state = broadcast_from_rank0(state, group)
    if group.rank() != 0 and state is not None:
        restore_random_state(state, device)


_HOST_GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    random.Random,  # noqa: S311 - the class, of which a module may hold one
)


_PLAIN = frozenset({bool, int, float, str, type(None), OrderedDict})
"""Classes of most attributes of modules."""


def held_generators(modules: Iterable[Module]) -> list[Any]:
    """Return the generators that are attributes of modules, or in a list or dict that is one."""
    found: list[Any] = []
    for module in modules:
        for value in vars(module).values():
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind is dict:
                found += filter(_is_generator, value.values())
            elif kind is list or kind is tuple:
                found += filter(_is_generator, value)
            elif _is_generator(value):
                found.append(value)
    return list({id(each): each for each in found}.values())


def _is_generator(value: object) -> bool:
    # isinstance of torch.Generator runs Python code for each value.
    return type(value) is torch.Generator or isinstance(value, _HOST_GENERATORS)


@contextmanager
def generators_unchanged(generators: Iterable[Any]) -> Iterator[None]:
    """Restore the states of generators."""
    before = [(each, _state_of(each)) for each in generators]
    try:
        yield
    finally:
        for generator, state in before:
            if isinstance(generator, torch.Generator | np.random.RandomState):
                generator.set_state(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.setstate(state)


def generator_states(generators: Iterable[Any]) -> list[bytes]:
    """Return the states of generators, to be compared."""
    return [
        state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
        for state in map(_state_of, generators)
    ]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()

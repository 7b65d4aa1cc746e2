"""Puts modules back as they were: their attributes, their buffers, and random states."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

from boltmesh.strategies.random_state import capture_random_state, restore_random_state
from boltmesh.strategies.torch_compat import times_written

CONTAINERS = (dict, list, set, OrderedDict, defaultdict, Counter, deque)


@contextmanager
def modules_unchanged(modules: Iterable[Module]) -> Iterator[None]:
    """Undo what happens within it to attributes and buffers of modules, not of their children.

    Attributes are put back as they were one level deep: the same objects, and lists, sets and
    dictionaries with the same members. Buffers get their values back where they were written.
    """
    modules = list(modules)
    attributes = [(vars(each), _copy_of(vars(each))) for each in modules]
    buffers = [
        (buffer, times_written(buffer), buffer.detach().clone())
        for each in modules
        for buffer in each.buffers(recurse=False)
        if not buffer.is_inference() and not buffer.is_meta
    ]
    try:
        yield
    finally:
        for now, before in attributes:
            _put_back(now, before)
        with torch.no_grad():
            for buffer, written, value in buffers:
                if times_written(buffer) != written:
                    buffer.copy_(value)


@contextmanager
def random_state_unchanged(device: torch.device) -> Iterator[None]:
    """Put the generators of torch, numpy and Python back as they were, and those of a device."""
    before = capture_random_state(device)
    try:
        yield
    finally:
        restore_random_state(before, device)


def _copy_of(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, value.copy() if type(value) in CONTAINERS else None)
        for name, value in attributes.items()
    }


def _put_back(attributes: dict[str, Any], kept: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - kept.keys():
        del attributes[name]
    for name, (value, members) in kept.items():
        attributes[name] = value
        if members is None:
            continue
        value.clear()
        if isinstance(value, list | deque):
            value.extend(members)
        else:
            value.update(members)

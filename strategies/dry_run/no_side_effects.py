"""Keeps a run of a step that is not the one that counts from leaving traces.

Puts modules back as they were: their attributes, their buffers, and random states.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.nn import Module

from boltmesh.strategies.dry_run.metrics import MetricCall, MetricKind, answer, metrics_replaced
from boltmesh.strategies.random_state import capture_random_state, restore_random_state
from boltmesh.strategies.torch_compat.tensors import times_written

CONTAINERS = (dict, list, set, OrderedDict, defaultdict, Counter, deque)

MOST_MEMBERS = 256
"""Of a container that is looked into: one list for each of several loaders, not a data set."""

_FRAMEWORKS = ("torch", "lightning")
"""Whose classes keep nothing of a step."""


@contextmanager
def modules_unchanged(modules: Iterable[Module]) -> Iterator[None]:
    """Undo what happens within it to attributes and buffers of modules, not of their children.

    Attributes are the same objects again, and lists, sets and dictionaries have the same members;
    so have those within them, such as a list for each of several loaders, and those that a class
    keeps for all of its modules. Buffers get their values back where they were written.
    """
    modules = list(modules)
    attributes = [(vars(each), dict(vars(each))) for each in modules]
    containers: dict[int, tuple[Any, Any]] = {}
    for each in (*(now for now, _ in attributes), *map(vars, _classes_of(modules))):
        _add_containers(each.values(), containers, depth=2)
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
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for container, members in containers.values():
            if not _holds(container, members):  # somebody else may be reading it
                _refill(container, members)
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


def _classes_of(modules: Iterable[Module]) -> set[type]:
    """Return the classes of modules and what they inherit from, but for those of frameworks."""
    found = {each for kind in set(map(type, modules)) for each in kind.__mro__}
    return {each for each in found if each.__module__.partition(".")[0] not in _FRAMEWORKS}


def _add_containers(
    values: Iterable[Any], found: dict[int, tuple[Any, Any]], *, depth: int
) -> None:
    """Add each container among values to ``found``, by identity, with a copy; and those within."""
    for value in values:
        kind = type(value)
        if kind in CONTAINERS:
            if id(value) not in found:
                found[id(value)] = value, value.copy()
        elif kind is not tuple:
            continue
        if depth > 1 and len(value) <= MOST_MEMBERS:
            members = value.values() if isinstance(value, dict) else value
            _add_containers(members, found, depth=depth - 1)


def _holds(container: Any, members: Any) -> bool:
    """Whether a container has the same objects as the copy that was made of it."""
    pairs = zip(_contents(container), _contents(members), strict=False)
    return len(container) == len(members) and all(now is before for now, before in pairs)


def _contents(container: Any) -> Iterable[Any]:
    return chain.from_iterable(container.items()) if isinstance(container, dict) else container


def _refill(container: Any, members: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(members)
    else:
        container.update(members)


class patched_log:  # noqa: N801 - read as a verb, where it is used
    """Within, ``self.log`` is ``log``, also where ``self.log_dict`` calls it."""

    def __init__(self, module: LightningModule, log: Any) -> None:
        self._attributes = vars(module)
        self._log = log

    def __enter__(self) -> None:
        self._aside = self._attributes.get("log")
        self._attributes["log"] = self._log

    def __exit__(self, *_: object) -> None:
        if self._aside is None:
            del self._attributes["log"]
        else:
            self._attributes["log"] = self._aside


def no_side_effects(
    module: LightningModule, metrics: Mapping[str, MetricKind]
) -> AbstractContextManager[None]:
    """Within, nothing is logged, and metrics stay as they are."""
    logs = patched_log(module, _ignore)
    # Entered for each microbatch, of models that mostly have no metrics.
    return _with_metrics_kept(logs, metrics) if metrics else logs


@contextmanager
def _with_metrics_kept(
    logs: AbstractContextManager[None], metrics: Mapping[str, MetricKind]
) -> Iterator[None]:
    def act(call: MetricCall) -> Any:
        return answer(call.metric, call.method, call.args, call.kwargs)

    with logs, metrics_replaced(metrics, act):
        yield


def _ignore(*_: Any, **__: Any) -> None:
    """What is logged where nothing is to be."""

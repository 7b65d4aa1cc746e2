"""Metrics that are asked in the place of a module's own, whose state has to stay as it is."""

import copy
import warnings
import weakref
from typing import Any

import torch
from torchmetrics import Metric

from boltmesh.strategies.steps.local_metrics import Alone
from boltmesh.strategies.steps.metrics import MetricKind, methods_aside

_KNOWN: dict[int, tuple[Any, MetricKind]] = {}
"""By identity of the metric, whose hash changes with its state: a reference that tells whether it
is still that one, and its stand-in."""


def stand_in(metric: MetricKind) -> MetricKind:
    """Return a copy without state, on the metric's device, that talks to no other rank."""
    known = _KNOWN.get(id(metric))
    if known is None or known[0]() is not metric or _device(known[1]) != _device(metric):
        known = _KNOWN[id(metric)] = (weakref.ref(metric, _forget(id(metric))), copy_of(metric))
    known[1].reset()
    return known[1]


def answer(metric: MetricKind, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a method of a metric could give for these arguments, without using it.

    NaN where the metric refuses them: they may hold nothing that means anything.
    """
    if method in {"update", "reset"}:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a value that nobody will see
            return getattr(stand_in(metric), method)(*args, **kwargs)
    except Exception:  # noqa: BLE001 - whatever a metric raises
        return torch.tensor(torch.nan)


def copy_of(metric: MetricKind) -> MetricKind:
    """Return a copy with its state, on the metric's device, that talks to no other rank."""
    # While methods are replaced, a copy would have the replacements.
    aside = [
        (vars(each), methods_aside(each))
        for each in metric.modules()
        if isinstance(each, MetricKind)
    ]
    try:
        made = copy.deepcopy(metric)
    finally:
        for attributes, methods in aside:
            attributes.update(methods)
    for each in made.modules():
        if isinstance(each, Metric):
            each.distributed_available_fn = Alone(each.distributed_available_fn)
    return made


def _device(metric: MetricKind) -> Any:
    return next((each.device for each in metric.modules() if isinstance(each, Metric)), None)


def _forget(key: int) -> Any:
    return lambda _: _KNOWN.pop(key, None)

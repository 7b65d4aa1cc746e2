"""Takes the place of the methods of a module's metrics while a run of a step lasts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.nn import Module
from torchmetrics import Metric, MetricCollection

from boltmesh.strategies.torch_compat import functions_unwatched

METHODS = ("forward", "update", "compute", "reset")

MetricKind = Metric | MetricCollection


@dataclass(frozen=True)
class MetricCall:
    """A call of a method of a metric by the step."""

    name: str
    """Where the metric is in the module."""
    metric: MetricKind
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    do: Callable[[], Any]
    """Makes the call."""


Act = Callable[[MetricCall], Any]


def find_metrics(root: Module) -> dict[str, MetricKind]:
    """Return all metrics and collections of metrics by dotted name."""
    return {name: each for name, each in root.named_modules() if isinstance(each, MetricKind)}


@contextmanager
def metrics_replaced(metrics: Mapping[str, MetricKind], act: Act) -> Iterator[None]:
    """Within, ``act`` is told of calls of metrics instead, and what it returns is what they return.

    Calls that metrics make of one another are their own. Whoever watches functions of torch sees
    none that is called meanwhile.
    """
    replacement = _Replacement(act)
    kept = []
    for name, metric in metrics.items():
        attributes, before = vars(metric), methods_aside(metric)
        kept.append((attributes, before))
        for method in METHODS:
            attributes[method] = partial(replacement.call, name, metric, method, before)
    try:
        yield
    finally:
        for attributes, before in kept:
            for method in METHODS:
                del attributes[method]
            attributes.update(before)


def methods_aside(metric: MetricKind) -> dict[str, Any]:
    """Take methods that stand on the instance away; return them."""
    attributes = vars(metric)
    return {key: attributes.pop(key) for key in METHODS if key in attributes}


class _Replacement:
    def __init__(self, act: Act) -> None:
        self.act = act
        self.is_inside = False

    def call(
        self,
        name: str,
        metric: MetricKind,
        method: str,
        before: Mapping[str, Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        own = before.get(method) or getattr(type(metric), method).__get__(metric)
        if self.is_inside:
            return own(*args, **kwargs)
        self.is_inside = True
        try:
            with functions_unwatched():
                do = partial(own, *args, **kwargs)
                return self.act(MetricCall(name, metric, method, args, kwargs, do))
        finally:
            self.is_inside = False

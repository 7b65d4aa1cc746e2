"""Metrics of modules during dry runs, and on ranks that see the same batches.

``metrics_replaced`` intercepts the calls of a module's metrics during a run of a step;
``stand_in``, ``answer`` and ``copy_of`` provide values without touching the metric's state.
``keep_local`` and ``gather_over`` keep metrics from counting a batch once per rank when several
ranks share a model.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from boltmesh.errors import ConfigError
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pytree import is_constant
from boltmesh.strategies.torch_compat.tensors import functions_unwatched

METHODS = ("forward", "update", "compute", "reset")

MetricKind = Metric | MetricCollection


@dataclass(frozen=True)
class MetricCall:
    """A call of a metric's method by the step."""

    name: str
    """Dotted name of the metric in the module."""
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
    """Context in which calls of metrics call ``act`` instead, and return its result.

    Calls between metrics are not intercepted. Modes that watch functions of torch do not see those
    called inside.
    """
    replacement = _Replacement(act)
    with ExitStack() as stack:
        for name, metric in metrics.items():
            own = {method: vars(metric)[method] for method in METHODS if method in vars(metric)}
            calls = {
                method: partial(replacement.call, name, metric, method, own) for method in METHODS
            }
            stack.enter_context(patched(metric, **calls))
        yield


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


class SingleRankMetrics:
    """Makes a metric compute as if there was one rank.

    Args:
        before: The metric's earlier value of this function.
    """

    def __init__(self, before: Callable[[], bool]) -> None:
        self.before = before

    def __call__(self) -> bool:
        """Whether other ranks have seen other batches."""
        return False


class GroupMetrics:
    """Gathers a metric's state over a group.

    Args:
        group: Its ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return the state of each rank; shapes may differ. Collective over the group."""
        return gather_all_tensors(state, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupMetrics":
        return self  # a group cannot be copied


def keep_local(owners: Iterable[object]) -> None:
    """Make metrics compute from the batches of their own rank, which are all batches.

    By default they gather over all ranks of the job, and count every batch once per rank.
    Idempotent; call it again for metrics created since.

    Args:
        owners: Objects that may hold metrics: the module, callbacks.

    Raises:
        ConfigError: If a metric has options for gathering over other ranks.
    """
    for name, metric in metrics_of(owners):
        _refuse_own(name, metric)
        if not isinstance(metric.distributed_available_fn, SingleRankMetrics):
            metric.distributed_available_fn = SingleRankMetrics(metric.distributed_available_fn)


def let_gather(owners: Iterable[object]) -> None:
    """Undo :func:`keep_local` and :func:`gather_over`."""
    for _, metric in metrics_of(owners):
        if isinstance(metric.dist_sync_fn, GroupMetrics):
            metric.dist_sync_fn = None
        if isinstance(metric.distributed_available_fn, SingleRankMetrics):
            metric.distributed_available_fn = metric.distributed_available_fn.before


def gather_over(owners: Iterable[object], group: ProcessGroup) -> None:
    """Make metrics gather only over ranks that saw different batches; not at all over one rank.

    Idempotent; call it again for metrics created since. Undone by :func:`let_gather`.

    Args:
        owners: Objects that may hold metrics: the module, callbacks.
        group: The ranks that saw different batches.

    Raises:
        ConfigError: If a metric has options for gathering over other ranks.
    """
    if group.size() == 1:
        keep_local(owners)
        return
    for name, metric in metrics_of(owners):
        if isinstance(metric.dist_sync_fn, GroupMetrics):
            metric.dist_sync_fn.group = group
            continue
        _refuse_own(name, metric)
        metric.dist_sync_fn = GroupMetrics(group)


def metrics_of(owners: Iterable[object]) -> Iterator[tuple[str, Metric]]:
    """Return the metrics in attributes of objects, and in lists and dictionaries among these."""
    seen: set[int] = set()
    for owner in owners:
        for path, each in _held(owner):
            if isinstance(each, Metric) and id(each) not in seen:
                seen.add(id(each))
                yield path, each


def _held(owner: object) -> Iterator[tuple[str, Any]]:
    modules = owner.named_modules() if isinstance(owner, Module) else [("", owner)]
    for prefix, holder in modules:
        yield prefix, holder
        for name, value in vars(holder).items():
            if isinstance(holder, Module) and name == "_modules":
                continue
            members = value.values() if isinstance(value, dict) else (value,)
            for each in value if isinstance(value, list | tuple) else members:
                if isinstance(each, Module) and name != "_trainer":
                    where = f"{prefix}.{name}" if prefix else f"{type(owner).__name__}.{name}"
                    yield from ((f"{where}.{path}", inner) for path, inner in each.named_modules())


def _refuse_own(name: str, metric: Metric) -> None:
    if metric.dist_sync_fn is not None:
        _refuse(name, metric, "by a dist_sync_fn of its own", "dist_sync_fn")
    if metric.process_group is not None and dist.get_world_size(metric.process_group) > 1:
        size = dist.get_world_size(metric.process_group)
        _refuse(name, metric, f"over a process_group of {size} ranks", "process_group")


def _refuse(name: str, metric: Metric, how: str, argument: str) -> None:
    raise ConfigError(
        f"The metric {name!r} ({type(metric).__name__}) gathers its state {how}, and ranks that "
        f"share a model see the same batches: it would count each of them several times. Leave "
        f"{argument} out; the metric is right without it."
    )


_KNOWN: dict[int, tuple[Any, MetricKind]] = {}
"""Stand-ins, with a reference to the metric to detect reused ids, by identity of the metric: its
hash changes with its state."""


def stand_in(metric: MetricKind) -> MetricKind:
    """Return a copy without state, on the metric's device, that does not communicate."""
    known = _KNOWN.get(id(metric))
    if known is None or known[0]() is not metric or _device(known[1]) != _device(metric):
        known = _KNOWN[id(metric)] = (weakref.ref(metric, _forget(id(metric))), copy_of(metric))
    known[1].reset()
    vars(known[1]).update(settings_of(metric))  # a step may set others for each batch
    return known[1]


_OWN = frozenset(vars(MeanMetric()))
"""Attributes that torchmetrics keeps on a metric."""


def settings_of(metric: MetricKind) -> dict[str, Any]:
    """Return the numbers and strings that users set on a metric, by attribute."""
    if not isinstance(metric, Metric):
        return {}
    return {k: each for k, each in vars(metric).items() if k not in _OWN and is_constant(each)}


def answer(metric: MetricKind, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a possible result of a metric's method for these arguments, without using the metric.

    NaN if the metric rejects them: the arguments may be placeholders.
    """
    if method in {"update", "reset"}:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the value is not used
            return getattr(stand_in(metric), method)(*args, **kwargs)
    except Exception:  # noqa: BLE001 - a metric may raise anything
        return torch.tensor(torch.nan)


def copy_of(metric: MetricKind) -> MetricKind:
    """Return a copy with its state, on the metric's device, that does not communicate."""
    # While methods are replaced, a copy would have the replacements.
    aside = [
        (own, {method: own.pop(method) for method in METHODS if method in own})
        for own in (vars(each) for each in metric.modules() if isinstance(each, MetricKind))
    ]
    try:
        made = copy.deepcopy(metric)
    finally:
        for own, methods in aside:
            own.update(methods)
    for each in made.modules():
        if isinstance(each, Metric):
            each.distributed_available_fn = SingleRankMetrics(each.distributed_available_fn)
    return made


def _device(metric: MetricKind) -> Any:
    return next((each.device for each in metric.modules() if isinstance(each, Metric)), None)


def _forget(key: int) -> Any:
    return lambda _: _KNOWN.pop(key, None)

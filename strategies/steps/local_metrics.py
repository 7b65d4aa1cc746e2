"""Keeps metrics from adding up over ranks that have all seen the same."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from boltmesh.errors import ConfigError


class Alone:
    """Tells a metric that there is nobody to gather states from.

    Args:
        before: What the metric asked until then.
    """

    def __init__(self, before: Callable[[], bool]) -> None:
        self.before = before

    def __call__(self) -> bool:
        """Whether other ranks saw other batches."""
        return False


class Over:
    """Gathers a metric's state over some ranks.

    Args:
        group: These ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return the state of each rank. Collective over the group."""
        return gather_all_tensors(state, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Over":
        return self  # a group cannot be copied


def keep_local(owners: Iterable[object]) -> None:
    """Let metrics compute from what their own rank has seen, which is everything.

    Without it they gather over all ranks of the job, and count every batch once for each of them.
    Safe to call again, for metrics that were made since.

    Args:
        owners: The module, callbacks: what may hold metrics.

    Raises:
        ConfigError: When a metric is told to gather over other ranks.
    """
    for name, metric in metrics_of(owners):
        _refuse_own(name, metric)
        if not isinstance(metric.distributed_available_fn, Alone):
            metric.distributed_available_fn = Alone(metric.distributed_available_fn)


def let_gather(owners: Iterable[object]) -> None:
    """Undo :func:`keep_local` and :func:`gather_over`."""
    for _, metric in metrics_of(owners):
        if isinstance(metric.dist_sync_fn, Over):
            metric.dist_sync_fn = None
        if isinstance(metric.distributed_available_fn, Alone):
            metric.distributed_available_fn = metric.distributed_available_fn.before


def gather_over(owners: Iterable[object], group: ProcessGroup) -> None:
    """Let metrics gather over ranks that saw different batches alone; over one rank, not at all.

    Safe to call again, for metrics that were made since. Undone by :func:`let_gather`.

    Args:
        owners: The module, callbacks: what may hold metrics.
        group: The ranks that saw different batches.

    Raises:
        ConfigError: When a metric is told to gather over other ranks.
    """
    if group.size() == 1:
        keep_local(owners)
        return
    for name, metric in metrics_of(owners):
        if isinstance(metric.dist_sync_fn, Over):
            metric.dist_sync_fn.group = group
            continue
        _refuse_own(name, metric)
        metric.dist_sync_fn = Over(group)


def metrics_of(owners: Iterable[object]) -> Iterator[tuple[str, Metric]]:
    """Return the metrics that objects hold, in attributes, in lists and dictionaries of these."""
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
            where = f"{prefix}.{name}" if prefix else f"{type(owner).__name__}.{name}"
            members = value.values() if isinstance(value, dict) else [value]
            for each in value if isinstance(value, list | tuple) else members:
                if isinstance(each, Module) and name != "_trainer":
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

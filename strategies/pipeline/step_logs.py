"""What a step logged on the last stage, made again on every rank.

Only the last stage runs a step to its end, on one microbatch after the other. Its calls of
``self.log`` are kept, brought together over the microbatches, and repeated on all ranks of the
pipeline, so that monitors, loggers and reductions at the end of an epoch find the same keys and
values everywhere. What the other stages log on their way is worth nothing and dropped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from boltmesh.strategies.dry_run.metrics import find_metrics
from boltmesh.strategies.dry_run.no_side_effects import patched_log
from boltmesh.strategies.pipeline.loss.log_rules import (
    Key,
    LogRule,
    MicrobatchWeights,
    Noted,
    check_loggable,
    combine,
    note,
    usual_rule,
)
from boltmesh.strategies.pipeline.metrics import Given, MetricCalls, MetricValue

METRIC_ARGUMENT = "an argument of a metric"
"""What numbers that metrics are called with are kept under, beside what is logged."""

RuleOf = Callable[[Key, list[Noted]], LogRule]
"""Tells how the values of a key are put together."""


@dataclass(frozen=True)
class MetricName:
    """Stands for a ``torchmetrics.Metric`` of the module: the same one on another rank."""

    attribute: str


@dataclass
class _LoggedKey:
    """One key that a step logged, over its microbatches."""

    options: dict[str, Any]
    noted: list[Noted] = field(default_factory=list)
    batch_size: int | None = None
    metric: MetricName | MetricValue | None = None


class StepLogs:
    """Takes the place of ``module.log`` while a step runs. Made anew for each step."""

    def __init__(self, module: LightningModule, metrics: MetricCalls | None = None) -> None:
        """Keep what a step logs.

        Args:
            module: Whose ``log`` is taken.
            metrics: Keeps what it calls metrics with; thrown away if None.
        """
        self._module = module
        self.metrics = MetricCalls(find_metrics(module)) if metrics is None else metrics
        self._entries: dict[tuple[str, str | None], _LoggedKey] = {}
        self._microbatch = 0

    @contextmanager
    def of_microbatch(self, index: int) -> Iterator[None]:
        """Within, calls of ``self.log`` are kept as this microbatch's."""
        self._microbatch = index
        with (
            patched_log(self._module, self._log),
            self.metrics.of_microbatch(index, self._keep_number),
        ):
            yield

    def _keep_number(self, key: str, value: Tensor | float, is_count: bool) -> None:
        self._keep(METRIC_ARGUMENT, key, value, {"reduce_fx": "sum"} if is_count else {})

    def _log(self, name: str, value: Any, *positional: Any, **options: Any) -> None:
        options = {**dict(zip(_OPTIONS, positional, strict=False)), **options}
        if isinstance(value, Mapping):
            for key, each in value.items():
                self._keep(name, str(key), each, options)
        else:
            self._keep(name, None, value, options)

    def _keep(self, name: str, key: str | None, value: Any, options: dict[str, Any]) -> None:
        entry = self._entries.setdefault((name, key), _LoggedKey(options))
        batch_size = options.get("batch_size")
        if batch_size is not None:
            is_new = self._microbatch not in {each.microbatch for each in entry.noted}
            entry.batch_size = (entry.batch_size or 0) + (batch_size if is_new else 0)
        if isinstance(value, Metric):
            entry.metric = MetricName(_attribute_of(self._module, value))
            return
        if (given := self.metrics.given(value)) is not None:
            entry.metric = given
            return
        check_loggable(name, value)
        entry.noted.append(note(self._microbatch, value, options))

    def noted(self) -> dict[Key, list[Noted]]:
        """Return the values of each key, in the order of the first calls."""
        return {key: entry.noted for key, entry in self._entries.items() if entry.noted}

    def collected(
        self, weights: MicrobatchWeights, rule_of: RuleOf | None = None
    ) -> list["Logged"]:
        """Return what the step logged as a whole, in the order of the first calls.

        Args:
            weights: What the microbatches are worth.
            rule_of: Tells how the values of a key are put together; by default as they look.
        """
        logged = []
        for (name, key), entry in self._entries.items():
            value: Tensor | MetricName | MetricValue
            if entry.metric is not None:
                value = entry.metric
            else:
                rule = (
                    usual_rule(entry.noted)
                    if rule_of is None or len(entry.noted) == 1
                    else rule_of((name, key), entry.noted)
                )
                value = combine(rule, entry.noted, weights)
            logged.append(Logged(name, key, value, _options(entry)))
        return logged


@dataclass(frozen=True)
class Logged:
    """One call of ``self.log`` that every rank repeats."""

    name: str
    key: str | None
    """Of the dict that was logged under ``name``; None where it was a value."""
    value: Tensor | MetricName | MetricValue
    """0-dim, float64; or which metric of the module, or what a call of one gives."""
    options: dict[str, Any]


def take_numbers(logged: Iterable[Logged]) -> tuple[list[Logged], dict[str, Tensor]]:
    """Return what was logged, and apart from it numbers that metrics were called with, by key."""
    kept: list[Logged] = []
    numbers: dict[str, Tensor] = {}
    for each in logged:
        if each.name != METRIC_ARGUMENT:
            kept.append(each)
        elif each.key is not None and isinstance(each.value, Tensor):
            numbers[each.key] = each.value
    return kept, numbers


def repeat(module: LightningModule, logged: Iterable[Logged], given: Given = ()) -> None:
    """Make the calls again, on this rank's module.

    Args:
        module: Whose ``log`` is called.
        logged: By the last stage.
        given: What calls of metrics gave for the whole batch.
    """
    groups: dict[str, dict[str, Any]] = {}
    for each in logged:
        value: Any = each.value
        if isinstance(value, MetricName):
            value = module.get_submodule(value.attribute)
        elif isinstance(value, MetricValue):
            value = given[value.call][value.leaf]
        else:
            value = value.to(module.device, torch.get_default_dtype())
        if each.key is None:
            module.log(each.name, value, **each.options)
        else:
            known = groups.setdefault(each.name, {"options": each.options, "values": {}})
            known["values"][each.key] = value
    for name, group in groups.items():
        module.log(name, group["values"], **group["options"])


_OPTIONS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist",
    "sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""Of ``LightningModule.log``, after name and value."""


def _options(entry: _LoggedKey) -> dict[str, Any]:
    if entry.batch_size is None:
        return entry.options
    return {**entry.options, "batch_size": entry.batch_size}


def _attribute_of(module: Module, metric: Metric) -> str:
    for name, each in module.named_modules():
        if each is metric:
            return str(name)
    raise ValueError(
        f"self.log was called with a {type(metric).__name__} that is no attribute of the module, "
        f"so it is not found on other ranks. Make it in __init__, as in self.metric = ..."
    )

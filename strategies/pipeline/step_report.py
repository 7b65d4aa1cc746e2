"""Brings the logs and the result of a step from the last stage to every rank of the pipeline.

Only the last stage runs a step to its end, on one microbatch after the other. ``StepLogs`` keeps
its calls of ``self.log``, which are combined over the microbatches and repeated on all ranks, so
that monitors, loggers and reductions at the end of an epoch have the same keys and values
everywhere. Values that other stages log have no data and are dropped.

``LastStageBroadcast`` makes a row of the numbers that ranks exchange at the end of each run. The
length of a row is a separate function, so that a plan counts the same bytes without a group.
``SharedSignals`` puts signals from outside, such as SIGTERM, in front of that row.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torchmetrics import Metric

from boltmesh.strategies.dry_run.metrics import find_metrics
from boltmesh.strategies.object_collectives import broadcast_object
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.loss.log_rules import (
    Key,
    LogRule,
    MicrobatchWeights,
    Noted,
    combine,
    note,
    usual_rule,
)
from boltmesh.strategies.pipeline.metrics import Given, MetricCalls, MetricValue
from boltmesh.strategies.torch_compat.tensors import scalar_on

METRIC_ARGUMENT = "an argument of a metric"
"""Name, among logged values, of numbers that are arguments of metrics."""

RuleOf = Callable[[Key, list[Noted]], LogRule]
"""Returns the rule that combines the values of a key."""


@dataclass(frozen=True)
class MetricName:
    """Name of a ``torchmetrics.Metric`` of the module, which is the same on every rank."""

    attribute: str


@dataclass
class _LoggedKey:
    """One key that a step logged, over its microbatches."""

    options: dict[str, Any]
    noted: list[Noted] = field(default_factory=list)
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """``batch_size`` of the calls, by microbatch."""
    metric: MetricName | MetricValue | None = None


class StepLogs:
    """Replaces ``module.log`` while a step runs. Made for each step."""

    def __init__(self, module: LightningModule, metrics: MetricCalls | None = None) -> None:
        """Keep the values that a step logs.

        Args:
            module: The module whose ``log`` is replaced.
            metrics: Keeps calls of metrics; dropped if None.
        """
        self._module = module
        self.metrics = MetricCalls(find_metrics(module)) if metrics is None else metrics
        self._entries: dict[tuple[str, str | None], _LoggedKey] = {}
        self._microbatch = 0

    @contextmanager
    def of_microbatch(self, index: int) -> Iterator[None]:
        """Return a context in which calls of ``self.log`` are kept for a microbatch."""
        self._microbatch = index
        with (
            patched(self._module, log=self._log),
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
            entry.batch_sizes.setdefault(self._microbatch, batch_size)
        if isinstance(value, Metric):
            entry.metric = MetricName(_attribute_of(self._module, value))
            return
        if (given := self.metrics.given(value)) is not None:
            entry.metric = given
            return
        _check_loggable(name, value)
        entry.noted.append(note(self._microbatch, value, options))

    def noted(self) -> dict[Key, list[Noted]]:
        """Return the values of each key, in the order of the first calls."""
        return {key: entry.noted for key, entry in self._entries.items() if entry.noted}

    def batch_sizes(self) -> dict[Key, dict[int, int]]:
        """Return the ``batch_size`` of the keys that were logged with one, by microbatch."""
        return {key: each.batch_sizes for key, each in self._entries.items() if each.batch_sizes}

    def collected(
        self,
        weights: MicrobatchWeights,
        rule_of: RuleOf | None = None,
        is_of_batch: Callable[[Key], bool | None] = lambda _: None,
    ) -> list["Logged"]:
        """Return the logged values of the whole batch, in the order of the first calls.

        Args:
            weights: Weights of the microbatches.
            rule_of: Returns the rule of a key; by default the usual rule.
            is_of_batch: Returns whether each microbatch logs a key with the batch's ``batch_size``
                rather than its own; None if unknown.
        """
        logged = []
        for (name, key), entry in self._entries.items():
            options = _options(entry, weights, is_of_batch((name, key)))
            if entry.metric is not None:
                logged.append(Logged(name, key, entry.metric, options))
                continue
            for noted in _by_call(entry.noted):
                rule = (
                    usual_rule(noted)
                    if rule_of is None or len(noted) == 1
                    else rule_of((name, key), noted)
                )
                logged.append(Logged(name, key, combine(rule, noted, weights), options))
        return logged


def _check_loggable(name: str, value: Any) -> None:
    """Refuse values that Lightning would refuse, at the user's call of ``self.log``.

    Raises:
        ValueError: With what to log instead.
    """
    called = f"`self.log({name!r}, ...)` was called with"
    if not isinstance(value, Number | Tensor):
        raise ValueError(  # noqa: TRY004 - as Lightning does
            f"{called} a {type(value).__name__}, which cannot be logged. Log numbers, tensors of "
            f"one element, metrics, or a dictionary of these."
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"{called} a tensor of {value.numel()} elements, of which one has to be made: such as "
            f"its mean()."
        )


@dataclass(frozen=True)
class Logged:
    """One call of ``self.log`` that every rank repeats."""

    name: str
    key: str | None
    """Key of the dict that was logged under ``name``; None for a single value."""
    value: Tensor | MetricName | MetricValue
    """Shape ``()`` and fp64; or a metric of the module, or the result of a call of one."""
    options: dict[str, Any]


def take_numbers(logged: Iterable[Logged]) -> tuple[list[Logged], dict[str, Tensor]]:
    """Separate logged values from numbers that are arguments of metrics; these by key.

    The numbers have the shape ``()`` and fp64.
    """
    kept: list[Logged] = []
    numbers: dict[str, Tensor] = {}
    for each in logged:
        if each.name != METRIC_ARGUMENT:
            kept.append(each)
        elif each.key is not None and isinstance(each.value, Tensor):
            numbers[each.key] = each.value
    return kept, numbers


def repeat(module: LightningModule, logged: Iterable[Logged], given: Given = ()) -> None:
    """Repeat the calls of ``log`` on this rank's module.

    Args:
        module: The module.
        logged: The logged values of the last stage.
        given: Results of calls of metrics for the whole batch.
    """
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    calls: Counter[Key] = Counter()
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
            call = each.name, calls[each.name, each.key]
            known = groups.setdefault(call, {"options": each.options, "values": {}})
            known["values"][each.key] = value
            calls[each.name, each.key] += 1
    for (name, _), group in groups.items():
        module.log(name, group["values"], **group["options"])


def _by_call(noted: Sequence[Noted]) -> list[list[Noted]]:
    """Return the values of one key by call of ``self.log``.

    Lightning shows the value of the last call. If microbatches make different numbers of calls, as
    in a loop over rows, all of them count as one.
    """
    parts: dict[int, list[Noted]] = {}
    for each in noted:
        parts.setdefault(each.microbatch, []).append(each)
    if len({len(each) for each in parts.values()}) > 1:
        return [list(noted)]
    return [list(each) for each in zip(*parts.values(), strict=True)]


_OPTIONS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist",
    "sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""Arguments of ``LightningModule.log``, after name and value."""


def _options(
    entry: _LoggedKey, weights: MicrobatchWeights, is_of_batch: bool | None
) -> dict[str, Any]:
    sizes = entry.batch_sizes
    if not sizes:
        return entry.options
    first, *others = sizes.values()
    if is_of_batch is None:
        are_rows = all(each == weights.rows.get(number) for number, each in sizes.items())
        is_of_batch = not are_rows and all(each == first for each in others)
    return {**entry.options, "batch_size": first if is_of_batch else first + sum(others)}


def _attribute_of(module: Module, metric: Metric) -> str:
    for name, each in module.named_modules():
        if each is metric:
            return str(name)
    raise ValueError(
        f"self.log was called with a {type(metric).__name__} that is no attribute of the module, "
        f"so it is not found on other ranks. Make it in __init__, as in self.metric = ..."
    )


_FLAGS = 4
"""Number of flags in each row: whether names or options have changed, whether there is a loss, a
dict around it, and whether this rank, which may be any, ends the run."""

_VALUES = 2
"""Number of values beside logged ones: the loss, and the divisor of gradients."""


def length_of_row(num_logged: int, *, is_on_host: bool) -> int:
    """Return the length of a row for a step with ``num_logged`` logged numbers."""
    return _FLAGS + (_VALUES + num_logged) * is_on_host


def broadcast_size(num_logged: int, *, is_on_host: bool) -> tuple[int, int]:
    """Return the bytes and calls of a batch's broadcast from the last stage."""
    return (0, 0) if is_on_host else ((_VALUES + num_logged) * torch.float64.itemsize, 1)


class LastStageBroadcast:
    """Sends the last stage's results to the other ranks.

    They are part of the rows that ranks exchange at the end of each run (``row`` and ``take``).
    Names and options are sent separately, and only when they change. Values on a device stay there
    and are broadcast from it, because a read would wait for all queued work.

    Args:
        group: The ranks of the pipeline.
        source: Global rank of the last stage.
        device: Device of the values.
    """

    def __init__(self, group: ProcessGroup, source: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._source_in_group = dist.get_group_rank(group, source)
        self._device = device
        self._known: list[tuple[Any, ...]] = []
        self._found: tuple[list[tuple[Any, ...]], Tensor] | None = None
        """Logged keys and values on the last stage's rank, between ``row`` and ``take``."""
        self.is_mapping = False
        """Whether the last step returned a dict."""
        self.stops = False
        """Whether any rank ended the run in the last step."""

    @property
    def _is_on_host(self) -> bool:
        return self._device.type == "cpu"

    @property
    def _num_logged(self) -> int:
        return sum(each[2] is None for each in self._known)

    @property
    def length(self) -> int:
        """Length of a row, if the step logs the same keys as the last one."""
        return length_of_row(self._num_logged, is_on_host=self._is_on_host)

    def size_per_batch(self) -> tuple[int, int]:
        """Return bytes and calls of a batch's broadcast, if it logs the same keys as the last."""
        return broadcast_size(self._num_logged, is_on_host=self._is_on_host)

    def row_of_other(self, *, stops: bool) -> Tensor:
        """Return the row of a rank without the last stage, shape ``(length,)``, fp64.

        Args:
            stops: Whether it ends the run.
        """
        row = torch.zeros(self.length, dtype=torch.float64)
        row[_FLAGS - 1] = float(stops)
        return row

    def row(
        self,
        loss: Tensor | None,
        total: Tensor | float,
        logged: list[Logged],
        *,
        is_mapping: bool,
        stops: bool = False,
    ) -> Tensor:
        """Return the row of the last stage's rank, shape ``(length,)``, fp64.

        Args:
            loss: The batch's loss, shape ``()``; None without one.
            total: Divisor of gradients, shape ``()`` if a tensor.
            logged: Values for the other ranks to log.
            is_mapping: Whether the step returned a dict.
            stops: Whether it ended the run.
        """
        entries = [
            (e.name, e.key, None if isinstance(e.value, Tensor) else e.value, e.options)
            for e in logged
        ]
        numbers = [each.value for each in logged if isinstance(each.value, Tensor)]
        given = (0.0 if loss is None else loss.detach(), total, *numbers)
        values = torch.stack([scalar_on(each, self._device) for each in given])
        self._found = entries, values
        is_news = entries != self._known
        row = self.row_of_other(stops=stops)
        row[0], row[1], row[2] = float(is_news), float(loss is not None), float(is_mapping)
        if self._is_on_host and not is_news:
            row[_FLAGS:] = values
        return row

    def take(self, rows: Tensor) -> tuple[Tensor | None, Tensor, list[Logged]]:
        """Return the report of the last stage. Collective over the pipeline.

        Args:
            rows: Rows of all ranks in order, shape ``(R, length)``, fp64.

        Returns:
            Loss, shape ``()`` and fp64, or None; divisor of gradients, the same; values to log.
        """
        row = rows[self._source_in_group]
        is_news, has_loss, self.is_mapping, _ = map(bool, row[:_FLAGS].tolist())
        self.stops = bool(rows[:, _FLAGS - 1].any())
        sent, self._found = self._found, None
        if is_news:
            known = [] if sent is None else sent[0]
            self._known = broadcast_object(known, self._source, self._group)
        if self._is_on_host and not is_news:
            values = row[_FLAGS:]
        else:
            room = torch.zeros(
                (_VALUES + self._num_logged), dtype=torch.float64, device=self._device
            )
            values = room if sent is None else sent[1]
            dist.broadcast(values, self._source, group=self._group)
        numbers = iter(values[_VALUES:])
        logged = [
            Logged(name, key, next(numbers) if value is None else value, options)
            for name, key, value, options in self._known
        ]
        return values[0] if has_loss else None, values[1], logged


NUM_SIGNALS = 2
"""Number of signals that each rank sends, see ``SigtermAgreement``."""

Signals = tuple[float, float]


class SharedSignals:
    """Sends the signals of this rank to the others and keeps received ones."""

    def __init__(self) -> None:
        self.own: Callable[[], Signals] = _no_signals
        """Called at the end of each run; returns the signals of this rank."""
        self._received = _no_signals()

    def row(self) -> Tensor:
        """Return the signals of this rank, shape ``(NUM_SIGNALS,)``, fp64."""
        return torch.tensor(self.own(), dtype=torch.float64)

    def receive(self, rows: Tensor) -> None:
        """Keep the signals of all ranks.

        Args:
            rows: Rows of all ranks, shape ``(R, NUM_SIGNALS)``.
        """
        sigterm, requeue = rows.amax(0).tolist()
        self._received = max(self._received[0], sigterm), max(self._received[1], requeue)

    def take_received(self) -> Signals:
        """Return the maximum of all ranks' signals in the runs since the last call."""
        received, self._received = self._received, _no_signals()
        return received

    def forget(self) -> None:
        """Stop sending signals, and drop received ones."""
        self.own, self._received = _no_signals, _no_signals()


def _no_signals() -> Signals:
    return 0.0, 0.0

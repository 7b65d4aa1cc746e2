"""Joins the calls of metrics in a training step over the microbatches of a batch.

The last stage runs the step to its end for each microbatch. An update of a metric there would
change it on one rank only, and its result for a batch, or its number of updates, would be of
microbatches. So ``MetricCalls`` only keeps calls, with arguments without their graphs. At the end
of the batch these are joined, and ``MetricBroadcast`` makes every rank execute the calls once
(``step_report.py``).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from boltmesh.errors import ConfigError, DivergenceError
from boltmesh.strategies.dry_run.metrics import (
    MetricCall,
    MetricKind,
    copy_of,
    metrics_replaced,
    settings_of,
    stand_in,
)
from boltmesh.strategies.object_collectives import broadcast_object
from boltmesh.strategies.pipeline.loss.log_rules import is_number
from boltmesh.strategies.pipeline.stage.trace import MetricTrace
from boltmesh.strategies.pytree import Build, take_apart, tensors_in
from boltmesh.strategies.torch_compat.tensors import tree_map_only

KeepNumber = Callable[[str, Tensor | float, bool], None]
"""Takes a number's key, its value for a microbatch, and whether it is an integer: a count."""


@dataclass(frozen=True)
class MetricValue:
    """Placeholder of a tensor that a call of a metric returns for the whole batch."""

    call: int
    leaf: int


@dataclass
class _RecordedCall:
    """One call for a microbatch."""

    name: str
    method: str
    build: Build
    leaves: list[Any]


@dataclass(frozen=True)
class JoinedCall:
    """A call with the arguments of the whole batch."""

    name: str
    method: str
    leaves: list[Any]
    """Leaves of positional and keyword arguments; numbers are those of one microbatch."""
    numbers: dict[int, str]
    """Keys of numbers, by index of the leaf."""
    build: Build


class MetricCalls:
    """Collects the calls of one step.

    Args:
        metrics: Metrics of the module, by name.
        of_batch: The step's calls for the whole batch; None: unknown.
        num_microbatches: Microbatches of the batch.
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricKind],
        of_batch: Sequence[MetricTrace] | None = None,
        num_microbatches: int = 1,
    ) -> None:
        self._metrics = metrics
        self._of_batch = of_batch
        self._num_microbatches = num_microbatches
        self._calls: dict[int, list[_RecordedCall]] = {}
        self._given: dict[int, tuple[Tensor, MetricValue]] = {}
        self.joined: list[JoinedCall] = []
        """The joined calls; empty until all microbatches have run."""

    @property
    def has_calls(self) -> bool:
        """Whether the step calls any metric; known on every rank."""
        return bool(self._of_batch)

    @contextmanager
    def of_microbatch(self, index: int, keep_number: KeepNumber) -> Iterator[None]:
        """Return a context in which calls are kept for a microbatch.

        Args:
            index: Number of the microbatch.
            keep_number: Combines numbers as logged ones are.

        Raises:
            ConfigError: The calls of all microbatches cannot be joined.
            DivergenceError: The step made other calls than in its trace.
        """
        kept = self._calls[index] = []

        def act(call: MetricCall) -> Any:
            detached = tree_map_only(Tensor, Tensor.detach, (call.args, call.kwargs))
            leaves, build = take_apart(detached)
            number = len(kept)
            made = self._answer(call, kept)
            kept.append(_RecordedCall(call.name, call.method, build, leaves))
            for leaf, each in enumerate(tensors_in(made)):
                self._given[id(each)] = each, MetricValue(number, leaf)
            for leaf, each in enumerate(leaves):
                if is_number(each):
                    keep_number(number_key(number, leaf), each, _is_whole(each))
            return made

        with metrics_replaced(self._metrics, act) if self._metrics else nullcontext():
            yield
        self._compare(kept)
        if len(self._calls) == self._num_microbatches:
            self.joined = self._join()

    def given(self, value: Any) -> MetricValue | None:
        """Return the placeholder of a tensor that a call returned, None for other values."""
        known = self._given.get(id(value))
        return None if known is None else known[1]

    def _answer(self, call: MetricCall, before: Sequence[_RecordedCall]) -> Any:
        if call.method in {"update", "reset"}:
            return None
        if call.method == "forward":
            return stand_in(call.metric).forward(*call.args, **call.kwargs)
        metric = copy_of(call.metric)
        for each in before:
            if each.name == call.name:
                args, kwargs = each.build(each.leaves)
                getattr(metric, each.method)(*args, **kwargs)
        return metric.compute()

    def _compare(self, kept: Sequence[_RecordedCall]) -> None:
        if self._of_batch is None:
            return
        made = [(each.name, each.method) for each in kept]
        expected = [(each.name, each.method) for each in self._of_batch]
        if made != expected:
            raise DivergenceError(
                f"the step called metrics so: {_listed(made)}, and would for the whole batch so: "
                f"{_listed(expected)}. Call them for every batch, whatever is in it."
            )

    def _join(self) -> list[JoinedCall]:
        parts = [self._calls[index] for index in sorted(self._calls)]
        joined = []
        for number, first in enumerate(parts[0]):
            calls = [each[number] for each in parts]
            shapes = None if self._of_batch is None else self._of_batch[number].shapes
            leaves: list[Any] = []
            numbers: dict[int, str] = {}
            for leaf, value in enumerate(first.leaves):
                if is_number(value):
                    numbers[leaf] = number_key(number, leaf)
                    leaves.append(value)
                    continue
                values = [each.leaves[leaf] for each in calls]
                shape = None if shapes is None or leaf >= len(shapes) else shapes[leaf]
                leaves.append(_join_leaf(first.name, values, shape))
            joined.append(JoinedCall(first.name, first.method, leaves, numbers, first.build))
        return joined


def number_key(call: int, leaf: int) -> str:
    """Return the key of a number among the arguments of a metric."""
    return f"{call}.{leaf}"


def _is_whole(value: Tensor | float) -> bool:
    return not value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, int)


def _join_leaf(name: str, values: Sequence[Any], shape: tuple[int, ...] | None) -> Any:
    """Return an argument for the whole batch, of this shape if known, by those of microbatches."""
    first = values[0]
    if len(values) == 1:
        return first
    if not isinstance(first, Tensor):
        if any(type(each) is not type(first) or each != first for each in values):
            _refuse(name, values)
        return first
    if any(each.ndim != first.ndim for each in values):
        _refuse(name, values)
    dim = _dimension_of_rows(values, shape)
    if dim is not None:
        return torch.cat(list(values), dim)
    differing = [
        dim for dim in range(first.ndim) if any(e.shape[dim] != first.shape[dim] for e in values)
    ]
    if differing == [0]:  # rows or elements selected by outputs of layers
        return torch.cat(list(values))
    if differing or not all(torch.equal(each, first) for each in values):
        _refuse(name, values)
    return first


def _dimension_of_rows(values: Sequence[Tensor], shape: tuple[int, ...] | None) -> int | None:
    """Return the dim along which microbatches divide a tensor, from its shape for the whole batch.

    Along a dim of elements selected by outputs of layers, the trace has none or all elements.
    """
    if shape is None or len(shape) != values[0].ndim:
        return None
    grown = [
        dim for dim, size in enumerate(shape) if any(each.shape[dim] != size for each in values)
    ]
    if len(grown) != 1:
        return None
    size, total = shape[grown[0]], sum(each.shape[grown[0]] for each in values)
    return grown[0] if size == 0 or total <= size else None


def _refuse(name: str, values: Sequence[Any]) -> None:
    described = ", ".join(
        str(tuple(each.shape)) if isinstance(each, Tensor) else repr(each) for each in values
    )
    raise ConfigError(
        f"the metric {name!r} is called with something that microbatches cannot be joined to the "
        f"whole batch's: {described}. Give it tensors with a row for each sample, or numbers, or "
        f"use microbatches=1."
    )


def _listed(calls: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name}.{method}" for name, method in calls) or "not at all"


_ALIGNMENT = 16
"""Alignment in bytes, the size of the largest elements of tensors."""

Given = Sequence[Sequence[Tensor]]
"""The tensors that each call returned."""


class _TensorSlot:
    """Placeholder of a tensor or a number among the arguments of a call."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, number: type | None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.number = number
        """``int`` or ``float`` for a Python number, None for a tensor."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorSlot) and vars(self) == vars(other)

    @override
    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


class _SentCall(NamedTuple):
    name: str
    method: str
    arguments: Any
    """Positional and keyword arguments, with placeholders for tensors and numbers."""
    settings: dict[str, Any]
    """Numbers and strings that the step has set on the metric object."""


class MetricBroadcast:
    """Sends arguments of metrics from the last stage's rank to the others and makes the calls.

    Parts that are equal in consecutive steps are sent once.

    Args:
        metrics: Metrics of the module, by name.
        group: The ranks of the pipeline.
        source: Global rank of the last stage.
        device: Device of the message.
        host_group: The same ranks on the CPU, for the length of a message if the device is a GPU:
            reading it from the device would wait for all queued work.
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricKind],
        group: ProcessGroup,
        source: int,
        device: torch.device,
        host_group: ProcessGroup | None = None,
    ) -> None:
        self._metrics = metrics
        self._constants = {name: settings_of(each) for name, each in metrics.items()}
        is_apart = device.type != "cpu" and host_group is not None
        self._heads = (host_group, torch.device("cpu")) if is_apart else (group, device)
        self._group = group
        self._source = source
        self._device = device
        self._known: list[_SentCall] = []

    def send(self, calls: Sequence[JoinedCall], numbers: Mapping[str, Tensor]) -> Given:
        """Make the calls on all ranks. Called on the last stage's rank while others ``receive``.

        Collective over the pipeline.

        Args:
            calls: The joined calls.
            numbers: Values of numbers among the arguments for the whole batch, by key; each of
                shape ``()``.

        Returns:
            The tensors that each call returned.
        """
        tensors: list[Tensor] = []
        sent = [_sent(each, numbers, tensors.append, self._settings(each.name)) for each in calls]
        wire = _pack(tensors, self._device)
        if self._group.size() > 1:
            is_news = sent != self._known
            head = torch.tensor([int(is_news), len(wire)], device=self._heads[1])
            dist.broadcast(head, self._source, group=self._heads[0])
            if is_news:
                broadcast_object(sent, self._source, self._group)
            if len(wire):
                self._broadcast(wire)
        self._known = sent
        return self._make(wire)

    def receive(self) -> Given:
        """Make the calls that the last stage's rank sends. Collective over the pipeline."""
        head = torch.zeros(2, dtype=torch.int64, device=self._heads[1])
        dist.broadcast(head, self._source, group=self._heads[0])
        is_news, size = map(int, head.tolist())
        if is_news:
            self._known = broadcast_object([], self._source, self._group)
        wire = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._make(self._broadcast(wire) if size else wire)

    def _settings(self, name: str) -> dict[str, Any]:
        """Return the constants of a metric that were set since the run began."""
        before, now = self._constants[name], settings_of(self._metrics[name])
        return {key: each for key, each in now.items() if key not in before or each != before[key]}

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, self._source, group=self._group)
        return tensor

    def _make(self, wire: Tensor) -> Given:
        given, start = [], 0
        for call in self._known:
            leaves, build = take_apart(call.arguments)
            for number, place in enumerate(leaves):
                if isinstance(place, _TensorSlot):
                    leaves[number] = _unpacked(wire, start, place)
                    start += _padded(place.num_bytes)
            args, kwargs = build(leaves)
            metric = self._metrics[call.name]
            vars(metric).update(call.settings)
            given.append(tensors_in(getattr(metric, call.method)(*args, **kwargs)))
        return given


def _sent(
    call: JoinedCall,
    numbers: Mapping[str, Tensor],
    add: Callable[[Tensor], None],
    settings: dict[str, Any],
) -> _SentCall:
    """Return a call with placeholders; ``add`` gets their tensors in order."""
    leaves: list[Any] = []
    for leaf, value in enumerate(call.leaves):
        key = call.numbers.get(leaf)
        if key is None and not isinstance(value, Tensor):
            leaves.append(value)
        elif key is None:
            leaves.append(_TensorSlot(tuple(value.shape), value.dtype, None))
            add(value)
        else:
            is_tensor = isinstance(value, Tensor)
            dtype = value.dtype if is_tensor else torch.float64
            number = numbers[key]
            add((number if dtype.is_floating_point else number.round()).to(dtype))
            leaves.append(_TensorSlot((), dtype, None if is_tensor else type(value)))
    return _SentCall(call.name, call.method, call.build(leaves), settings)


def _pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    wire = torch.zeros(
        sum(_padded(each.numel() * each.element_size()) for each in tensors),
        dtype=torch.uint8,
        device=device,
    )
    start = 0
    for each in tensors:
        whole = each.to(device).resolve_conj().resolve_neg().contiguous()
        flat = whole.reshape(-1).view(torch.uint8)
        wire[start : start + len(flat)] = flat
        start += _padded(len(flat))
    return wire


def _unpacked(wire: Tensor, start: int, place: _TensorSlot) -> Any:
    value = wire[start : start + place.num_bytes].view(place.dtype).view(place.shape)
    if place.number is None:
        return value
    return place.number(round(value.item()) if place.number is int else value.item())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

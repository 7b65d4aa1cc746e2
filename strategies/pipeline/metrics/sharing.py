"""Makes the calls of metrics that a step is to make, once for the whole batch, on every rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from boltmesh.strategies.pipeline.metrics.recording import JoinedCall
from boltmesh.strategies.steps.metrics import MetricKind
from boltmesh.strategies.steps.structure import take_apart, tensors_in

_ALIGNMENT = 16
"""Bytes: no element of a tensor is larger."""

Given = Sequence[Sequence[Tensor]]
"""Of each call the tensors that it gave."""


class _Place:
    """Stands for a tensor or a number among the arguments of a call."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, number: type | None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.number = number
        """``int`` or ``float`` where it is one of Python's."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and vars(self) == vars(other)

    @override
    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


class _Call(NamedTuple):
    name: str
    method: str
    arguments: Any
    """Positional and keyword ones, with places for tensors and numbers."""


class MetricSharing:
    """Sends arguments of metrics from the last stage's rank to the others, and makes the calls.

    What does not change from step to step is sent once.

    Args:
        metrics: Of the module, by name.
        group: The pipeline.
        source: Global rank that holds the last stage.
        device: Of what is sent.
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricKind],
        group: ProcessGroup,
        source: int,
        device: torch.device,
    ) -> None:
        self._metrics = metrics
        self._group = group
        self._source = source
        self._device = device
        self._known: list[_Call] = []

    def send(self, calls: Sequence[JoinedCall], numbers: Mapping[str, Tensor]) -> Given:
        """Make the calls, and let the other ranks make them. Collective over the pipeline.

        Args:
            calls: On the rank of the last stage.
            numbers: What numbers among the arguments are for the whole batch, by their keys.
        """
        tensors: list[Tensor] = []
        told = [_told(each, numbers, tensors.append) for each in calls]
        wire = _pack(tensors, self._device)
        if self._group.size() > 1:
            is_news = told != self._known
            self._broadcast(torch.tensor([int(is_news), len(wire)], device=self._device))
            if is_news:
                dist.broadcast_object_list([told], self._source, group=self._group)
            if len(wire):
                self._broadcast(wire)
        self._known = told
        return self._make(wire)

    def receive(self) -> Given:
        """Make the calls that the last stage's rank sends. Collective over the pipeline."""
        head = self._broadcast(torch.zeros(2, dtype=torch.int64, device=self._device))
        is_news, size = map(int, head.tolist())
        if is_news:
            holder: list[Any] = [None]
            dist.broadcast_object_list(holder, self._source, group=self._group)
            self._known = holder[0]
        wire = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._make(self._broadcast(wire) if size else wire)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, self._source, group=self._group)
        return tensor

    def _make(self, wire: Tensor) -> Given:
        given, start = [], 0
        for call in self._known:
            leaves, build = take_apart(call.arguments)
            for number, place in enumerate(leaves):
                if isinstance(place, _Place):
                    leaves[number] = _unpacked(wire, start, place)
                    start += _padded(place.num_bytes)
            args, kwargs = build(leaves)
            metric = self._metrics[call.name]
            given.append(tensors_in(getattr(metric, call.method)(*args, **kwargs)))
        return given


def _told(call: JoinedCall, numbers: Mapping[str, Tensor], add: Callable[[Tensor], None]) -> _Call:
    """Return a call with places in it; ``add`` takes what belongs there, in order."""
    leaves: list[Any] = []
    for leaf, value in enumerate(call.leaves):
        key = call.numbers.get(leaf)
        if key is None and not isinstance(value, Tensor):
            leaves.append(value)
        elif key is None:
            leaves.append(_Place(tuple(value.shape), value.dtype, None))
            add(value)
        else:
            is_tensor = isinstance(value, Tensor)
            dtype = value.dtype if is_tensor else torch.float64
            number = numbers[key]
            add((number if dtype.is_floating_point else number.round()).to(dtype))
            leaves.append(_Place((), dtype, None if is_tensor else type(value)))
    return _Call(call.name, call.method, call.build(leaves))


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


def _unpacked(wire: Tensor, start: int, place: _Place) -> Any:
    value = wire[start : start + place.num_bytes].view(place.dtype).view(place.shape)
    if place.number is None:
        return value
    return place.number(round(value.item()) if place.number is int else value.item())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

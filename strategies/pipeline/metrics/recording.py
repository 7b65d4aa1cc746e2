"""Keeps what a training step calls metrics with, microbatch by microbatch, for the whole batch.

The last stage runs the step to its end for each microbatch. A metric that counted there would have
counted on one rank alone, and what it gives for a batch, or its number of updates, would be of
parts. So calls are only kept, with arguments without their graphs; at the end of the batch
these are joined, and every rank makes the calls once (``sharing.py``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import ConfigError, DivergenceError
from boltmesh.strategies.pipeline.replay.trace import MetricTrace
from boltmesh.strategies.steps.metrics import MetricCall, MetricKind, metrics_replaced
from boltmesh.strategies.steps.stand_ins import copy_of, stand_in
from boltmesh.strategies.steps.structure import Build, take_apart, tensors_in
from boltmesh.strategies.torch_compat import tree_map_only

KeepNumber = Callable[[str, Tensor | float, bool], None]
"""Takes a number's key, one microbatch's value, and whether it is a whole number: a count."""


@dataclass(frozen=True)
class MetricValue:
    """Stands for a tensor that a call of a metric gives for the whole batch."""

    call: int
    leaf: int


@dataclass
class _Kept:
    """One call over the microbatches."""

    name: str
    method: str
    build: Build
    leaves: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class JoinedCall:
    """A call as one process makes it."""

    name: str
    method: str
    leaves: list[Any]
    """Of positional and keyword arguments; of one microbatch where they are numbers."""
    numbers: dict[int, str]
    """By leaf the key that its number was kept under."""
    build: Build


class MetricCalls:
    """The calls of one step.

    Args:
        metrics: Of the module, by name.
        of_batch: What the step calls for the whole batch; unknown if None.
        num_microbatches: Of the batch.
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
        self._calls: dict[int, list[_Kept]] = {}
        self._given: dict[int, tuple[Tensor, MetricValue]] = {}
        self.joined: list[JoinedCall] = []
        """Once all microbatches were run."""

    @property
    def has_calls(self) -> bool:
        """Whether the step calls any; every rank knows."""
        return bool(self._of_batch)

    @contextmanager
    def of_microbatch(self, index: int, keep_number: KeepNumber) -> Iterator[None]:
        """Within, calls are kept as this microbatch's.

        Args:
            index: Its number.
            keep_number: Puts numbers together as logged ones are.

        Raises:
            ConfigError: When the calls of all microbatches cannot be joined.
            DivergenceError: When the step made other calls than its probe.
        """
        kept = self._calls[index] = []

        def act(call: MetricCall) -> Any:
            detached = tree_map_only(Tensor, Tensor.detach, (call.args, call.kwargs))
            leaves, build = take_apart(detached)
            number = len(kept)
            made = self._answer(call, kept)
            kept.append(_Kept(call.name, call.method, build, [leaves]))
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
        """Return which call gave a tensor, None for what none gave."""
        known = self._given.get(id(value))
        return None if known is None else known[1]

    def _answer(self, call: MetricCall, before: Sequence[_Kept]) -> Any:
        if call.method in {"update", "reset"}:
            return None
        if call.method == "forward":
            return stand_in(call.metric).forward(*call.args, **call.kwargs)
        metric = copy_of(call.metric)
        for each in before:
            if each.name == call.name:
                args, kwargs = each.build(each.leaves[0])
                getattr(metric, each.method)(*args, **kwargs)
        return metric.compute()

    def _compare(self, kept: Sequence[_Kept]) -> None:
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
            for leaf, value in enumerate(first.leaves[0]):
                if is_number(value):
                    numbers[leaf] = number_key(number, leaf)
                    leaves.append(value)
                    continue
                values = [each.leaves[0][leaf] for each in calls]
                shape = None if shapes is None or leaf >= len(shapes) else shapes[leaf]
                leaves.append(_join_leaf(first.name, values, shape))
            joined.append(JoinedCall(first.name, first.method, leaves, numbers, first.build))
        return joined


def is_number(leaf: Any) -> bool:
    """Whether an argument of a metric is a number."""
    if isinstance(leaf, Tensor):
        return leaf.ndim == 0 and leaf.dtype != torch.bool
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def number_key(call: int, leaf: int) -> str:
    """Return what a number among the arguments of a metric is kept under."""
    return f"{call}.{leaf}"


def _is_whole(value: Tensor | float) -> bool:
    return not value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, int)


def _join_leaf(name: str, values: Sequence[Any], shape: tuple[int, ...] | None) -> Any:
    """Return an argument for the whole batch.

    Args:
        name: The metric.
        values: By microbatch.
        shape: Of the tensor for the whole batch, as far as it is known.
    """
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
    if differing == [0]:  # rows or elements that were picked by what layers gave
        return torch.cat(list(values))
    if differing or not all(torch.equal(each, first) for each in values):
        _refuse(name, values)
    return first


def _dimension_of_rows(values: Sequence[Tensor], shape: tuple[int, ...] | None) -> int | None:
    """Return which dimension microbatches divide, by what is known of the whole batch."""
    if shape is None or len(shape) != values[0].ndim:
        return None
    grown = [dim for dim, size in enumerate(shape) if size != values[0].shape[dim]]
    if len(grown) == 1 and sum(each.shape[grown[0]] for each in values) == shape[grown[0]]:
        return grown[0]
    return None


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

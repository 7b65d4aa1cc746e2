"""Brings what a step gave on the last stage to the other ranks of the pipeline.

It is a row among the numbers that ranks tell each other at the end of each run. The length of a row
is a function by itself, so that a plan counts the same bytes with no group.

What ranks are told from outside, such as SIGTERM, told to each other at the end of each run.

It goes before what else a rank tells the others then, so that nobody is asked for it.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from boltmesh.strategies.pipeline.metrics import MetricValue
from boltmesh.strategies.pipeline.step_logs import Logged, MetricName
from boltmesh.strategies.torch_compat.tensors import scalar_on

if TYPE_CHECKING:
    from collections.abc import Callable


_FLAGS = 3
"""Numbers that every batch has on the way: whether there is news, a loss, and a dict around it."""

_VALUES = 2
"""Numbers beside those that are logged: the loss, and what gradients are divided by."""


def length_of_row(num_logged: int, *, is_on_host: bool) -> int:
    """Return the numbers of a row where a step logs so many, and values are on the host or not."""
    return _FLAGS + (_VALUES + num_logged) * is_on_host


def size_of_told(num_logged: int, *, is_on_host: bool) -> tuple[int, int]:
    """Return the bytes and the calls of a batch beside its rows."""
    return (0, 0) if is_on_host else ((_VALUES + num_logged) * torch.float64.itemsize, 1)


class LastStageBroadcast:
    """Brings what the last stage found out to the other ranks.

    It rides on what ranks tell each other at the end of each run anyway (``row`` and ``take``).
    Names and options are sent only when they change, and apart. Values on a device stay there and
    are broadcast from it, for whoever asked for them would wait for all that it has to do.

    Args:
        group: The pipeline.
        source: Global rank that holds the last stage.
        device: Where values are.
    """

    def __init__(self, group: ProcessGroup, source: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._source_in_group = dist.get_group_rank(group, source)
        self._device = device
        self._known: list[tuple[Any, ...]] = []
        self._found: tuple[list[tuple[Any, ...]], Tensor] | None = None
        """On the last stage's rank what is logged and the values, between ``row`` and ``take``."""
        self.is_mapping = False
        """Whether the last step returned a dict."""

    @property
    def _is_on_host(self) -> bool:
        return self._device.type == "cpu"

    @property
    def _num_logged(self) -> int:
        return sum(each[2] is None for each in self._known)

    @property
    def length(self) -> int:
        """Numbers of a row, as long as steps log what the last one has logged."""
        return length_of_row(self._num_logged, is_on_host=self._is_on_host)

    def size_per_batch(self) -> tuple[int, int]:
        """Return the bytes and the calls beside rows of a batch that logs what the last one has."""
        return size_of_told(self._num_logged, is_on_host=self._is_on_host)

    def row(
        self,
        loss: Tensor | None,
        total: Tensor | float,
        logged: list[Logged],
        *,
        is_mapping: bool,
    ) -> Tensor:
        """Return the row of the last stage's rank, ``(length,)``; those of others are zeros.

        Args:
            loss: Of the batch, 0-dim; None where the step gave none.
            total: What gradients are to be divided by.
            logged: What the other ranks are to log.
            is_mapping: Whether the step returned a dict.
        """
        told = [(each.name, each.key, _told(each.value), each.options) for each in logged]
        numbers = [each.value for each in logged if isinstance(each.value, Tensor)]
        given = (0.0 if loss is None else loss.detach(), total, *numbers)
        values = torch.stack([scalar_on(each, self._device) for each in given])
        self._found = told, values
        is_news = told != self._known
        row = torch.zeros(self.length, dtype=torch.float64)
        row[0], row[1], row[2] = float(is_news), float(loss is not None), float(is_mapping)
        if self._is_on_host and not is_news:
            row[_FLAGS:] = values
        return row

    def take(self, rows: Tensor) -> tuple[Tensor | None, Tensor, list[Logged]]:
        """Return what the last stage told. Collective over the pipeline.

        Args:
            rows: Of all ranks, in their order.

        Returns:
            Loss, total and what to log.
        """
        row = rows[self._source_in_group]
        is_news, has_loss, is_mapping = map(bool, row[:_FLAGS].tolist())
        self.is_mapping = is_mapping
        found, self._found = self._found, None
        if is_news:
            holder: list[Any] = [None if found is None else found[0]]
            dist.broadcast_object_list(holder, self._source, group=self._group)
            self._known = holder[0]
        if self._is_on_host and not is_news:
            values = row[_FLAGS:]
        else:
            room = torch.zeros(
                (_VALUES + self._num_logged), dtype=torch.float64, device=self._device
            )
            values = room if found is None else found[1]
            dist.broadcast(values, self._source, group=self._group)
        numbers = iter(values[_VALUES:])
        logged = [
            Logged(name, key, next(numbers) if value is None else value, options)
            for name, key, value, options in self._known
        ]
        return values[0] if has_loss else None, values[1], logged


def _told(value: Tensor | MetricName | MetricValue) -> MetricName | MetricValue | None:
    return None if isinstance(value, Tensor) else value


NUM_SIGNALS = 2
"""Numbers that each rank tells of signals, see ``SigtermAgreement``."""

Signals = tuple[float, float]


class SharedSignals:
    """Tells the other ranks what this one was told, and keeps what it heard of them."""

    def __init__(self) -> None:
        self.told: Callable[[], Signals] = _no_signals
        """Asked at the end of each run what this rank was told from outside."""
        self._heard = _no_signals()

    def row(self) -> Tensor:
        """Return what this rank tells, ``(NUM_SIGNALS,)``."""
        return torch.tensor(self.told(), dtype=torch.float64)

    def hear(self, rows: Tensor) -> None:
        """Keep what ranks have told.

        Args:
            rows: Of all ranks, ``(num_ranks, NUM_SIGNALS)``.
        """
        told, requeue = rows.amax(0).tolist()
        self._heard = max(self._heard[0], told), max(self._heard[1], requeue)

    def take_heard(self) -> Signals:
        """Return the largest of what ranks were told from outside, by runs since the last call."""
        heard, self._heard = self._heard, _no_signals()
        return heard

    def forget(self) -> None:
        """Ask nobody any more, and let go of what was heard."""
        self.told, self._heard = _no_signals, _no_signals()


def _no_signals() -> Signals:
    return 0.0, 0.0

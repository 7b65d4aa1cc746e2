"""Lets ranks evaluate different numbers of batches though every gather needs all ranks.

Prediction gives each rank its own samples, and loaders without a length may end at any time. A
rank that has run out of batches takes part in the gathers of the others. Only their forward passes
decide which units they gather (a model that generates calls its blocks any number of times). So
in batches that not all ranks have, gathers are announced: every rank sends the number of the unit
that it needs next, or that it needs none, and all gather the same one. Batches that all ranks have
cost nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

_NOTHING, _NEXT_BATCH, _FIRST_UNIT = 0, 1, 2
"""Announcements: this rank's batches have ended; it begins a batch; from here on, a unit."""


@dataclass(frozen=True)
class UnitGather:
    """The gather of one unit, for a rank that does not run the unit."""

    is_needed: Callable[[], bool]
    """Whether the unit's next forward will gather. Equal on ranks that ran the same modules."""
    take_part: Callable[[], None]
    """Run all collectives of the unit's gather in a forward pass. Collective."""


class JoinedGathers:
    """Completes the gathers of an evaluation.

    Args:
        units: Gathers, by the module in whose forward each happens.
        group: Ranks that evaluate together.
        device: Device of the group's tensors.
    """

    def __init__(
        self, units: Mapping[Module, UnitGather], group: ProcessGroup, device: torch.device
    ) -> None:
        self._gathers = list(units.values())
        self._numbers = {module: number for number, module in enumerate(units)}
        self._group, self._device = group, device
        self._in_common = 0.0
        self._batch = 0
        self._is_in_batch = False
        self._is_announcing = False
        self._generates = False
        """Whether this rank called ``generate`` in a batch that all ranks have."""
        self._is_attending = False
        self._are_counts_known = True
        self._draws_batches = False
        self._has_attended = False
        for number, module in enumerate(units):
            module.register_forward_pre_hook(partial(self._before_forward, number), prepend=True)

    def begin(self, num_batches: float, *, draws_batches: bool) -> None:
        """Exchange the ranks' numbers of batches. Collective.

        Args:
            num_batches: Batches of this rank; infinity if unknown.
            draws_batches: Steps draw their batches themselves, and only find out then that none is
                left.
        """
        self._draws_batches = draws_batches
        self._has_attended = False
        counts = torch.tensor([num_batches, -num_batches], dtype=torch.float64, device=self._device)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=self._group)
        fewest, most = counts[0].item(), -counts[1].item()
        self._batch = 0
        self._are_counts_known = math.isfinite(most)
        self._in_common = math.inf if fewest == most and self._are_counts_known else fewest

    @contextmanager
    def batch(self, is_last: Callable[[], bool]) -> Iterator[None]:
        """Context for one batch's step. ``is_last`` is called after it."""
        if self._draws_batches:
            self._is_announcing = True
        elif not self._are_counts_known:
            self._is_announcing = self._serve(_NEXT_BATCH)
        else:
            self._is_announcing = self._batch >= self._in_common
        self._batch += 1
        self._is_in_batch = True
        try:
            yield
            self._end_generation()
        finally:
            self._is_announcing = self._is_in_batch = self._generates = False
        if is_last():
            self._attend()

    def generate(self, run: Callable[[], Any]) -> Any:
        """Run a call of ``generate``, which runs units as often as this rank's texts need.

        In a batch of an evaluation, ranks that generate may do so in any number of calls: gathers
        are announced until the batch has ended. Elsewhere all ranks make the same number of calls.
        """
        if self._is_announcing:
            return run()
        self._is_announcing = self._generates = True
        try:
            made = run()
            if not self._is_in_batch:
                self._end_generation()
        finally:
            if not self._is_in_batch:
                self._is_announcing = self._generates = False
        return made

    def announce(self, unit: Module) -> None:
        """Announce that this rank is about to gather a unit. Collective if gathers are announced.

        A rank that keeps units gathered announces all of them, in their order: otherwise it might
        already have a unit that another rank announces.
        """
        self._before_forward(self._numbers[unit])

    def _end_generation(self) -> None:
        """Take part in the gathers of ranks that still generate, until all have ended."""
        if self._generates:
            self._serve(_NOTHING)

    def run_out(self, num_served: int) -> None:
        """Called when this rank's loaders are exhausted, after ``num_served`` batches.

        Some loops fetch one batch ahead: then a step is still to come.
        """
        if num_served <= self._batch:
            self._is_announcing = False
            self._attend()

    def is_announced(self) -> bool:
        """Whether the ranks announce which unit is gathered next."""
        return self._is_announcing or self._is_attending

    @property
    def _is_uneven(self) -> bool:
        """Whether ranks may end at different times."""
        return self._draws_batches or not self._are_counts_known or self._in_common != math.inf

    def _attend(self) -> None:
        """Take part in the gathers of others until all have run out of batches; once."""
        if self._has_attended or not self._is_uneven:
            return
        self._has_attended = self._is_attending = True
        self._serve(_NOTHING)
        self._is_attending = False

    def _before_forward(self, number: int, *_: object) -> None:
        if not self._is_announcing or not self._gathers[number].is_needed():
            return
        self._serve(number + _FIRST_UNIT)

    def _serve(self, mine: int) -> bool:
        """Take part in the gathers of other ranks until it is this rank's turn.

        Returns:
            Whether any rank has run out of batches.
        """
        while True:
            announced, has_ended = self._exchange(mine)
            if announced == mine:
                return bool(has_ended)
            if announced >= _FIRST_UNIT:
                self._gathers[announced - _FIRST_UNIT].take_part()

    def _exchange(self, mine: int) -> list[int]:
        """Return the largest announcement, and whether any rank has run out. Collective."""
        announced: Tensor = torch.tensor([mine, int(mine == _NOTHING)], device=self._device)
        dist.all_reduce(announced, op=dist.ReduceOp.MAX, group=self._group)
        values: list[int] = announced.tolist()
        return values

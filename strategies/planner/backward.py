"""How full the device is while a backward pass goes through the units, last one first.

Per unit there are three moments: its backward begins, its gradients are complete, they are copied
into the reduction. ``fully_shard`` gathers one unit ahead (stage 3), frees a unit's parameters
before its gradients are reduced, and keeps the input of a reduction until the next unit's.
"""

from collections.abc import Iterator

from boltmesh.strategies.planner.in_flight import Flight
from boltmesh.strategies.planner.model import Activations, UnitShape


class BackwardPass:
    """The backward pass of the last micro-batch of a step.

    Args:
        flight: The units, and how large they are gathered.
        activations: What the forward pass has left.
        stage: Of ZeRO.
        is_accumulated: There were micro-batches before this one.
        gradients: Bytes of this rank's shares of all gradients, on the device.
    """

    def __init__(
        self,
        flight: Flight,
        activations: Activations,
        *,
        stage: int,
        is_accumulated: bool,
        gradients: int,
    ) -> None:
        self.flight = flight
        self.activations = activations
        self.stage = stage
        self.is_freed = stage == 3
        self.is_whole = stage == 1 and is_accumulated
        self.is_shared = stage > 1 and is_accumulated
        self.gradients = gradients

    def most(self) -> int:
        """The most bytes at one time, beside what a rank keeps."""
        tiles = max((each.backward() for each in self.flight.tiles), default=0)
        return max(self._moments()) + tiles

    def _moments(self) -> Iterator[int]:
        flight = self.flight
        order = list(reversed(flight.freed))
        gathered = flight.roots_gathered() if self.is_freed else flight.all_gathered()
        whole = flight.all_gradients() if self.is_whole else 0
        # When a root's gradients come is its author's business: a head's early, an embedding's
        # late.
        of_roots = 0 if self.is_whole else sum(map(flight.gradient, flight.roots))
        saved, before = self.activations.saved_bytes, 0
        yield gathered + whole + self._shares(0) + saved + self.activations.transient_bytes
        for at, unit in enumerate(order):
            held = gathered + whole + of_roots + self._shares(at)
            remaining = saved * (len(order) - at) // len(order)
            after = saved * (len(order) - at - 1) // len(order)
            own = flight.gathered(unit)
            ahead = self._ahead(order, at)
            if self.is_freed:
                held += own
            gradient = 0 if self.is_whole else flight.gradient(unit)
            yield held + ahead + before + remaining
            yield held + ahead + before + gradient + after
            if self.is_freed:
                held -= own
            else:
                gathered -= own
                held -= own
            before = flight.reduced(unit)
            yield held + ahead + gradient + before + after
            if self.is_whole:
                whole -= flight.gradient(unit, accumulated=True)
        held = gathered + whole + of_roots + self._shares(len(order))
        yield held + before
        yield held + max(map(flight.reduced, flight.roots), default=0)

    def _ahead(self, order: list[UnitShape], at: int) -> int:
        if not self.is_freed or at + 1 == len(order):
            return 0
        return self.flight.collective(order[at + 1])

    def _shares(self, num_done: int) -> int:
        """This rank's shares of the gradients that were reduced so far."""
        if self.is_shared:
            return self.gradients
        return self.gradients * num_done // max(1, len(self.flight.freed))

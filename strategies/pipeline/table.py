"""A schedule that is worked out: which rank does what, in which order. No torch."""

import re
from dataclasses import dataclass
from functools import cached_property

from boltmesh.telemetry.schedule import Order, actions

STEP = re.compile(r"(\d+)(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)")
"""One step as torch writes it: the stage, what is done, the microbatch."""


@dataclass(frozen=True)
class ScheduleTable:
    """The order of one optimizer step on every rank of a pipeline."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    order: Order
    """For each rank what it computes: ``0F3`` is stage 0's forward of microbatch 3, B the whole
    backward, I that of the input, W that of the weights. None is a slot that torch leaves empty,
    ``(0F7;7B3)OVERLAP_F_B`` a forward and a backward that may run side by side."""
    rank_of_stage: tuple[int, ...]

    @property
    def stages_per_rank(self) -> int:
        """The same on every rank."""
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return self._stages[rank]

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)
            for rank in range(self.num_ranks)
        )


def owners(order: Order) -> dict[int, int]:
    """Return the rank that works on each stage.

    Raises:
        ValueError: Two ranks work on one stage.
    """
    found: dict[int, int] = {}
    for rank, row in enumerate(actions(order)):
        for action in row:
            if found.setdefault(action.stage, rank) != rank:
                both = f"{found[action.stage]} and {rank}"
                raise ValueError(f"ranks {both} both work on stage {action.stage}")
    return found

"""What batches of training will do on a pipeline: their order, their traffic and their memory."""

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from boltmesh.strategies.pipeline.bubble import peak_live_bytes
from boltmesh.strategies.pipeline.executor.agreement import agreement_size
from boltmesh.strategies.pipeline.executor.traffic import expected_traffic
from boltmesh.strategies.pipeline.expected import border_bytes, expected_collectives
from boltmesh.strategies.pipeline.programs import Programs
from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.telemetry.snapshot import MemoryKind, MemoryPlace, PipelinePlan
from boltmesh.telemetry.traffic import ExpectedTraffic

Crossing = Sequence[Sequence[tuple[ValueSpec, ...]]]
"""By microbatch and stage of a batch of training, what the border before the stage carries."""


class Forecast:
    """What is told of a model's batches before they run.

    Args:
        programs: The actions of this rank.
        num_microbatches: Of the batch that the model was divided by.
        group: The ranks of the pipeline.
    """

    def __init__(self, programs: Programs, num_microbatches: int, group: ProcessGroup) -> None:
        self._programs = programs
        self._num_microbatches = num_microbatches
        self._group = group
        self.crossing: Crossing | None = None
        """None before a batch of training was seen."""

    def plan(self, schedule: str, accumulated: int) -> PipelinePlan:
        """Return what the run's recorder is told.

        Args:
            schedule: As the user calls it.
            accumulated: Batches in an optimizer step.
        """
        return PipelinePlan(
            schedule=schedule,
            num_stages=self._programs.num_stages,
            num_microbatches=self._num_microbatches,
            order=self._programs.order(self._num_microbatches),
            rank_of_stage=self._programs.rank_of_stage,
            border_bytes=border_bytes(self.crossing or (), accumulated),
        )

    def traffic(
        self,
        *,
        accumulated: int,
        num_norms: int,
        shared: tuple[int, int],
        told: tuple[int, int],
        num_told: int,
        evened: tuple[int, int],
        agrees_on_overflow: bool,
    ) -> list[ExpectedTraffic]:
        """What one optimizer step should move on this rank; nothing where that is unknown.

        Args:
            accumulated: Batches in it.
            num_norms: Norms over all stages in it.
            shared: Bytes and calls of a batch, for parameters that several stages hold.
            told: Bytes and calls of a batch, from the last stage.
            num_told: Numbers that ranks tell each other at the end of a batch.
            evened: Bytes and calls of a step, for shared parameters' averages over pipelines.
            agrees_on_overflow: Whether stages tell each other before it if gradients overflowed.
        """
        crossing = self.crossing
        if crossing is None:
            return []

        def values_at(border: int, microbatch: int) -> tuple[ValueSpec, ...]:
            return crossing[microbatch][border]

        over_borders = expected_traffic(
            self._programs.of(len(crossing)), values_at, accumulated=accumulated
        )
        if self._group.size() == 1:
            return over_borders
        return over_borders + expected_collectives(
            agreements=agreement_size(self._programs.num_stages, self._group.size(), num_told),
            shared=shared,
            told=told,
            evened=evened,
            accumulated=accumulated,
            num_norms=num_norms,
            agrees_on_overflow=agrees_on_overflow,
        )

    def activations(self, kept_bytes: Sequence[int], place: MemoryPlace) -> MemoryKind:
        """What this rank keeps for its backward passes at most.

        Args:
            kept_bytes: What each stage keeps of a microbatch.
            place: Where this rank computes.
        """
        order = self._programs.order(self._num_microbatches)[self._group.rank()]
        return MemoryKind("activations", place, None, peak_live_bytes(order, kept_bytes))

"""What is known of batches of training before any is run: asked by the engine, and for telemetry.

A look at a sample tells it; what is made of that in numbers is in ``forecast.py``.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule

from boltmesh.strategies.pipeline.context import PipelineContext
from boltmesh.strategies.pipeline.forecast import Forecast
from boltmesh.strategies.pipeline.holdings import Holdings
from boltmesh.strategies.pipeline.placement import TRAINING, Placement
from boltmesh.strategies.pipeline.programs import Programs
from boltmesh.strategies.pipeline.rehearsal import StageRehearsal
from boltmesh.strategies.pipeline.replay.stage_run import StageRun
from boltmesh.strategies.pipeline.runs import Around
from boltmesh.strategies.pipeline.signals import NUM_SIGNALS
from boltmesh.strategies.pipeline.told_rows import Sharing
from boltmesh.telemetry.snapshot import MemoryKind, MemoryPlace, PipelinePlan
from boltmesh.telemetry.traffic import ExpectedTraffic


class Expectations:
    """What this rank will do, move and keep of a model that is placed.

    Args:
        module: The whole model.
        placement: How it is divided, and how steps run on that.
        holdings: What this rank has of it.
        programs: The actions of this rank.
        num_microbatches: Of the batch that the model was divided by.
        sharing: Brings what the last stage logs to the other ranks.
        cut: Gives the microbatches of a batch, and the rows of each.
        context: Where the pipeline finds itself.
    """

    def __init__(
        self,
        module: LightningModule,
        placement: Placement,
        holdings: Holdings,
        *,
        programs: Programs,
        num_microbatches: int,
        sharing: Sharing,
        cut: Callable[[Any], tuple[list[Any], list[int]]],
        context: PipelineContext,
    ) -> None:
        self.context = context
        """Of the newest run: a model stays placed over several."""
        self._module = module
        self._placement = placement
        self._holdings = holdings
        self._programs = programs
        self._sharing = sharing
        self._cut = cut
        self._forecast = Forecast(programs, num_microbatches, context.group)

    def look_at(self, batch: Any, rest: tuple[Any, ...], around: Around) -> None:
        """Work out what one batch of training moves, where that is not known yet.

        Args:
            batch: Of training, before its transfer.
            rest: What ``training_step`` is called with behind it.
            around: Precision.
        """
        if self._forecast.crossing is None:
            _, runs = self._runs(batch, rest, around)
            self._forecast.crossing = [[each.plan.values_in for each in stages] for stages in runs]

    def rehearsed(self, batch: Any, rest: tuple[Any, ...], around: Around) -> StageRehearsal:
        """Return a run of this rank's stages without the others.

        Args:
            batch: Of training, on the device.
            rest: What ``training_step`` is called with behind it.
            around: Precision.
        """
        parts, runs = self._runs(batch, rest, around)
        own = self._programs.of(len(parts)).stages
        return StageRehearsal(
            self._module,
            self.context.device,
            [
                ((part, *rest), [stages[each] for each in own])
                for part, stages in zip(parts, runs, strict=True)
            ],
        )

    def _runs(
        self, batch: Any, rest: tuple[Any, ...], around: Around
    ) -> tuple[list[Any], list[tuple[StageRun, ...]]]:
        """Return a batch's microbatches, and how each runs on all stages."""
        parts, _ = self._cut(batch)
        plans, seed = self._placement.plans, self.context.seed
        with around():
            return parts, [plans.stages(TRAINING, part, *rest, seed=seed) for part in parts]

    def plan(self, schedule: str, accumulated: int) -> PipelinePlan:
        """Return what will be run.

        Args:
            schedule: As the user calls it.
            accumulated: Batches in an optimizer step.
        """
        return self._forecast.plan(schedule, accumulated)

    def traffic(self, accumulated: int, *, num_norms: int) -> list[ExpectedTraffic]:
        """What one optimizer step should move on this rank; nothing where that is unknown.

        Args:
            accumulated: Batches in it.
            num_norms: Norms over all stages in it.
        """
        shared, context = self._holdings.shared, self.context
        return self._forecast.traffic(
            accumulated=accumulated,
            num_norms=num_norms,
            shared=shared.size_per_batch(),
            told=self._sharing.size_per_batch(),
            num_told=NUM_SIGNALS + self._sharing.length,
            evened=shared.size_of_gradients() if context.evens_shared else (0, 0),
            agrees_on_overflow=context.scaler is not None,
        )

    def activations(self) -> list[MemoryKind]:
        """What this rank keeps for its backward passes at most; nothing where that is unknown."""
        kept = self._placement.kept_bytes
        if kept is None:
            return []
        place: MemoryPlace = "host" if self.context.device.type == "cpu" else "device"
        return [self._forecast.activations(kept, place)]

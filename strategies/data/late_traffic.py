"""What a step of sharded pipelines should move on the data axis, and what stages 2 and 3 add to it.

See [Note: Stages 2 and 3 go by batch] in ``late_shards.py``.
"""

from dataclasses import dataclass, replace

from boltmesh.strategies.data.agreed_gradients import agreement_bytes
from boltmesh.strategies.data.shard_traffic import expected_shard_traffic
from boltmesh.strategies.planner.layout import Job, Sharing
from boltmesh.strategies.planner.model import ModelShape
from boltmesh.strategies.planner.traffic import OVERFLOW_BYTES
from boltmesh.telemetry.traffic import ExpectedTraffic

GATHERS = "_allgather_base"


@dataclass(frozen=True)
class LateTraffic:
    """A rank's stages and its run, as far as they decide what the data axis moves."""

    shape: ModelShape
    """What is gathered together of the rank's stages; of buffers those that it sends."""
    sharing: Sharing
    job: Job
    num_trained: int
    """Parameters that get gradients."""
    scalar_bytes: tuple[int, ...] = ()
    """Of each trained parameter without rows, which every rank keeps whole."""
    num_norms: int = 0
    has_scaler: bool = False

    def expected(self) -> list[ExpectedTraffic]:
        """Return what one optimizer step moves on one rank, one entry per operator."""
        if self.job.num_ranks == 1:
            return []
        stage, num_batches = self.sharing.stage, self.job.num_microbatches
        reductions = 1 if stage == 1 else num_batches
        told = reductions * agreement_bytes(self.num_trained)
        why = "which parameters have gradients, 4 bytes for each"
        more = [ExpectedTraffic("data", "allreduce", told, reductions, why)]
        if self.scalar_bytes:
            moved, calls = sum(self.scalar_bytes), len(self.scalar_bytes)
            why = "gradients of parameters without rows, once per batch"
            moved, calls = reductions * moved, reductions * calls
            more.append(ExpectedTraffic("data", "allreduce", moved, calls, why))
        if self.has_scaler:
            why = "whether fp16 has overflown, asked by torch of shards and once more of all"
            more.append(ExpectedTraffic("data", "allreduce", 2 * OVERFLOW_BYTES, 2, why))
        expected = expected_shard_traffic(
            self.shape,
            replace(self.sharing, stage=min(stage, 2)),
            self.job,
            num_norms=self.num_norms,
            more=more,
        )
        return [_per_batch(each, num_batches) if stage == 3 else each for each in expected]

    def extra(self) -> "ExtraTraffic | None":
        """Return what the stage moves more than stage 1; None where it is stage 1."""
        if self.sharing.stage == 1 or self.job.num_ranks == 1:
            return None
        gathered, reduced = self._of_a_further_batch()
        return ExtraTraffic(self.sharing.stage, self.job.num_microbatches, reduced, gathered)

    def _of_a_further_batch(self) -> tuple[int, int]:
        """Bytes of gathers, and of everything else, that a second batch in a step moves."""
        sums = {(True, 1): 0.0, (True, 2): 0.0, (False, 1): 0.0, (False, 2): 0.0}
        for num_batches in (1, 2):
            job = replace(self.job, num_microbatches=num_batches)
            for each in replace(self, job=job).expected():
                sums[each.operator == GATHERS, num_batches] += each.payload_bytes
        return (
            round(sums[True, 2] - sums[True, 1]),
            round(sums[False, 2] - sums[False, 1]),
        )


@dataclass(frozen=True)
class ExtraTraffic:
    """What ZeRO-2 or 3 beside a pipeline moves more than ZeRO-1, on one rank."""

    stage: int
    num_batches: int
    """In an optimizer step."""
    gradient_bytes: int
    """Of each batch behind the first one of a step: the reduction that stage 1 does not do."""
    parameter_bytes: int
    """Of each such batch: the gather that stage 1 does not do."""

    @property
    def batch_bytes(self) -> int:
        """Of each batch behind the first."""
        return self.gradient_bytes + self.parameter_bytes

    @property
    def step_bytes(self) -> int:
        """Of an optimizer step."""
        return (self.num_batches - 1) * self.batch_bytes

    def per_microbatch(self, num_microbatches: int) -> float:
        """Bytes of a step shared out over its microbatches.

        Args:
            num_microbatches: Of a batch.
        """
        return self.step_bytes / (self.num_batches * num_microbatches)

    def sentence(self, num_microbatches: int, *, rank: str) -> str:
        """Return it in words, for whoever has chosen the stage.

        Args:
            num_microbatches: Of a batch.
            rank: Whose it is, such as ``rank 0``.
        """
        what = f"{self.gradient_bytes:,} bytes of gradients"
        if self.parameter_bytes:
            what += f" and {self.parameter_bytes:,} of parameters"
        name = f"zero_stage={self.stage} beside a pipeline"
        if self.num_batches == 1:
            return (
                f"{name} moves what zero_stage=1 does, 0 bytes a microbatch more, for a step is "
                f"one batch; each further batch of accumulate_grad_batches would move {what} more "
                f"on {rank}"
            )
        further = f"each of the {self.num_batches - 1} batches behind the first of a step"
        if self.num_batches == 2:
            further = "the second batch of a step"
        return (
            f"{name} moves {self.step_bytes:,} bytes a step more on {rank} than zero_stage=1, "
            f"{self.per_microbatch(num_microbatches):,.0f} a microbatch: {what} for {further}"
        )


def _per_batch(gathers: ExpectedTraffic, num_batches: int) -> ExpectedTraffic:
    """Return what parameters move that are gathered for each batch; other traffic as it is."""
    if gathers.operator != GATHERS:
        return gathers
    return ExpectedTraffic(
        gathers.axis,
        gathers.operator,
        gathers.payload_bytes * num_batches,
        None if gathers.calls is None else gathers.calls * num_batches,
        "each parameter, once per batch",
    )

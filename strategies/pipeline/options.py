"""Options and context of a pipeline, and refusals of unsupported runs.

``PipelineOptions`` are checked before ranks start, and the ``refuse_*`` functions run before a
pipeline takes any memory.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.dry_run.unsupported import Reasons
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.optimizer_probe import mixes_parameters
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.partition.split import UnitCost
from boltmesh.strategies.pipeline.schedules.registry import check_schedule, schedule_kind
from boltmesh.strategies.pipeline.stage.units import is_absent
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

if TYPE_CHECKING:
    from boltmesh.strategies.engine.data_axis import LateGradientsAxis
    from boltmesh.strategies.pipeline.stage.cut import StageBoundaries


Split = str | Sequence[str] | Callable[[Sequence[UnitCost], int], Sequence[Sequence[str]]]
"""``"auto"``, ``"measured"``, names of the modules that begin later stages, or a function."""

AUTOMATIC = ("auto", "measured")

AUTOMATIC_SCHEDULE = "auto"

WHOLE_BATCH = "gpipe"
"""The schedule of a loss over the whole batch, unless one was requested."""


@dataclass(frozen=True)
class PipelineOptions:
    """Arguments of the strategy for its pipeline.

    Raises:
        ConfigError: A value is invalid, or values contradict each other.
    """

    stages: int | None = None
    """Ranks of the pipeline; None: all of the job."""
    microbatches: int | None = None
    """Microbatches per batch; None: four for each rank."""
    schedule: str = AUTOMATIC_SCHEDULE
    """``auto``: 1f1b, and gpipe if the first batch shows that the loss needs the whole batch."""
    stages_per_rank: int | None = None
    """None: the default of the schedule."""
    split: Split = "auto"
    max_memory_bytes: int | None = None
    """Limit of a rank; None: the free memory of its GPU, no limit on the CPU."""

    def __post_init__(self) -> None:
        schedule_kind(self.first_schedule)
        if isinstance(self.split, str) and self.split not in AUTOMATIC:
            raise ConfigError(
                f"split={self.split!r} is no way to cut a model. Use 'auto', 'measured', a list of "
                f"the names of the modules at which the second and later stages begin, or a "
                f"function."
            )
        if self.max_memory_bytes is not None and self.max_memory_bytes <= 0:
            raise ConfigError(
                f"max_memory_bytes={self.max_memory_bytes} leaves nothing for a stage. Give the "
                f"bytes that a rank may take, such as 16 * 10**9, or leave it out."
            )
        if self.stages is not None:
            self.num_stages(self.stages)

    @property
    def first_schedule(self) -> str:
        """The schedule with which a run begins."""
        return "1f1b" if self.schedule == AUTOMATIC_SCHEDULE else self.schedule

    def num_microbatches(self, num_ranks: int) -> int:
        """Return the number of microbatches of a full batch."""
        return 4 * num_ranks if self.microbatches is None else self.microbatches

    def num_stages(self, num_ranks: int) -> int:
        """Return the number of stages of the pipeline.

        Raises:
            ConfigError: The schedule does not have these sizes.
        """
        size = check_schedule(
            self.first_schedule,
            num_ranks=num_ranks,
            num_microbatches=self.num_microbatches(num_ranks),
            stages_per_rank=self.stages_per_rank,
        )
        return num_ranks * size


@dataclass(frozen=True)
class PipelineContext:
    """The run, ranks and device of a pipeline."""

    group: ProcessGroup
    """The ranks of this pipeline."""
    new_group: Callable[..., ProcessGroup | None]
    """Makes further groups of its ranks, see ``RankMeshStrategy.new_group``."""
    data: "LateGradientsAxis"
    """The data axis, which averages gradients over pipelines."""
    device: torch.device
    recorder: Recorder | NullRecorder
    seed: int
    """Seed of random numbers within steps; equal on all ranks of the pipeline."""
    timeout: timedelta | None = None
    scaler: GradScaler | None = None
    recomputed: frozenset[Module] = frozenset()
    """Blocks whose forward pass runs again in the backward pass."""
    num_replicas: int = 1
    """Number of pipelines of the job with different batches."""
    num_sharing: int = 1
    """Number of ranks that compute each layer together, each in a pipeline of its own."""
    num_averaged: int = 1
    """Number of ranks that average a stage's gradients: of replicas, and of a context axis."""
    new_tracing_group: Callable[[], ProcessGroup | None] = noop
    """Makes a CPU group of its ranks and those that divide its layers, with the same batches."""
    coupled: ProcessGroup | None = None
    """Ranks of other pipelines that compute layers together with this one; None without any."""
    rounds_by_microbatch: bool = False
    """Whether products are rounded by a scale per microbatch, as in float8."""
    without_collectives: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which one rank alone runs layers on fake tensors."""
    boundaries: "StageBoundaries | None" = None
    """How values pass between stages if a rank has a part of them; None: whole."""

    @property
    def waits_within(self) -> bool:
        """Whether a stage waits for ranks outside of the pipeline."""
        return self.num_sharing > 1 or self.coupled is not None

    @property
    def num_communicators(self) -> int:
        """Number of communicators of a step: two directions of the pipeline, and other groups.

        A lower bound: tied weights and shards may have further ones.
        """
        directions = 2 if self.group.size() > 1 else 0
        return directions + (self.num_replicas > 1) + (self.num_sharing > 1)

    @property
    def shared_averages_may_differ(self) -> bool:
        """Whether averages of shared parameters may differ between stages by rounding.

        Sums of three and more depend on their order, which differs between stages.
        """
        return self.num_averaged > 2


STAGES = Reasons(
    dataloader_iter="a pipeline runs it on microbatches of a batch that is there before",
    batch_size_finder=(
        "and in a pipeline that is on one rank alone, for which the others wait. Choose batch_size "
        "and microbatches by boltmesh plan, or try them."
    ),
    sync_batchnorm=(
        "makes a batch norm wait for all ranks, and in a pipeline one rank runs it: on one "
        "microbatch after the other, each by its own moments. Leave it out, or use GroupNorm or "
        "LayerNorm, which do not depend on how a batch is cut."
    ),
    gradients="the gradients of one stage, others on each rank",
)
"""Why ranks that hold stages cannot do by themselves what one process does."""


def refuse_manual_optimization(module: LightningModule) -> None:
    """Refuse training with manual optimization.

    Raises:
        UnsupportedError: With what to do instead.
    """
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} optimises by hand (automatic_optimization=False), and in a "
            f"pipeline forward and backward passes of several microbatches are under way at once, "
            f"so manual_backward has no place in training_step. Return the loss from "
            f"training_step, or use bolt_ddp or bolt_zero3."
        )


def gathers_refused(strategy: Any, step: str) -> AbstractContextManager[None]:
    """Return a context in which a step that gathers values of other pipelines is refused.

    Args:
        strategy: The strategy, whose first rank alone traces the step.
        step: Name of the step.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"{step} gathers values of all data ranks (all_gather), and the first rank alone looks "
            f"at it to cut the model into stages. Log by self.log(..., sync_dist=True), or use one "
            f"pipeline (data=1), bolt_zero1 to 3 or bolt_tensor."
        )

    return patched(strategy, all_gather=refuse) if strategy.data_axis.size > 1 else nullcontext()


def refuse_layout(options: PipelineOptions, layout: MeshLayout) -> None:
    """Refuse sizes that the schedule does not have, and several pipelines if it is asynchronous.

    Raises:
        ConfigError: With what to do instead.
    """
    options.num_stages(layout.pipeline)
    num_pipelines = layout.data * layout.size("context")
    if schedule_kind(options.first_schedule).is_asynchronous and num_pipelines > 1:
        raise ConfigError(
            f"schedule={options.schedule!r} applies gradients a step late, and checkpoints keep "
            f"those of one pipeline; {layout} would have {num_pipelines} pipelines. Use "
            f"schedule='1f1b', or as many stages as there are ranks."
        )


def refuse_late_gradients(trainer: Trainer, scaler: object) -> None:
    """Refuse accumulation and loss scales beside gradients that are applied a step late.

    Raises:
        UnsupportedError: With what to do instead.
    """
    refuse_accumulation(trainer)
    if scaler is not None:
        raise UnsupportedError(
            "schedule='pipedream_2bw' applies gradients a step late, when fp16's loss scale may "
            "have become another one. Use precision='bf16-mixed', or schedule='1f1b'."
        )


def refuse_accumulation(trainer: Trainer) -> None:
    """Refuse to accumulate gradients that are applied a step late; callbacks may start it any time.

    Raises:
        UnsupportedError: With what to do instead.
    """
    count = trainer.accumulate_grad_batches
    if count != 1:
        raise UnsupportedError(
            f"accumulate_grad_batches={count} with schedule='pipedream_2bw', which steps after "
            f"each batch. Take batches {count} times as large, cut into {count} times as many "
            f"microbatches, or use schedule='1f1b'."
        )


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that read all gradients to step one parameter.

    Raises:
        UnsupportedError: Naming the optimizer.
    """
    for optimizer in optimizers:
        if mixes_parameters(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} steps each parameter by what it finds in all "
                f"gradients, and a rank of a pipeline has those of its own stages alone. Use "
                f"bolt_ddp, or an optimizer that steps each parameter by itself, such as AdamW."
            )


def refuse_measuring(options: PipelineOptions) -> None:
    """Refuse to time layers on one rank if they can only run on several ranks together.

    Raises:
        ConfigError: With what to do instead.
    """
    if options.split == "measured":
        raise ConfigError(
            "split='measured' lets one rank time each layer by itself, and with tensor or expert "
            "ranks layers run on several ranks together. Use split='auto', which counts operations."
        )


def refuse_absent_parameters(module: LightningModule) -> None:
    """Refuse to divide layers of a model that is divided into stages already.

    Raises:
        ConfigError: With the order of calls that works.
    """
    gone = [name for name, each in module.named_parameters() if is_absent(each)]
    if gone:
        raise ConfigError(
            f"{type(module).__name__} was divided into stages for another run, and this rank no "
            f"longer has {gone[0]!r} and {len(gone) - 1} other parameters, which the proof of a "
            f"tensor plan needs. Call Trainer.fit before validate, test and predict, with the same "
            f"strategy object, or build a new module and load a checkpoint."
        )

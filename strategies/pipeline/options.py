"""What a user may choose about a pipeline, the run that it is in, and what a pipeline cannot do.

``PipelineOptions`` are checked before anything is started, and the ``refuse_*`` functions run
before a pipeline takes any memory.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.dry_run.unsupported import Reasons
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.optimizer_probe import mixes_parameters
from boltmesh.strategies.pipeline.partition.split import UnitCost
from boltmesh.strategies.pipeline.schedules.registry import check_schedule, schedule_kind
from boltmesh.strategies.pipeline.stage.units import is_absent
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

if TYPE_CHECKING:
    from boltmesh.strategies.engine.data_axis import LateGradientsAxis
    from boltmesh.strategies.pipeline.stage.cut import StageBoundaries


Split = str | Sequence[str] | Callable[[Sequence[UnitCost], int], Sequence[Sequence[str]]]
"""``"auto"`` or ``"measured"``, the names at which later stages begin, or a function that cuts."""

AUTOMATIC = ("auto", "measured")

AUTOMATIC_SCHEDULE = "auto"

WHOLE_BATCH = "gpipe"
"""The schedule of a loss over the whole batch, where none was asked for."""


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of the strategy.

    Raises:
        ConfigError: When they do not exist or do not fit together.
    """

    stages: int | None = None
    """Ranks of the pipeline; None: all of the job."""
    microbatches: int | None = None
    """None: four for each rank, or the nearest number that the schedule has."""
    schedule: str = AUTOMATIC_SCHEDULE
    """``auto``: 1f1b, and gpipe where the first batch shows that the loss needs the whole batch."""
    stages_per_rank: int | None = None
    """None: what is usual with the schedule."""
    split: Split = "auto"
    max_memory_bytes: int | None = None
    """Of a rank; None: what its device has, where that is a GPU."""

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
        """With which a run begins."""
        return "1f1b" if self.schedule == AUTOMATIC_SCHEDULE else self.schedule

    def num_microbatches(self, num_ranks: int) -> int:
        """Return how many microbatches a whole batch is cut into."""
        return 4 * num_ranks if self.microbatches is None else self.microbatches

    def num_stages(self, num_ranks: int) -> int:
        """Return the stages of the whole pipeline.

        Raises:
            ConfigError: When the schedule does not have these sizes.
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
    """Where the axis finds itself."""

    group: ProcessGroup
    """The ranks of this pipeline."""
    new_group: Callable[..., ProcessGroup | None]
    """Makes further groups of its ranks, see ``RankMeshStrategy.new_group``."""
    data: "LateGradientsAxis"
    """What becomes of the gradients of a batch where there are several pipelines."""
    device: torch.device
    recorder: Recorder | NullRecorder
    seed: int
    """What random numbers within steps start from; alike on all ranks of the pipeline."""
    timeout: timedelta | None = None
    scaler: GradScaler | None = None
    recomputed: frozenset[Module] = frozenset()
    """Blocks whose forward pass runs once more in the backward pass."""
    num_replicas: int = 1
    """Pipelines of the job, each with batches of its own."""
    num_sharing: int = 1
    """Ranks that share each layer, each in a group like this one beside the others."""
    num_averaged: int = 1
    """Ranks over which gradients of a stage are averaged: of replicas, and of a context axis."""
    coupled: ProcessGroup | None = None
    """Ranks of other pipelines that layers compute together with; None: there are none."""
    rounds_by_microbatch: bool = False
    """Whether products round by the largest element of a microbatch, as those in float8 do."""
    without_collectives: Callable[[], AbstractContextManager[None]] = nullcontext
    """Enters what layers are run in on tensors without data, by one rank alone."""
    boundaries: "StageBoundaries | None" = None
    """How values cross from one stage to the next where a rank has a part of each; None: whole."""

    @property
    def waits_within(self) -> bool:
        """Whether a stage waits for ranks outside of the pipeline."""
        return self.num_sharing > 1 or self.coupled is not None

    @property
    def num_communicators(self) -> int:
        """Communicators that a step uses: two directions of the pipeline, and groups beside it.

        At least: a tied weight may have one of its own, and shards.
        """
        directions = 2 if self.group.size() > 1 else 0
        return directions + (self.num_replicas > 1) + (self.num_sharing > 1)

    @property
    def shared_averages_may_differ(self) -> bool:
        """Whether stages may get averages of shared parameters that differ by a rounding.

        Sums of three and more depend on their order, and each stage has an order of its own.
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
"""Why ranks that hold stages cannot do apart what one process does."""


def refuse_manual_optimization(module: LightningModule) -> None:
    """Refuse to train where the step itself asks for backward passes.

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


def refuse_layout(options: PipelineOptions, layout: MeshLayout) -> None:
    """Refuse what the schedule has no order for, or cannot do beside other pipelines.

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
    """Refuse what cannot be with gradients that are applied a step late.

    Raises:
        UnsupportedError: Naming it, and what to do instead.
    """
    refuse_accumulation(trainer)
    if scaler is not None:
        raise UnsupportedError(
            "schedule='pipedream_2bw' applies gradients a step late, when fp16's loss scale may "
            "have become another one. Use precision='bf16-mixed', or schedule='1f1b'."
        )


def refuse_accumulation(trainer: Trainer) -> None:
    """Refuse to accumulate gradients that are applied a step late; a callback may begin any time.

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
    """Refuse optimizers that look at all gradients to step one parameter.

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
    """Refuse to time layers on one rank that can only run together with others.

    Raises:
        ConfigError: With what to do instead.
    """
    if options.split == "measured":
        raise ConfigError(
            "split='measured' lets one rank time each layer by itself, and with tensor or expert "
            "ranks layers run on several ranks together. Use split='auto', which counts operations."
        )


def refuse_absent_parameters(module: LightningModule) -> None:
    """Refuse to divide layers of a model that stages have been made of.

    Raises:
        ConfigError: With what to do in which order.
    """
    gone = [name for name, each in module.named_parameters() if is_absent(each)]
    if gone:
        raise ConfigError(
            f"{type(module).__name__} was divided into stages for another run, and this rank no "
            f"longer has {gone[0]!r} and {len(gone) - 1} other parameters, which the proof of a "
            f"tensor plan needs. Call Trainer.fit before validate, test and predict, with the same "
            f"strategy object, or build a new module and load a checkpoint."
        )

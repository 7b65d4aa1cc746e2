"""``PipelineParallelStrategy``: each rank holds some layers and sends activations to the next."""

from typing import Any

from typing_extensions import override

from boltmesh.errors import LayoutError
from boltmesh.strategies.data_parallel.pipeline_ddp import PipelineDdpAxis
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.options import AUTOMATIC_SCHEDULE, PipelineOptions, Split


class PipelineParallelStrategy(MeshStrategy):
    """Pipeline parallelism with an unchanged LightningModule.

    The layers are divided into stages, one after the other; every batch is cut into microbatches,
    which pass through the stages one behind the other. Results equal those of one process with
    the whole batch.

    Ranks beyond ``stages`` form further pipelines, replicas with batches of their own: the Trainer
    divides the data over them, and gradients are averaged over them once per optimizer step, as
    ``DDPStrategy`` does it. The ranks of a stage are adjacent: with 2 stages, ranks 0 and 1 of 4
    hold the first one.

    Layers that mix the rows of a batch are refused, except batch norms. Those see microbatches:
    as with accumulated gradients, they compute the moments of each and update their running
    statistics once for each (results equal those of one process that accumulates over the
    microbatches; GroupNorm and LayerNorm do not depend on the cut). A buffer or counter that the
    step itself changes also changes once for each microbatch. Batches with few rows are cut into
    fewer microbatches where batch norms of vectors need two rows.

    Each rank only has the values of its own stages and NaN for the others, so ``state_dict``
    raises. ``Trainer.save_checkpoint`` and ``ModelCheckpoint`` write the whole model, and
    ``gathered_parameters`` returns it. A norm that a hook computes from gradients is that of one
    rank; ``trainer.strategy.gradient_norm(optimizer)`` and ``torch.nn.utils.clip_grad_norm_`` use
    all stages.

    Args:
        stages: Number of ranks of a pipeline; None: all ranks of the job. A job with more ranks, a
            multiple of it, has several pipelines.
        microbatches: Parts into which a batch is cut; None: four for each rank. More make the
            bubble smaller and each part less efficient.
        schedule: By default ``"1f1b"``, or ``"gpipe"`` if the loss is over the whole batch.
            ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"``, ``"looped_bfs"``,
            ``"zero_bubble"``, ``"zbv"`` or ``"dualpipev"``; ``boltmesh schedule`` draws them. Or
            ``"pipedream_2bw"``, with other results: steps fill each other's bubbles, and the
            gradient of a batch is applied one step later than it was computed, W(t+1) = W(t) -
            step(gradient of batch t-1 at W(t-1)). The first step of a run changes nothing. This
            keeps two versions of the weights and of the gradients, and half as many activations
            again as 1f1b. Not with accumulation, fp16, activation checkpointing or several
            pipelines.
        stages_per_rank: Number of stages of each rank, for schedules that interleave them.
        split: ``"auto"`` balances counted floating point operations and parameters,
            ``"measured"`` the times of each part, which the first rank measures with one
            microbatch; else the names of the modules at which the second and later stages begin,
            or a function of the modules' costs and the number of stages that returns the names of
            each stage's.
        max_memory_bytes: Limit for the stages of a rank: parameters, gradients, Adam's state
            and the activations that the schedule keeps. Cuts that need more are skipped, and
            refused if there is no other. None: cuts are chosen to fit a GPU's memory, and none
            is refused.
        **kwargs: As for ``MeshStrategy``: ``timeout_s``, ``telemetry``, ``seed``,
            ``activation_checkpointing``, ``process_group_backend``, ``start_method`` and
            Lightning's own.

    Raises:
        ConfigError: If options contradict each other or do not exist.

    Sources: GPipe, Huang et al. 2019, https://arxiv.org/abs/1811.06965; 1F1B and interleaving,
    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473; zero bubble, Qi et al. 2023,
    https://arxiv.org/abs/2401.10241; PipeDream-2BW, Narayanan et al. 2021,
    https://arxiv.org/abs/2006.09503
    """

    strategy_name = "bolt_pipeline"

    def __init__(
        self,
        *,
        stages: int | None = None,
        microbatches: int | None = None,
        schedule: str = AUTOMATIC_SCHEDULE,
        stages_per_rank: int | None = None,
        split: Split = "auto",
        max_memory_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.options = PipelineOptions(
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            split=split,
            max_memory_bytes=max_memory_bytes,
        )
        self.pipeline_axis = PipelineAxis(self.options)
        super().__init__(axes=[self.pipeline_axis, PipelineDdpAxis()], **kwargs)

    @override
    def choose_layout(self, world_size: int) -> MeshLayout:
        stages = self.options.stages or world_size
        if world_size % stages:
            raise LayoutError(
                f"stages={stages} was asked of a job with {world_size} ranks, which make no whole "
                f"pipelines of {stages}. Start {stages} ranks (devices={stages}) or a multiple of "
                f"it, or set stages={world_size}."
            )
        return MeshLayout(pipeline=stages, data=world_size // stages)

"""``PipelineParallelStrategy``: each rank holds some layers, and passes activations on."""

from typing import Any

from typing_extensions import override

from boltmesh.errors import LayoutError
from boltmesh.strategies.data_parallel.pipeline_ddp import PipelineDdpAxis
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.options import AUTOMATIC_SCHEDULE, PipelineOptions, Split


class PipelineParallelStrategy(MeshStrategy):
    """Pipeline parallelism for a LightningModule as its author wrote it.

    The layers are divided into stages, one rank after the other; every batch is cut into
    microbatches, which pass through the stages one behind the other. The same numbers as one
    process with the whole batch.

    Ranks beyond ``stages`` are further pipelines, replicas with batches of their own: the Trainer
    deals the data out to them, and gradients are averaged over them once per optimizer step, as
    ``DDPStrategy`` does it. The ranks of a stage stand side by side: with 2 stages, ranks 0 and 1
    of 4 hold the first one.

    Layers that mix the rows of a batch are refused. Batch norms see microbatches instead, as where
    gradients are accumulated: they take the moments of each, and update their running statistics
    once for each (of the same numbers as one process that accumulates over the microbatches;
    GroupNorm and LayerNorm do not depend on the cut). A buffer or counter that the step itself
    changes is changed once for each microbatch too. Batches with few rows are cut into fewer
    microbatches where batch norms of vectors need two rows.

    Each rank has the values of its own stages alone, NaN in the place of others, so ``state_dict``
    raises: ``Trainer.save_checkpoint`` and ``ModelCheckpoint`` write the whole, and
    ``gathered_parameters`` shows it. Norms that a hook takes of gradients by hand are those of one
    stage; ``trainer.strategy.gradient_norm(optimizer)`` and ``torch.nn.utils.clip_grad_norm_`` are
    over all.

    Args:
        stages: Ranks of a pipeline; by default all ranks of the job. A job with more ranks, a
            multiple of it, has several pipelines.
        microbatches: Parts that a batch is cut into; four for each rank by default. More make the
            bubble smaller and each part less efficient.
        schedule: By default ``"1f1b"``, or ``"gpipe"`` where the loss is over the whole batch.
            ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"``, ``"looped_bfs"``,
            ``"zero_bubble"``, ``"zbv"`` or ``"dualpipev"``; ``boltmesh schedule`` draws them. Or
            ``"pipedream_2bw"``, which computes something else: steps take each other's gaps, and
            the gradient of a batch is applied one step later than it was made, W(t+1) = W(t) -
            step(gradient of batch t-1 at W(t-1)). The first step of a run changes nothing. It
            keeps two versions of the weights and of the gradients, and half as many activations
            again as 1f1b. Not with accumulation, fp16, activation checkpointing or several
            pipelines.
        stages_per_rank: How many stages each rank has, for schedules that interleave them.
        split: ``"auto"`` balances counted floating point operations and parameters,
            ``"measured"`` times that the first rank takes of each part with one microbatch; else
            the names of the modules at which the second and later stages begin, or a function of
            the modules' costs and the number of stages that returns the names of each stage's.
        max_memory_bytes: What the stages of a rank may take: parameters, gradients, Adam's state
            and the activations that the schedule keeps. Cuts that need more are passed over, and
            refused where there is no other. By default a GPU's memory, which refuses nothing.
        **kwargs: As for ``MeshStrategy``: ``timeout_s``, ``telemetry``, ``seed``,
            ``activation_checkpointing``, ``process_group_backend``, ``start_method`` and
            Lightning's own.

    Raises:
        ConfigError: When options contradict each other or do not exist.

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

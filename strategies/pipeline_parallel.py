"""``PipelineParallelStrategy``: each rank holds some layers, and passes activations on."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.data.lone import LoneRank
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.alike import of_first_rank, share_random_state
from boltmesh.strategies.pipeline.axis import PipelineAxis, PipelineContext
from boltmesh.strategies.pipeline.digest import BatchDigest, batch_digest
from boltmesh.strategies.pipeline.evaluation import evaluation_step
from boltmesh.strategies.pipeline.options import PipelineOptions, Split
from boltmesh.strategies.pipeline.runs import Around
from boltmesh.strategies.pipeline.sample import batch_sizes, sample_batch
from boltmesh.strategies.pipeline.training import training_step
from boltmesh.telemetry.traffic import ExpectedTraffic

BUBBLE = "boltmesh/bubble_ratio"
"""Idle over total time of the pipeline in the batch before, see ``executor/idle.py``."""

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class PipelineParallelStrategy(MeshStrategy):
    """Pipeline parallelism for a LightningModule as its author wrote it.

    The layers are divided into stages, one rank after the other; every batch is cut into
    microbatches, which pass through the stages one behind the other. The same numbers as one
    process with the whole batch.

    Args:
        stages: Ranks of the pipeline; by default all ranks of the job.
        microbatches: Parts that a batch is cut into; four for each rank by default. More make the
            bubble smaller and each part less efficient.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"``, ``"looped_bfs"``,
            ``"zero_bubble"``, ``"zbv"`` or ``"dualpipev"``; ``boltmesh schedule`` draws them.
        stages_per_rank: How many stages each rank has, for schedules that interleave them.
        split: ``"auto"`` balances floating point operations and parameters; else the names of the
            modules at which the second and later stages begin, or a function of the modules' costs
            and the number of stages that returns the names of each stage's.
        **kwargs: As for ``MeshStrategy``: ``timeout_s``, ``telemetry``, ``seed``,
            ``process_group_backend``, ``start_method`` and Lightning's own.

    Raises:
        ConfigError: When options contradict each other or do not exist.

    Sources: GPipe, Huang et al. 2019, https://arxiv.org/abs/1811.06965; 1F1B and interleaving,
    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473; zero bubble, Qi et al. 2023,
    https://arxiv.org/abs/2401.10241
    """

    strategy_name = "bolt_pipeline"

    def __init__(
        self,
        *,
        stages: int | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        split: Split = "auto",
        **kwargs: Any,
    ) -> None:
        self.options = PipelineOptions(
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            split=split,
        )
        super().__init__(data_axis=LoneRank(), **kwargs)
        self.pipeline_axis = PipelineAxis(self.options)
        self._resumed_seed: int | None = None
        """What random numbers within steps started from in the run that is gone on with."""
        self._digest: tuple[Any, BatchDigest] | None = None
        """The batch that was made ready last, and what it was before its transfer."""

    # Starting.

    @property
    @override
    def layout(self) -> MeshLayout:
        world_size = self.num_nodes * self.num_processes
        stages = self.options.stages or world_size
        if stages != world_size:
            raise LayoutError(
                f"stages={stages} was asked of a job with {world_size} ranks, and this strategy "
                f"puts every rank into one pipeline. Start {stages} ranks (devices={stages}), or "
                f"set stages={world_size}."
            )
        self.options.num_stages(stages)  # refuses what the schedule has no order for
        return MeshLayout(pipeline=stages)

    @override
    def _build_groups(self) -> dict[str, ProcessGroup]:
        groups = super()._build_groups()
        if "pipeline" not in groups:  # of one rank, which runs all stages
            groups["pipeline"] = groups["data"]
        return groups

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert trainer.state.fn is not None
        step = _STEPS[trainer.state.fn]
        _refuse(trainer, module, step)
        share_random_state(self.groups["pipeline"], self.root_device)
        axis = self.pipeline_axis
        axis.begin(self._pipeline_context())
        is_new = axis.placement is None or axis.placement.plans.root is not module
        if is_new or self._is_fitting:
            sample = sample_batch(trainer)
            axis.cutter.batch_sizes |= sample.batch_sizes
            rest, around = compat.step_arguments(module, step), self._around(step)
            if is_new:
                axis.place(module, step, sample.batch, rest, around)
            if self._is_fitting:
                axis.expect(sample.batch, rest, around)
        super().setup(trainer)
        if is_new:
            axis.start()
        axis.tell(trainer.accumulate_grad_batches)

    def _pipeline_context(self) -> PipelineContext:
        return PipelineContext(
            group=self.groups["pipeline"],
            device=self.root_device,
            recorder=self.recorder,
            seed=self._step_seed(),
            timeout=timedelta(seconds=self.timeout_s),
            scaler=getattr(self.precision_plugin, "scaler", None),
        )

    def _step_seed(self) -> int:
        """What random numbers within steps start from; alike on all ranks of a pipeline."""
        if self._resumed_seed is not None and self._is_fitting:
            return self._resumed_seed
        if self.seed is not None:
            return self.seed + self.coordinates["data"]
        return of_first_rank(torch.initial_seed() % 2**62, self.groups["pipeline"])

    @override
    def kept_for_resume(self) -> dict[str, Any]:
        return {"step_seed": self.pipeline_axis.context.seed}

    @override
    def take_kept(self, state: dict[str, Any]) -> None:
        if "step_seed" in state:
            self._resumed_seed = state["step_seed"]
            self.pipeline_axis.begin(self._pipeline_context())

    @override
    def _share_weights(self) -> None:
        pass  # every rank holds others

    @override
    def expected_traffic(self) -> list[ExpectedTraffic]:
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        return self.pipeline_axis.expected_traffic(
            trainer.accumulate_grad_batches, num_norms=int(compat.has_norm_clipping(trainer))
        )

    # The loops.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        # Lightning would seed them by the global rank: other crops and masks on every stage.
        compat.seed_workers(dataloader, self.coordinates["data"])
        self.pipeline_axis.cutter.batch_sizes |= batch_sizes(dataloader)
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        trainer = compat.trainer_of(self.lightning_module)
        is_last = trainer is not None and compat.gives_last_batch(trainer)
        ready = super().batch_to_device(batch, device, dataloader_idx)
        # Before the transfer, so that no device is waited for; on the CPU as the step gets it.
        seen = ready if self.root_device.type == "cpu" else batch
        self._digest = ready, batch_digest(seen, is_last=is_last)
        return ready

    def _digest_of(self, batch: Any) -> BatchDigest:
        """Return the digest of a batch that a step is given."""
        made, self._digest = self._digest, None
        if made is not None and made[0] is batch:
            return made[1]
        return batch_digest(batch)

    def _around(self, step: str) -> Around:
        plugin = self.precision_plugin
        contexts: dict[str, Around] = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }
        return contexts[step]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        axis = self.pipeline_axis
        axis.digest = self._digest_of(args[0])
        told = axis.sharing.size_per_batch()
        with self.recorder.phase("forward"):
            output = training_step(
                axis,
                args,
                kwargs,
                ordinal=trainer.fit_loop.total_batch_idx,
                around=self._around("training_step"),
            )
        if axis.sharing.size_per_batch() != told:  # the step logs something else than before
            self.recorder.expect(self.expected_traffic())
        self._log_bubble()
        return output

    def _log_bubble(self) -> None:
        """Log the newest bubble that is known, the same on all ranks; of the first batch none."""
        bubble = self.pipeline_axis.bubble
        if bubble is not None:
            assert self.lightning_module is not None
            self.lightning_module.log(BUBBLE, bubble, on_step=True, on_epoch=False, batch_size=1)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        self.pipeline_axis.digest = self._digest_of(args[0])
        return evaluation_step(
            self.pipeline_axis,
            step,
            args,
            kwargs,
            ordinal=compat.evaluation_batch_index(trainer),
            around=self._around(step),
            returns=step == "predict_step" or compat.reads_outputs(trainer, step),
        )

    # Gradients.

    @override
    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return float(self.pipeline_axis.norm(parameters))

    @override
    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        self.pipeline_axis.clip_by_norm(parameters, clip_val)

    # Checkpoints.

    @property
    @override
    def stores_shards(self) -> bool:
        return True

    divides_modules = True

    @override
    def holds(self, name: str) -> bool:
        return self.coordinates["pipeline"] in self.pipeline_axis.holders(name)

    @override
    def stores(self, name: str) -> bool:
        return self.pipeline_axis.holders(name)[0] == self.coordinates["pipeline"]

    @override
    def _joined_state(self, state: dict[str, Any]) -> dict[str, Any]:
        # Counters and the like are stored in one place, by the first rank.
        small = {
            name: {key: each for key, each in values.items() if not _is_stored_apart(each)}
            for name, values in state["state"].items()
            if self.stores(name)
        }
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, small)
        joined = {name: values for others in told for name, values in others.items()}
        own = {name: values for name, values in state["state"].items() if self.stores(name)}
        names = sorted({*joined, *own})
        return {
            **state,
            "state": {name: joined.get(name, {}) | own.get(name, {}) for name in names},
        }

    # Ending.

    @override
    def teardown(self) -> None:
        self.pipeline_axis.close()
        self._resumed_seed = None
        super().teardown()


def _refuse(trainer: Trainer, module: LightningModule, step: str) -> None:
    """Refuse what a pipeline cannot do, before it takes any memory.

    Raises:
        ConfigError: With what to do instead.
    """
    if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimises by hand (automatic_optimization=False), and in a "
            f"pipeline forward and backward passes of several microbatches are under way at once, "
            f"so manual_backward has no place in training_step. Return the loss from "
            f"training_step, or use bolt_ddp or bolt_zero3."
        )
    if compat.draws_from_iterator(module, step):
        raise ConfigError(
            f"{type(module).__name__}.{step} takes a dataloader_iter, and a pipeline runs it on "
            f"microbatches of a batch that is there before. Let it take a batch."
        )


def _is_stored_apart(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0

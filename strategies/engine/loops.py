"""The loops as Lightning calls them: data, evaluations, steps, gradients.

Each hook goes through the axes; what an axis does in a step is in its own file.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.dry_run.batch_check import batch_digest
from boltmesh.strategies.dry_run.metrics import gather_over, let_gather
from boltmesh.strategies.dry_run.step import Around
from boltmesh.strategies.engine.groups import RankMeshStrategy
from boltmesh.strategies.engine.memory_checkpoints import MemoryCheckpoints
from boltmesh.strategies.engine.replica_check import ReplicaCheck
from boltmesh.strategies.engine.resume import ResumeManager
from boltmesh.strategies.generation import follow_generation, forget_generation
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
from boltmesh.strategies.lightning_compat.loops import (
    draws_batches,
    evaluation_is_over,
    evaluation_length,
    gives_last_batch,
    seed_workers,
    watch_batches,
)
from boltmesh.strategies.lightning_compat.trainer import (
    autocast_dtype,
    callbacks_of,
    trainer_of,
    uses_lightning_norm,
)
from boltmesh.strategies.torch_compat.optimizers import total_norm_replaced

if TYPE_CHECKING:
    from boltmesh.strategies.engine.axis import StepFunction

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class LoopStrategy(RankMeshStrategy):
    """Runs the loops over a model that has been set up."""

    resume: ResumeManager | None = None
    """None before ``setup_environment``."""
    replica_check: ReplicaCheck | None = None
    """Where it was asked for."""
    memory_checkpoints: MemoryCheckpoints | None = None
    """Where they were asked for."""
    sigterm: SigtermAgreement | None = None
    """None before the first loop, and in a job of one rank."""

    @cached_property
    def clipped_norms(self) -> MutableMapping[Optimizer, Tensor]:
        """Norm of the gradients of each optimizer before they were last clipped by it."""
        return WeakKeyDictionary()

    @property
    def trainer(self) -> Trainer:
        """The one that runs now."""
        trainer = trainer_of(self.lightning_module)
        assert trainer is not None
        return trainer

    @property
    def is_fitting(self) -> bool:
        """Whether the run trains, its validation included."""
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    @property
    def step_name(self) -> str:
        """The method of the module that the run begins with."""
        function = self.trainer.state.fn
        assert function is not None
        return _STEPS[function]

    @property
    def scaler(self) -> GradScaler | None:
        """What scales losses and skips steps under ``16-mixed``."""
        return getattr(self.precision_plugin, "scaler", None)

    def step_context(self, step: str) -> Around:
        """Return what enters the precision that a step of the module runs in."""
        plugin = self.precision_plugin
        contexts: dict[str, Around] = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }
        return contexts[step]

    def host_step_context(self, step: str) -> Around:
        """Return ``step_context`` for a dry run on tensors of the CPU.

        Lightning enters autocast for the device of the run, and that casts nothing on the CPU.
        """
        around, dtype = self.step_context(step), autocast_dtype(self.precision_plugin)
        if dtype is None or self.root_device.type == "cpu":
            return around
        return partial(_nested, around, partial(torch.autocast, "cpu", dtype=dtype))

    # Data.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        for axis in self.axes:
            axis.check_dataloader(dataloader)
        if self.resume is not None and self.is_fitting:
            dataloader = self.resume.adopt(dataloader, self.trainer)
        if self.shares_batches:
            # Lightning would seed them by the global rank: other crops and masks on every rank.
            seed_workers(dataloader, self.coordinates["data"])
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        trainer = trainer_of(self.lightning_module)
        is_last = False
        if self.shares_batches and trainer is not None and trainer.state.fn is not None:
            is_last = gives_last_batch(trainer)
        with self.recorder.phase("transfer"):
            ready = super().batch_to_device(batch, device, dataloader_idx)
        if self.shares_batches:
            # Before the transfer, so that no device is waited for; on the CPU as the step gets it.
            seen = ready if self.root_device.type == "cpu" else batch
            digest = batch_digest(seen, is_last=is_last)
            for axis in reversed(self.axes):
                axis.announce_batch(ready, digest)
        return ready

    def check_batch(self, batch: Any) -> None:
        """Raise where ranks that share the model were given another batch than this one."""
        for axis in self.axes:
            axis.check_batch(batch)

    # The beginnings and ends of loops.

    @override
    def on_train_start(self) -> None:
        self._agree_on_sigterm()
        if self.resume is not None:
            self.resume.start(self.trainer)
        self._find_metrics()
        for axis in self.axes:
            axis.begin_training()
        if self.replica_check is not None:
            self.replica_check.start(self.trainer.global_step)
        if self.memory_checkpoints is not None:
            self.memory_checkpoints.start(self.trainer)

    @override
    def on_train_end(self) -> None:
        self.drain()
        if self.replica_check is not None:
            self.replica_check.after_step(self.trainer.global_step, is_last=True)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.resume is not None:
            self.resume.point.settle()
        if self.replica_check is not None:
            self.replica_check.after_step(self.trainer.global_step)
        if self.memory_checkpoints is not None:
            self.memory_checkpoints.before_batch(self.trainer.global_step)

    @override
    def on_validation_start(self) -> None:
        # For the memory of what is kept for backward passes; numbers would be the same.
        self.drain()
        if self.resume is not None and self.is_fitting:
            self.resume.point.set_aside()
        self._begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()
        if self.resume is not None:
            self.resume.point.take_back()

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()

    def drain(self) -> None:
        """Finish what training has left to the next batch. Collective over all ranks."""
        for axis in self.axes:
            axis.drain()

    def _agree_on_sigterm(self) -> None:
        """Lightning has put its own handler in front of the first loop."""
        if self.trainer.world_size > 1:
            if self.sigterm is None:
                found = (axis.sigterm_agreement() for axis in self.axes)
                agreement = next((each for each in found if each is not None), None)
                self.sigterm = agreement or SigtermAgreement(self.trainer)
            self.sigterm.begin()

    def _begin_evaluation(self) -> None:
        self._agree_on_sigterm()
        trainer = self.trainer
        length, draws = evaluation_length(trainer), draws_batches(trainer)
        for axis in self.axes:
            axis.begin_evaluation(length, draws_batches=draws)
        watch_batches(trainer, self._run_out_of_batches)
        self._find_metrics()

    def _run_out_of_batches(self, num_served: int) -> None:
        for axis in self.axes:
            axis.run_out_of_batches(num_served)

    def _end_evaluation(self) -> None:
        for axis in self.axes:
            axis.end_evaluation()

    @contextmanager
    def evaluation_batch(self) -> Iterator[None]:
        """Around a step of a loop that trains nothing."""
        is_last = partial(evaluation_is_over, self.trainer)
        with ExitStack() as stack:
            for axis in self.axes:
                stack.enter_context(axis.evaluation_batch(is_last))
            yield

    # Metrics.

    def _find_metrics(self) -> None:
        """Metrics may have been made as late as in the user's hooks at the start of a loop."""
        if self.shares_batches:
            self.gather_metrics()
        for axis in self.axes:
            axis.find_metrics()

    def gather_metrics(self) -> None:
        """Let metrics gather over the data axis alone, whose ranks see different batches."""
        gather_over(self._metric_owners(), self.groups["data"])

    def forget_metrics(self) -> None:
        """Let metrics gather as they would without the strategy."""
        let_gather(self._metric_owners())

    def _metric_owners(self) -> list[object]:
        trainer = trainer_of(self.lightning_module)
        callbacks = [] if trainer is None else callbacks_of(trainer)
        return [self.lightning_module, *callbacks]

    # Steps.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Under manual optimisation a step may clip by what torch has.
        with self._full_norms():
            return self._run_step("training_step", super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("predict_step", super().predict_step, args, kwargs)

    def _run_step(self, step: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step through the axes: each is around the inner ones, and all around Lightning's.

        Args:
            step: Its name.
            plain: Lightning's own way.
            args: Of the step.
            kwargs: Of the step.
        """
        run: StepFunction = partial(self._run_plain, step, plain)
        for axis in reversed(self.axes):
            run = partial(axis.run_step, step, run)
        return run(args, kwargs)

    def _run_plain(self, step: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.check_batch(args[0])
        is_training = step == "training_step"
        with self.recorder.phase("forward") if is_training else self.evaluation_batch():
            return plain(*args, **kwargs)

    def follow_generation(self) -> None:
        """Let the axes run calls of ``generate`` on parts of the module, from now on."""
        assert self.lightning_module is not None
        follow_generation(self.lightning_module, self._run_generation)

    def forget_generation(self) -> None:
        """Let ``generate`` run as it would without the strategy."""
        if self.lightning_module is not None:
            forget_generation(self.lightning_module)

    def _run_generation(self, run: Callable[[], Any]) -> Any:
        for axis in reversed(self.axes):
            run = partial(axis.run_generation, run)
        return run()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        # Left in ``post_backward``; an error in between leaves the rank in this phase, where it is.
        self.recorder.phase("backward").__enter__()
        assert self.model is not None
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            self.data_axis.before_manual_backward(self.model, closure_loss)
        else:
            self.data_axis.before_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.model is not None
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            self.data_axis.after_manual_backward(self.model)
        self.recorder.phase("backward").__exit__(None, None, None)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.model is not None
        with self.data_axis.no_sync(self.model):
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        # A hook of the user's may clip by what torch has.
        with self._full_norms(), self.recorder.phase("optimizer"):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            assert self.model is not None
            self.data_axis.after_optimizer_step(self.model, optimizer)
            return output

    # Precision and clipping.

    def norm_shares(self) -> list[NormShare]:
        """What the axes beside the data axis count of norms of gradients, innermost first."""
        return [share for axis in reversed(self.model_axes) for share in axis.norm_shares()]

    def _full_norms(self) -> AbstractContextManager[None]:
        """Let torch clip by the norm of the whole model, where a rank has parts of it.

        The data axis itself knows what torch does with its shards.
        """
        if not any(axis.size > 1 and axis.norm_shares() for axis in self.model_axes):
            return nullcontext()
        return total_norm_replaced(self.data_axis.norms.total)

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the norm of an optimizer's gradients over the whole model, before clipping.

        Collective over all ranks. Valid between the backward pass and the optimizer's step,
        as in ``on_before_optimizer_step``; None without any gradient. Gradients that live apart
        from ``.grad`` (offload) count too.
        """
        return self.data_axis.gradient_norm(_user_optimizer(optimizer))

    @property  # type: ignore[explicit-override]
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer clips through the plugin and never asks the strategy; a plugin with a norm
        # of its own keeps it.
        if precision_plugin is not None and uses_lightning_norm(precision_plugin):
            precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self._precision_plugin = precision_plugin

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        optimizer = _user_optimizer(optimizer)
        parameters = self.precision_plugin.main_params(optimizer)
        norm = self.data_axis.clip_by_norm(optimizer, parameters, clip_val)
        self.clipped_norms[optimizer] = norm.detach()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Mapping[str, Any]) -> None:
        """Nothing: ``boltmesh.strategies.registry`` registers all names."""


@contextmanager
def _nested(*contexts: Around) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each())
        yield


def _user_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """What ``configure_optimizers`` returned: manual optimisation has Lightning's wrapper of it."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

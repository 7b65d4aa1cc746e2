"""``LoopStrategy``: Lightning's hooks for data, evaluation, steps, gradients and generation.

Generation of a text takes as many passes as it has tokens, and ranks with different texts stop
after different numbers of passes. So ``generate`` is one call for the axes
(``Axis.run_generation``), wherever the user calls it: in a step, in a hook, in a callback.

``GenerationMixin.generate`` is replaced once per process. A call on a part of a LightningModule
that a strategy runs goes through that strategy; other calls are unchanged.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

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
    reads_gradients,
    run_gradient_hooks_within,
    trainer_of,
    uses_lightning_norm,
)
from boltmesh.strategies.parameter_access import GradientReads
from boltmesh.strategies.torch_compat.optimizers import TOTAL_NORM, total_norm_replaced
from boltmesh.strategies.torch_compat.tensors import functions_unwatched

if TYPE_CHECKING:
    from boltmesh.strategies.engine.axis import StepFunction

RunGeneration = Callable[[Callable[[], Any]], Any]
"""Runs a call of ``generate`` on all ranks that take part."""

_runners: "WeakKeyDictionary[LightningModule, WeakMethod[RunGeneration]]" = WeakKeyDictionary()
_replaced: set[type] = set()
_is_within: set[RunGeneration] = set()
"""Methods within a call of ``generate``, which may call a base class's or a helper's."""


def _replace(kind: Any) -> None:
    _replaced.add(kind)
    original = kind.generate

    @wraps(original)
    def generate(self: Module, *args: Any, **kwargs: Any) -> Any:
        run = _runner_of(self)
        if run is None:
            return original(self, *args, **kwargs)
        # With a module of FSDP2, Hugging Face would let all ranks run until the last has finished,
        # beyond the end of their caches.
        kwargs["synced_gpus"] = False
        call = partial(original, self, *args, **kwargs)
        if run in _is_within:
            return call()
        _is_within.add(run)
        try:
            return run(call)
        finally:
            _is_within.remove(run)

    kind.generate = generate


def _runner_of(part: Module) -> RunGeneration | None:
    for module, reference in _runners.items():
        run = reference()
        if run is not None and any(each is part for each in module.modules()):
            return run
    return None


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
    """None unless requested."""
    memory_checkpoints: MemoryCheckpoints | None = None
    """None unless requested."""
    sigterm: SigtermAgreement | None = None
    """None before the first loop."""

    @cached_property
    def clipped_norms(self) -> MutableMapping[Optimizer, Tensor]:
        """Gradient norm of each optimizer before its last clipping, shape ``()``."""
        return WeakKeyDictionary()

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the current run."""
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
        """Name of the step method of the current Trainer function."""
        function = self.trainer.state.fn
        assert function is not None
        return _STEPS[function]

    @property
    def scaler(self) -> GradScaler | None:
        """Scales losses and skips steps under ``16-mixed``, else None."""
        return getattr(self.precision_plugin, "scaler", None)

    def step_context(self, step: str) -> Around:
        """Return the context of the precision plugin for a step of the module."""
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

        @contextmanager
        def on_host() -> Iterator[None]:
            with around(), torch.autocast("cpu", dtype=dtype):
                yield

        return on_host

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
            # Digest before the transfer, to avoid a device wait; on the CPU as the step gets it.
            seen = ready if self.root_device.type == "cpu" else batch
            digest = batch_digest(seen, is_last=is_last)
            for axis in reversed(self.axes):
                axis.announce_batch(ready, digest)
        return ready

    def check_batch(self, batch: Any) -> None:
        """Raise if ranks that share the model have a batch other than this one."""
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
            self.resume.settle(self.trainer)
        if self.replica_check is not None:
            self.replica_check.after_step(self.trainer.global_step)
        if self.memory_checkpoints is not None:
            self.memory_checkpoints.before_batch(self.trainer.global_step)

    @override
    def on_validation_start(self) -> None:
        # Frees the activations kept for backward passes; results would be the same without.
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
        """Finish the work that training left for the next batch. Collective over all ranks."""
        for axis in self.axes:
            axis.drain()

    def _agree_on_sigterm(self) -> None:
        """Install the SIGTERM agreement; Lightning has installed its handler by the first loop."""
        if self.sigterm is None:
            axes = self.axes if self.trainer.world_size > 1 else ()
            agreements = filter(None, (axis.sigterm_agreement() for axis in axes))
            self.sigterm = next(agreements, None) or SigtermAgreement(self.trainer)
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
        """Return a context for a step of an evaluation loop."""
        is_last = partial(evaluation_is_over, self.trainer)
        with ExitStack() as stack:
            for axis in self.axes:
                stack.enter_context(axis.evaluation_batch(is_last))
            yield

    # Metrics.

    def _find_metrics(self) -> None:
        """Find metrics, which the user's hooks may have made at the start of a loop."""
        if self.shares_batches:
            self.gather_metrics()
        for axis in self.axes:
            axis.find_metrics()

    def gather_metrics(self) -> None:
        """Make metrics gather over the data axis only, whose ranks have different batches."""
        gather_over(self._metric_owners(), self.groups["data"])

    def forget_metrics(self) -> None:
        """Restore the metrics' own groups."""
        let_gather(self._metric_owners())

    def _metric_owners(self) -> list[object]:
        trainer = trainer_of(self.lightning_module)
        callbacks = [] if trainer is None else callbacks_of(trainer)
        return [self.lightning_module, *callbacks]

    # Steps.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Under manual optimisation a step may call torch's clipping.
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
        """Run a step through the axes: each wraps the inner ones, and all wrap Lightning's."""
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
        """Route calls of ``generate`` on parts of the module through the axes."""
        module = self.lightning_module
        assert module is not None
        _runners[module] = WeakMethod(self.run_generation)
        for part in module.modules():
            for kind in type(part).__mro__:
                if kind.__name__ == "GenerationMixin" and kind not in _replaced:
                    _replace(kind)

    def forget_generation(self) -> None:
        """Undo ``follow_generation``."""
        if self.lightning_module is not None:
            _runners.pop(self.lightning_module, None)

    def run_generation(self, run: Callable[[], Any]) -> Any:
        """Make a call that runs the module outside of steps through the axes. Collective."""
        for axis in reversed(self.axes):
            run = partial(axis.run_generation, run)
        return run()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        # Exited in ``post_backward``. After an error in between the rank stays in this phase.
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
        # A hook of the user may call torch's clipping.
        with self._full_norms(), self.recorder.phase("optimizer"):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            assert self.model is not None
            self.data_axis.after_optimizer_step(self.model, optimizer)
            return output

    # Precision and clipping.

    def norm_shares(self) -> list[NormShare]:
        """Return the parts of gradient norms on the axes beside the data axis, innermost first."""
        return [share for axis in reversed(self.model_axes) for share in axis.norm_shares()]

    def _full_norms(self) -> AbstractContextManager[None]:
        """Return a context in which torch clips by the norm of the whole model."""
        if all(share.group.size() == 1 for share in self.data_axis.norms.shares):
            return nullcontext()
        return total_norm_replaced(self._total_norm, self._check_clipped)

    def _total_norm(self, gradients: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        assert self.lightning_module is not None
        with functions_unwatched():
            own = {id(each.grad) for each in self.lightning_module.parameters()}
            is_other = given and not any(id(each) in own for each in given)  # of another module
            return (TOTAL_NORM if is_other else self.data_axis.norms.total)(given, *args, **kwargs)

    def _check_clipped(self, parameters: Sequence[Tensor]) -> None:
        assert self.lightning_module is not None
        with functions_unwatched():
            self.data_axis.norms.refuse_others(parameters, self.lightning_module.parameters())

    def _gradient_reads(self) -> AbstractContextManager[object]:
        """Return a context that reduces or refuses numbers that hooks compute from gradients."""
        module = self.lightning_module
        if module is None or not reads_gradients(self.trainer, module):
            return nullcontext()
        return GradientReads(self.data_axis.norms.shares)

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the norm of an optimizer's gradients over the whole model, before clipping.

        Collective over all ranks. Valid between the backward pass and the optimizer's step,
        as in ``on_before_optimizer_step``; None without any gradient. Gradients that live apart
        from ``.grad`` (offload) count too.
        """
        with functions_unwatched():
            return self.data_axis.gradient_norm(_user_optimizer(optimizer))

    @property  # type: ignore[explicit-override]
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer clips through the plugin and never calls the strategy; a plugin with its own
        # norm keeps it.
        if precision_plugin is not None and uses_lightning_norm(precision_plugin):
            precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        if precision_plugin is not None:
            run_gradient_hooks_within(precision_plugin, self._gradient_reads)
        self._precision_plugin = precision_plugin

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        optimizer = _user_optimizer(optimizer)
        parameters = self.precision_plugin.main_params(optimizer)
        with functions_unwatched():
            norm = self.data_axis.clip_by_norm(optimizer, parameters, clip_val)
        self.clipped_norms[optimizer] = norm.detach()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Mapping[str, Any]) -> None:
        """Do nothing: ``boltmesh.strategies.registry`` registers all names."""


def _user_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper, which manual optimisation has."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

"""The loops as Lightning calls them: data, evaluations, steps, gradients.

What each axis does of a step is its own business; here stands when it is asked.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data_parallel.unsupported import refuse_empty_share
from boltmesh.strategies.engine.groups import RankMeshStrategy
from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
from boltmesh.strategies.lightning_compat.loops import (
    draws_batches,
    evaluation_is_over,
    evaluation_length,
    watch_batches,
)
from boltmesh.strategies.lightning_compat.trainer import trainer_of, uses_lightning_norm

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class LoopStrategy(RankMeshStrategy):
    """Runs the loops over a model that has been set up."""

    @property
    def _trainer(self) -> Trainer:
        """The one that runs now."""
        trainer = trainer_of(self.lightning_module)
        assert trainer is not None
        return trainer

    @property
    def _is_fitting(self) -> bool:
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    @property
    def _step_name(self) -> str:
        """The method of the module that the run begins with."""
        function = self._trainer.state.fn
        assert function is not None
        return _STEPS[function]

    # Data.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.data_axis.is_sharded:
            refuse_empty_share(dataloader, self.groups["data"], self.root_device)
        if self._resume is None or not self._is_fitting:
            return dataloader
        return self._resume.adopt(dataloader, self._trainer)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        with self.recorder.phase("transfer"):
            return super().batch_to_device(batch, device, dataloader_idx)

    # The beginnings and ends of loops.

    @override
    def on_train_start(self) -> None:
        self._agree_on_sigterm()
        if self._resume is not None:
            self._resume.start(self._trainer)

    @override
    def on_train_end(self) -> None:
        self.finish_saving()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._resume is not None:
            self._resume.point.settle()

    @override
    def on_validation_start(self) -> None:
        if self._resume is not None and self._is_fitting:
            self._resume.point.set_aside()
        self._begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self.data_axis.end_evaluation()
        if self._resume is not None:
            self._resume.point.take_back()

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_test_end(self) -> None:
        self.data_axis.end_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_predict_end(self) -> None:
        self.data_axis.end_evaluation()

    def _agree_on_sigterm(self) -> None:
        """Lightning has put its own handler in front of the first loop."""
        if self._trainer.world_size > 1:
            if self._sigterm is None:
                self._sigterm = self._sigterm_agreement()
            self._sigterm.begin()

    def _sigterm_agreement(self) -> SigtermAgreement:
        return SigtermAgreement(self._trainer)

    def _begin_evaluation(self) -> None:
        self._agree_on_sigterm()
        trainer = self._trainer
        self.data_axis.begin_evaluation(
            evaluation_length(trainer), draws_batches=draws_batches(trainer)
        )
        watch_batches(trainer, self.data_axis.run_out_of_batches)

    def _evaluation_batch(self) -> AbstractContextManager[None]:
        return self.data_axis.evaluation_batch(partial(evaluation_is_over, self._trainer))

    # Steps.

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self._evaluation_batch():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self._evaluation_batch():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self._evaluation_batch():
            return super().predict_step(*args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self.recorder.phase("forward"):
            return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        # Left in ``post_backward``; an error in between leaves the rank in this phase, where it is.
        self.recorder.phase("backward").__enter__()
        assert self.model is not None
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            self.data_axis.before_manual_backward(self.model, closure_loss)

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
        with self.recorder.phase("optimizer"):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            assert self.model is not None
            self.data_axis.after_optimizer_step(self.model, optimizer)
            return output

    # Precision and clipping.

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
        self.data_axis.clip_by_norm(optimizer, parameters, clip_val)


def _user_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """What ``configure_optimizers`` returned: manual optimisation has Lightning's wrapper of it."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

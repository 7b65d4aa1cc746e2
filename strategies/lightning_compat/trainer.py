"""A Trainer's module, callbacks, plugins and modes, and the hooks that use its gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from pathlib import Path, PurePath
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn import Module


def is_wrapping(checkpoint_io: CheckpointIO) -> bool:
    """Whether a checkpoint plugin wraps another one, as the asynchronous one does."""
    return isinstance(checkpoint_io, _WrappingCheckpointIO)


def is_for_requeue(path: str | PathLike[str]) -> bool:
    """Whether a checkpoint is one that is saved for SLURM to requeue the job."""
    return PurePath(path).name.startswith("hpc_ckpt_")


def save_for_requeue_in(trainer: Trainer, folder: Path) -> None:
    """Make SLURM's signal to save and requeue save into a folder, not the Trainer's root folder.

    In the root folder, Lightning would find and load it in any later run under SLURM.
    """
    connector = trainer._checkpoint_connector
    own = connector.hpc_save_path
    connector.hpc_save_path = lambda folderpath: own(folder)  # type: ignore[method-assign]


def is_in_fit(trainer: Trainer) -> bool:
    """Whether a fit is running."""
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the module's Trainer, None before it is attached (the public property raises)."""
    return None if module is None else module._trainer


def attributes_of_run(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the attributes of a Trainer, its loops, their progress, and its schedulers."""
    schedulers = [each.scheduler for each in trainer.strategy.lr_scheduler_configs]
    waiting: list[Any] = [trainer, *schedulers]
    for each in schedulers:
        waiting += getattr(each, "_schedulers", ())
    by_id: dict[int, dict[str, Any]] = {}
    while waiting:
        attributes = vars(waiting.pop())
        if id(attributes) not in by_id:
            by_id[id(attributes)] = attributes
            waiting += [v for v in attributes.values() if isinstance(v, _Loop | _BaseProgress)]
    return list(by_id.values())


def autocast_dtype(plugin: Precision) -> "torch.dtype | None":
    """Return the dtype in which autocast computes, None for precisions without autocast."""
    if not isinstance(plugin, MixedPrecision):
        return None
    return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16


def parameter_dtype(plugin: Precision) -> torch.dtype:
    """Return the dtype to which a run converts an fp32 parameter."""
    # A layer of torch would draw its weights from the generator of the run.
    one = nn.ParameterList([torch.zeros(1)])
    return next(plugin.convert_module(one).parameters()).dtype


def is_compiled_whole(module: LightningModule | None) -> bool:
    """Whether ``torch.compile`` was called on the LightningModule itself."""
    return getattr(module, "_compiler_ctx", None) is not None


def in_precision(plugin: Precision, module: Module) -> Module:
    """Convert a module to the precision of a run, unless an earlier run has done so.

    Shards cannot be replaced by converted ones.
    """
    dtype = parameter_dtype(plugin)
    tensors = [*module.parameters(), *module.buffers()]
    if all(each.dtype == dtype for each in tensors if each.is_floating_point()):
        return module
    return plugin.convert_module(module)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's callbacks; Lightning does not declare the attribute."""
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def draws_graph(logger: Logger) -> bool:
    """Whether a logger runs the model to log its graph, as TensorBoard's may."""
    return bool(getattr(logger, "_log_graph", False))


def add_callback(trainer: Trainer, callback: Callback) -> None:
    """Add a callback after all others; replace one of the same class."""
    known: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    known[:] = [each for each in known if type(each) is not type(callback)]
    known.append(callback)


def prepare_for_parts(
    trainer: Trainer, run: Callable[[Callable[[], Any]], Any], *, is_sharded: bool
) -> None:
    """Prepare a Trainer for a module of which each rank holds a part.

    ``ModelSummary`` runs the module's ``example_input_array`` outside of steps.

    Args:
        trainer: A Trainer that sets up a run.
        run: Calls a function that uses the module outside of steps. Collective over all ranks.
        is_sharded: Whether parameters are gathered for each step.
    """
    if is_sharded:
        # Gathered parameters are kept and written in place later, and what is made under
        # ``inference_mode`` stays an inference tensor: evaluation loops use ``no_grad``.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
    if trainer.state.fn == TrainerFn.FITTING:
        for each in callbacks_of(trainer):
            if isinstance(each, ModelSummary):
                vars(each)["_summary"] = partial(_summary_by, run, each)


def _summary_by(
    run: Callable[[Callable[[], Any]], Any],
    callback: ModelSummary,
    trainer: Trainer,
    module: LightningModule,
) -> Any:
    del vars(callback)["_summary"]
    summarise = partial(callback._summary, trainer, module)
    return summarise() if module.example_input_array is None else run(summarise)


def tell_device(replica: Module, device: torch.device) -> None:
    """Make ``.device`` of a model copy's modules return the device to which torch moved it."""
    for each in replica.modules():
        if isinstance(each, _DeviceDtypeModuleMixin):
            each._device = device


def uses_lightning_norm(plugin: Precision) -> bool:
    """Whether clipping by norm is Lightning's own, so that ours may replace it."""
    return type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm


def run_gradient_hooks_within(
    plugin: Precision, context: Callable[[], AbstractContextManager[object]]
) -> None:
    """Make a plugin call the hooks after a backward pass and before a step within a context."""
    for name in ("post_backward", "_after_closure"):
        setattr(plugin, name, partial(_call_within, context, getattr(type(plugin), name), plugin))


def _call_within(
    context: Callable[[], AbstractContextManager[object]],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with context():
        return function(*args, **kwargs)


_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
)


def reads_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the user's code or the Trainer may read ``.grad`` before an optimizer has stepped.

    A callback with the class attribute ``reads_gradients = False`` does not count.
    """
    if trainer.gradient_clip_algorithm == "value":
        return True
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return True
    if module_reads_gradients(module):
        return True
    return any(
        is_overridden(name, callback, Callback)
        for callback in _readers(trainer)
        for name in _GRADIENT_HOOKS[:3]
    )


def module_reads_gradients(module: LightningModule) -> bool:
    """Whether a module's own hooks may read ``.grad`` before an optimizer has stepped."""
    hooks = (*_GRADIENT_HOOKS, "backward", "configure_gradient_clipping", "optimizer_zero_grad")
    is_automatic = module.automatic_optimization
    return not is_automatic or any(is_overridden(h, module, LightningModule) for h in hooks)


def module_keeps_gradients(module: LightningModule) -> bool:
    """Whether a module's own code zeroes gradients, or reads them before they are zeroed."""
    hooks = ("optimizer_zero_grad", "on_before_zero_grad")
    is_automatic = module.automatic_optimization
    return not is_automatic or any(is_overridden(h, module, LightningModule) for h in hooks)


def begins_window(trainer: Trainer) -> bool:
    """Whether the current batch is the first of an accumulation window.

    Lightning then zeroes gradients, whatever the last window has left. False if this is not
    known: with manual optimization, and in steps that draw their batches themselves.
    """
    if not (trainer.training and trainer.lightning_module.automatic_optimization):
        return False
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        return False  # whose steps say nothing dependable of a batch's number
    return not trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches


def zeroes_gradients(trainer: Trainer) -> bool:
    """Whether the current batch begins a step whose gradients Lightning's own code zeroes.

    It does so between forward and backward pass. False if a user's hook zeroes gradients, or may
    read them before.
    """
    if module_keeps_gradients(trainer.lightning_module) or not begins_window(trainer):
        return False
    return not any(
        is_overridden("on_before_zero_grad", each, Callback) for each in _readers(trainer)
    )


def _readers(trainer: Trainer) -> list[Callback]:
    """Return the callbacks without ``reads_gradients = False``."""
    return [each for each in callbacks_of(trainer) if getattr(each, "reads_gradients", True)]


def has_norm_clipping(trainer: Trainer) -> bool:
    """Whether the Trainer clips gradients by their norm."""
    algorithm = trainer.gradient_clip_algorithm
    return bool(trainer.gradient_clip_val) and algorithm in {None, "norm"}


def load_instead(trainer: Trainer, checkpoint: str) -> None:
    """Make a fit that is being set up resume from this checkpoint instead of its ``ckpt_path``.

    Args:
        trainer: The Trainer, before it restores anything.
        checkpoint: Path that is passed to its strategy.
    """
    connector = trainer._checkpoint_connector
    start = connector.resume_start

    def resume_start(checkpoint_path: object = None, weights_only: bool | None = None) -> None:
        connector.resume_start = start  # type: ignore[method-assign]
        start(checkpoint, weights_only)

    connector.resume_start = resume_start  # type: ignore[method-assign]

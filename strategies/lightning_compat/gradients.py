"""Who reads, clips and zeroes gradients besides the optimizers."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltmesh.strategies.lightning_compat.trainer import callbacks_of


def uses_lightning_norm(plugin: Precision) -> bool:
    """Whether clipping by norm is Lightning's own, so that ours may take its place."""
    return type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm


_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
)


def reads_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether anything of the user's may look at ``.grad`` before an optimizer has stepped.

    A callback with the class attribute ``reads_gradients = False`` is taken at its word.
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
    """Whether a module's own hooks may look at ``.grad`` before an optimizer has stepped."""
    hooks = (*_GRADIENT_HOOKS, "backward", "configure_gradient_clipping", "optimizer_zero_grad")
    is_automatic = module.automatic_optimization
    return not is_automatic or any(is_overridden(h, module, LightningModule) for h in hooks)


def module_keeps_gradients(module: LightningModule) -> bool:
    """Whether gradients of the step before are there until a module's own code zeroes them."""
    hooks = ("optimizer_zero_grad", "on_before_zero_grad")
    is_automatic = module.automatic_optimization
    return not is_automatic or any(is_overridden(h, module, LightningModule) for h in hooks)


def zeroes_gradients(trainer: Trainer) -> bool:
    """Whether the batch in work begins a step whose gradients Lightning's own code zeroes.

    It does so between forward and backward pass. False where a hook of the user's does it, or may
    look at what is there.
    """
    module = trainer.lightning_module
    if not trainer.training or module_keeps_gradients(module):
        return False
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        return False  # whose steps say nothing dependable of a batch's number
    if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
        return False
    return not any(
        is_overridden("on_before_zero_grad", each, Callback) for each in _readers(trainer)
    )


def _readers(trainer: Trainer) -> list[Callback]:
    """The callbacks that do not say of themselves that they look at no gradients."""
    return [each for each in callbacks_of(trainer) if getattr(each, "reads_gradients", True)]


def has_norm_clipping(trainer: Trainer) -> bool:
    """Whether the Trainer clips gradients by their norm."""
    algorithm = trainer.gradient_clip_algorithm
    return bool(trainer.gradient_clip_val) and algorithm in {None, "norm"}

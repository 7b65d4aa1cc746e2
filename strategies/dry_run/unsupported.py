"""Refuses steps, callbacks and parameters that ranks with parts of a model cannot handle.

Covers hooks that would compute the norm of one rank's gradients, Lightning options that run
separately on each rank, and parameters that cannot be divided.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.lightning_import import ROOTS
from boltmesh.strategies.lightning_compat.loops import draws_from_iterator
from boltmesh.strategies.lightning_compat.trainer import callbacks_of, draws_graph
from boltmesh.strategies.torch_compat.tensors import is_composite

_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "configure_gradient_clipping",
    "optimizer_step",
)
_LOCAL_NORMS: dict[str, Callable[..., Any]] = {
    "grad_norm": grad_norm,
    "get_total_norm": torch.nn.utils.get_total_norm,
}


def refuse_collective(function: Callable[..., Any], values: Iterable[object], place: str) -> None:
    """Refuse a collective of the user's code over all ranks, if they share one model.

    Args:
        function: A function of torch that is called.
        values: Its arguments; a process group other than the default one is allowed.
        place: The caller, for the error.

    Raises:
        UnsupportedError: Naming the function.
    """
    if getattr(function, "__module__", "") != dist.distributed_c10d.__name__:
        return
    groups = [each for each in values if isinstance(each, dist.ProcessGroup)]
    if all(each is dist.group.WORLD for each in groups):
        raise UnsupportedError(
            f"{place} calls torch.distributed.{function.__name__} over all ranks, and they hold "
            f"parts of one model: it would wait for ranks that do not call it, or add equal values "
            f"up. Turn it off in the layer (as sync_codebook=False does), call self.all_gather "
            f"in the step, or train with bolt_ddp or bolt_zero3."
        )


def refuse_derivative(place: str) -> NoReturn:
    """Refuse derivatives through layers that several stages have.

    Raises:
        UnsupportedError: Naming the place.
    """
    raise UnsupportedError(
        f"{place} computes derivatives through layers, and each rank of a pipeline has the graph "
        f"of its own stage alone, so that what passes through other stages would be missing. "
        f"Train with bolt_ddp, bolt_zero3 or bolt_tensor, or differentiate within one layer, by "
        f"what it makes itself or by its only input that has a gradient."
    )


def refuse_local_norms(
    owner: object, *, sees: str, names: Iterable[str] = tuple(_LOCAL_NORMS)
) -> None:
    """Refuse hooks that would use one rank's gradients as those of the model.

    Args:
        owner: The module, or a callback.
        sees: Description of the gradients that such a hook would see.
        names: Functions of ``_LOCAL_NORMS`` that it may not call.

    Raises:
        UnsupportedError: Naming the hook and what to call instead.
    """
    for hook in _GRADIENT_HOOKS:
        function = getattr(type(owner), hook, None)
        if function is None or function.__module__.partition(".")[0] in ROOTS:
            continue
        for name in names:
            norm = _LOCAL_NORMS[name]
            if _uses(function, name, norm) and not hasattr(owner, name):
                raise UnsupportedError(
                    f"{type(owner).__name__}.{hook} calls {name}, which would see {sees}. Take "
                    f"trainer.strategy.gradient_norm(optimizer), the norm over all ranks of the "
                    f"model, and clip by self.clip_gradients or torch.nn.utils.clip_grad_norm_."
                )


def _uses(function: Any, name: str, target: object) -> bool:
    """Whether a function's code refers to another one, as a global or as an attribute."""
    code = getattr(function, "__code__", None)
    if code is None or not any(name in each.co_names for each in with_inner(code)):
        return False
    return function.__globals__.get(name, target) is target


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of functions defined inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from with_inner(each)


@dataclass(frozen=True)
class Reasons:
    """Reasons of an axis, each completing a message that begins with the refused thing."""

    dataloader_iter: str
    """A step that draws batches itself."""
    batch_size_finder: str
    """The callback, and what to use instead."""
    sync_batchnorm: str
    """Lightning's option, and the alternative."""
    gradients: str
    """The gradients that a hook on one rank sees."""


def refuse_run(
    trainer: Trainer,
    module: LightningModule,
    step: str,
    *,
    synchronises_norms: bool,
    because: Reasons,
) -> None:
    """Refuse features that would run separately on each rank, with its part of the model.

    Args:
        trainer: The Trainer that is about to run.
        module: Its LightningModule.
        step: Step method of its first loop.
        synchronises_norms: Whether ``sync_batchnorm`` is on.
        because: The reasons of the axis.

    Raises:
        UnsupportedError: Naming the feature, and what to do instead.
    """
    if draws_from_iterator(module, step):
        raise UnsupportedError(
            f"{type(module).__name__}.{step} takes a dataloader_iter, and "
            f"{because.dataloader_iter}. Let it take a batch."
        )
    callbacks = callbacks_of(trainer)
    if any(isinstance(each, BatchSizeFinder) for each in callbacks):
        raise UnsupportedError(
            f"The batch size finder tries sizes until memory runs out, {because.batch_size_finder}"
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if synchronises_norms:
        raise UnsupportedError(f"sync_batchnorm=True {because.sync_batchnorm}")
    for each in (module, *callbacks):
        refuse_local_norms(each, sees=because.gradients)


def refuse_undividable(module: LightningModule, *, instead: str, sparse: str) -> None:
    """Refuse parameters that cannot be divided, or that are divided already.

    Args:
        module: The module to divide.
        instead: The alternative if another strategy has divided it.
        sparse: Completes the message about sparse gradients.

    Raises:
        UnsupportedError: Naming the parameter.
    """
    kind = type(module).__name__
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{name!r} of {kind} is sharded already, by another strategy. {instead}"
            )
    refuse_lazy(module)
    for name, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse:
            raise UnsupportedError(
                f"{name!r} of {kind} makes sparse gradients, {sparse}. Build it with sparse=False."
            )


def refuse_lazy(module: LightningModule) -> None:
    """Refuse parameters that have no shape yet.

    Raises:
        UnsupportedError: Naming the parameter.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UnsupportedError(
                f"{name!r} of {type(module).__name__} has no shape yet, so its part for each rank "
                f"is unknown. Run a forward pass of the lazy module in configure_model, or name "
                f"its sizes."
            )


def refuse_untrained(module: Module) -> None:
    """Refuse a module without trained parameters.

    Raises:
        ConfigError: Naming it.
    """
    if not any(each.requires_grad for each in module.parameters()):
        raise ConfigError(nothing_to_train(type(module).__name__))


def nothing_to_train(name: str) -> str:
    """Return the message for a module without trained parameters."""
    return (
        f"{name} has no parameter that requires a gradient, so there is nothing to train. Set "
        f"requires_grad of what is to be trained, or run validate, test or predict."
    )


def refuse_quantized(module: LightningModule, strategy: str, *, divides_layers: bool) -> None:
    """Refuse quantized parameters that this layout cannot hold.

    Parameters of bitsandbytes are bytes, which ZeRO shards. Those of torchao consist of several
    tensors, which torch's collectives do not take: data ranks keep them whole.

    Args:
        module: The module to place.
        strategy: Class name of the strategy, for messages.
        divides_layers: Layers are divided, copied, or run on fake tensors.

    Raises:
        UnsupportedError: Naming the parameter.
    """
    for name, parameter in module.named_parameters():
        kind = type(parameter)
        if is_composite(parameter) and parameter.requires_grad:
            advice = "Freeze it and train adapters"
        elif divides_layers and (
            is_composite(parameter) or kind.__module__.startswith("bitsandbytes")
        ):
            advice = "Use bolt_ddp or bolt_zero1 to 3"
        else:
            continue
        raise UnsupportedError(
            f"{name!r} is quantized ({kind.__name__}), and {strategy} cannot divide or send it. "
            f"{advice}, or a base that is not quantized."
        )


def refuse_callbacks(callbacks: Iterable[Callback], strategy: str) -> None:
    """Refuse callbacks that would treat a rank's part of the model as the whole.

    Args:
        callbacks: Callbacks of the Trainer.
        strategy: The name of the class that gives each rank a part.

    Raises:
        UnsupportedError: Naming the callback and what to do instead.
    """
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise UnsupportedError(
                f"{type(callback).__name__} masks whole parameters and renames them: with "
                f"{strategy} every rank would work on its part alone. Prune in one process, before "
                f"or after the run."
            )


def refuse_lone_work(trainer: Trainer) -> None:
    """Refuse callbacks and loggers that would use the model on one rank alone.

    Raises:
        UnsupportedError: Naming the callback or the logger.
    """
    refuse_lone_saves(callbacks_of(trainer))
    for logger in trainer.loggers:
        if draws_graph(logger):
            raise UnsupportedError(
                f"{type(logger).__name__}(log_graph=True) runs the model on the first rank alone, "
                f"and that rank has a part of it: it would wait for the others. Leave log_graph "
                f"out, and log the graph in a run of one process."
            )


def refuse_lone_saves(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that save on the rank that fails, while the others may be anywhere.

    Raises:
        UnsupportedError: Naming the callback.
    """
    for callback in callbacks:
        saves_on_exception = getattr(callback, "save_on_exception", False)
        if isinstance(callback, OnExceptionCheckpoint) or saves_on_exception:
            raise UnsupportedError(
                f"{type(callback).__name__} saves when a rank fails, and a checkpoint of shards "
                f"needs all ranks. Take it out and save as you go, with "
                f"ModelCheckpoint(every_n_train_steps=...)."
            )

"""What several axes refuse: what their ranks would do apart, and parameters without parts."""

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from boltmesh.errors import ConfigError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.steps.local_norms import refuse_local_norms


@dataclass(frozen=True)
class Reasons:
    """Why the ranks of an axis cannot, as messages go on behind what was asked."""

    dataloader_iter: str
    """A step that draws batches itself."""
    batch_size_finder: str
    """The callback, and what to use instead."""
    sync_batchnorm: str
    """Lightning's option, and what to do instead."""
    gradients: str
    """What a hook on one rank sees of them."""


def refuse_run(
    trainer: Trainer,
    module: LightningModule,
    step: str,
    *,
    synchronises_norms: bool,
    because: Reasons,
) -> None:
    """Refuse what each rank would do apart, with its part of the model.

    Args:
        trainer: About to run.
        module: What it runs.
        step: The method that it begins with.
        synchronises_norms: Whether batch norms are to be made of all ranks' batches.
        because: What the axis is to blame for.

    Raises:
        ConfigError: Naming it, and what to do instead.
    """
    if compat.draws_from_iterator(module, step):
        raise ConfigError(
            f"{type(module).__name__}.{step} takes a dataloader_iter, and "
            f"{because.dataloader_iter}. Let it take a batch."
        )
    callbacks = compat.callbacks_of(trainer)
    if any(isinstance(each, BatchSizeFinder) for each in callbacks):
        raise ConfigError(
            f"The batch size finder tries sizes until memory runs out, {because.batch_size_finder}"
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if synchronises_norms:
        raise ConfigError(f"sync_batchnorm=True {because.sync_batchnorm}")
    for each in (module, *callbacks):
        refuse_local_norms(each, sees=because.gradients)


def refuse_undividable(module: LightningModule, *, instead: str, sparse: str) -> None:
    """Refuse parameters that cannot be divided, or that somebody has divided already.

    Args:
        module: About to be divided.
        instead: What to do where another strategy has done it.
        sparse: What is the matter with sparse gradients, as the message goes on.

    Raises:
        ConfigError: Naming the parameter.
    """
    kind = type(module).__name__
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{name!r} of {kind} is sharded already, by another strategy. {instead}"
            )
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"{name!r} of {kind} has no shape yet, so nobody can say what its shards are. Run "
                f"a forward pass of the lazy module in configure_model, or name its sizes."
            )
    for name, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse:
            raise ConfigError(
                f"{name!r} of {kind} makes sparse gradients, {sparse}. Build it with sparse=False."
            )

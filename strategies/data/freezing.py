"""Lets parameters be frozen and trained again though each of them exists twice.

The optimizer holds the shard of a parameter, the forward pass uses the gathered whole. FSDP2 makes
the whole follow the shard when it gathers; what stays gathered has to be told.
"""

from collections.abc import Callable, Iterable

from lightning.pytorch import LightningModule
from torch.distributed.fsdp import FSDPModule

from boltmesh.strategies.torch_compat import refresh_gradient_types, unit_parameters

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def follow_shards(units: Iterable[FSDPModule]) -> None:
    """Make what is gathered require gradients where its shards do."""
    for unit in units:
        refresh_gradient_types(unit)
        for shard, whole in unit_parameters(unit):
            if whole is not None and whole.requires_grad != shard.requires_grad:
                whole.requires_grad_(shard.requires_grad)


def follow_toggles(module: LightningModule, follow: Callable[[], None]) -> None:
    """Call ``follow`` after each ``toggle_optimizer`` and ``untoggle_optimizer`` of this module.

    Manual optimisation switches between optimizers in the middle of a step, while parameters are
    gathered, and Lightning knows the shards only.
    """
    forget_toggles(module)
    for name in _TOGGLES:
        vars(module)[name] = _followed(getattr(module, name), follow)


def forget_toggles(module: LightningModule) -> None:
    """Undo ``follow_toggles``."""
    for name in _TOGGLES:
        vars(module).pop(name, None)


def _followed(toggle: Callable[..., None], follow: Callable[[], None]) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        toggle(*args, **kwargs)
        follow()

    return call

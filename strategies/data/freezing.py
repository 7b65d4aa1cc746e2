"""Lets parameters be frozen and trained again though each of them exists twice.

The optimizer holds the shard of a parameter, the forward pass uses the gathered whole. FSDP2 makes
the whole follow the shard when it gathers; what stays gathered has to be told, before a forward
pass (``StepUnits.follow_shards``) and by what is here within one.
"""

from collections.abc import Callable

from lightning.pytorch import LightningModule

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


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

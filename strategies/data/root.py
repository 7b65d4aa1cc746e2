"""What the forward pass goes through when parameters are sharded."""

from typing import Any

from lightning.pytorch import LightningModule
from torch.nn import Module
from typing_extensions import override


class Root(Module):
    """Holds the LightningModule as ``DistributedDataParallel`` does.

    The hooks that gather and free what no unit below owns sit here and not on the LightningModule:
    they run once around a whole ``training_step``, however often that calls ``self(...)``, also
    when it never does. And the LightningModule's parameters keep their names.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

"""What the forward pass goes through when parameters are sharded."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule
from torch.nn import Module, ModuleList
from typing_extensions import override


class Root(Module):
    """Holds the LightningModule as ``DistributedDataParallel`` does.

    The hooks that gather and free what no unit below owns sit here and not on the LightningModule:
    they run once around a whole ``training_step``, however often that calls ``self(...)``, also
    when it never does. And the LightningModule's parameters keep their names.

    Args:
        module: The whole model.
        adopted: Modules within units whose parameters are gathered here all the same.
    """

    def __init__(self, module: LightningModule, adopted: Iterable[Module] = ()) -> None:
        super().__init__()
        self.module = module
        self.adopted = ModuleList(adopted)
        self.is_running = False
        """Whether a step of the LightningModule is under way: under manual optimisation, backward
        passes and optimizer steps happen within."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.is_running = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self.is_running = False

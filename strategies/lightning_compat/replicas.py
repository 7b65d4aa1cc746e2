"""Where a copy of a LightningModule says that it is."""

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch.nn import Module


def tell_device(replica: Module, device: torch.device) -> None:
    """Let the modules of a copy that torch has put on a device give that one as theirs."""
    for each in replica.modules():
        if isinstance(each, _DeviceDtypeModuleMixin):
            each._device = device

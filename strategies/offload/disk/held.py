"""What the store of parameters knows of a shard: where the disk has it, and where memory does."""

from dataclasses import dataclass

import torch
from torch import Tensor

from boltmesh.strategies.offload.device_copy import DeviceCopy
from boltmesh.strategies.offload.disk.file import Extent


@dataclass(frozen=True)
class StoredShard:
    """A shard on the disk."""

    extent: Extent
    num_bytes: int
    dtype: torch.dtype

    def cut(self, buffer: Tensor) -> Tensor:
        """The values in a buffer."""
        return buffer[: self.num_bytes].view(self.dtype)


@dataclass
class HeldShard:
    """A shard that memory holds."""

    buffer: Tensor
    is_reading: bool = False
    is_writing: bool = False
    is_changing: bool = False
    num_users: int = 0
    copy: DeviceCopy | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the memory may be given to another shard."""
        is_busy = self.is_reading or self.is_writing or self.is_changing or self.num_users > 0
        return not is_busy and (self.copy is None or self.copy.is_host_free)

    def drop_copy(self) -> None:
        """Free what the shard takes of an accelerator."""
        if self.copy is not None:
            self.copy.drop()

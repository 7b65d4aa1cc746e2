"""The ranks that share every layer, and where this one stands among them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self


@dataclass(frozen=True)
class TensorGroup:
    """One row of ranks along the tensor axis.

    Wrappers on a model's modules hold it; a copy of such a model shares it, for a process group
    cannot be copied.
    """

    process_group: ProcessGroup
    device: torch.device
    """That its ranks compute and communicate on."""

    @property
    def size(self) -> int:
        """How many ranks share a layer."""
        return self.process_group.size()

    @property
    def rank(self) -> int:
        """Of this process, within the group."""
        return self.process_group.rank()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """What DTensors between column and row stand on. Made without communication."""
        return DeviceMesh.from_group(
            self.process_group, self.device.type, mesh_dim_names=("tensor",)
        )

    @contextmanager
    def counted_by(self, process_group: ProcessGroup) -> Iterator[None]:
        """Let another group take the place of this one, for who only wants to know what it does.

        DTensors between column and row stay on the mesh of this one.
        """
        self._fix_mesh()
        own = self.process_group
        object.__setattr__(self, "process_group", process_group)
        try:
            yield
        finally:
            object.__setattr__(self, "process_group", own)

    def _fix_mesh(self) -> None:
        """Make the mesh of this group while it stands in its own place."""
        _ = self.mesh

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

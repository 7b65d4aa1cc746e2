"""Samples the memory of this rank: totals twice a second, what it is for every few seconds."""

from typing import Final

import psutil
import torch

from boltmesh.telemetry import layout
from boltmesh.telemetry.recording import device as devices
from boltmesh.telemetry.recording.memory_walk import MemoryWalk, TensorsByKind
from boltmesh.telemetry.recording.writer import RankFile

MEMORY_EVERY_NS: Final = 500_000_000


class MemorySampler:
    """Reads the process's and the allocator's totals, and walks the model's tensors.

    Args:
        file: Where bytes by kind go.
        device: Of this rank.
    """

    def __init__(self, file: RankFile, device: torch.device) -> None:
        self.totals: tuple[int, ...] = (layout.UNKNOWN,) * 4
        """Host resident bytes, and device bytes allocated, reserved and at the peak."""
        self._file = file
        self._device = device
        self._process = psutil.Process()
        self._walk: MemoryWalk | None = None
        self._sampled_ns = 0

    def watch(self, tensors: TensorsByKind) -> None:
        """Walk these tensors from now on."""
        self._walk = MemoryWalk(tensors, "host" if self._device.type == "cpu" else "device")

    def sample(self) -> None:
        """Read the totals."""
        self.totals = (
            self._process.memory_info().rss,
            *(layout.UNKNOWN if each is None else each for each in devices.memory(self._device)),
        )

    def after_step(self, now_ns: int, *, is_updated: bool) -> None:
        """Do what is due; before the first update of the model there is no state to walk."""
        if now_ns - self._sampled_ns < MEMORY_EVERY_NS:
            return
        self._sampled_ns = now_ns
        self.sample()
        self._file.touch()
        if self._walk is not None and is_updated and self._walk.is_due(now_ns):
            self.walk()

    def walk(self) -> None:
        """Write the bytes by kind; what cannot be walked is said once and left."""
        if self._walk is None:
            return
        try:
            self._file.memory(self._walk.walk())
        except Exception as error:  # noqa: BLE001 - a model may hold tensors of any make
            self._walk = None
            self._file.event(
                "warning", f"memory by kind is not measured: {type(error).__name__}: {error}"
            )

"""Counts the rows that this rank sends to each expert, and writes them beside its file."""

import time
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from boltmesh.telemetry.job import MAX_JSON_BYTES, write_whole
from boltmesh.telemetry.snapshot import ExpertLoad

ENDING: Final = ".experts"
"""Ending of the file; the name before it is that of the rank's file."""
WRITE_EVERY_NS: Final = 2_000_000_000
"""Reading the counts waits for the device."""


class ExpertCounter:
    """The rows of each expert by module, on the device that chooses them.

    Args:
        path: The rank's file. What an earlier run has left beside it is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(ENDING)
        self._path.unlink(missing_ok=True)
        self._rows: dict[str, Tensor] = {}
        self._dropped: dict[str, Tensor] = {}
        self._before: dict[str, list[int]] = {}
        self._written_ns = time.monotonic_ns()

    def add(self, name: str, chosen: Tensor, num_experts: int) -> None:
        """Count the experts that a module has chosen for its rows, without waiting for the device.

        Args:
            name: The module.
            chosen: Their numbers, of any shape.
            num_experts: Experts of the module, on all ranks.
        """
        rows = self._rows.get(name)
        if rows is None:
            rows = torch.zeros(num_experts, dtype=torch.long, device=chosen.device)
            self._rows[name] = rows
        flat = chosen.detach().reshape(-1).long()
        rows.scatter_add_(0, flat, torch.ones_like(flat))

    def drop(self, name: str, count: Tensor) -> None:
        """Count rows that a module has not sent, without waiting for the device."""
        self._dropped[name] = self._dropped.get(name, 0) + count.detach()

    def after_step(self) -> None:
        """Write the counts if it is time to."""
        if self._rows and time.monotonic_ns() - self._written_ns >= WRITE_EVERY_NS:
            self.write()

    def write(self) -> None:
        """Write the counts, and those since the last time."""
        if not self._rows:
            return
        self._written_ns = time.monotonic_ns()
        now = {name: rows.tolist() for name, rows in self._rows.items()}
        loads = []
        for name, rows in now.items():
            before = self._before.get(name, [0] * len(rows))
            recent = tuple(a - b for a, b in zip(rows, before, strict=True))
            loads.append(ExpertLoad(name, tuple(rows), recent, int(self._dropped.get(name, 0))))
        self._before = now
        content = msgspec.json.encode(loads)
        if len(content) <= MAX_JSON_BYTES:
            write_whole(self._path, content)

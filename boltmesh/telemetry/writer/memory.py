"""Samples the memory of this rank: totals twice a second, by kind every few seconds.

The latter is measured by walking the tensors that a strategy names. A storage is counted once,
under the first kind that has it, however many tensors share it; of a tensor that is sharded over
ranks only what this rank holds. A walk costs about a microsecond a tensor, so it runs once every
few seconds, and less often where the model has very many.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import psutil
import torch
from torch import Tensor

from boltmesh.telemetry import layout
from boltmesh.telemetry.snapshot import MEMORY_KINDS, MEMORY_PLACES, MemoryPlace
from boltmesh.telemetry.writer import device as devices
from boltmesh.telemetry.writer.rank_file import RankFile

WALK_EVERY_NS: Final = 5_000_000_000
MAX_SHARE: Final = 1000
"""A walk is followed by at least this many times its duration without one."""


class StoredBytes(NamedTuple):
    """Bytes that no tensor shows: in a file, or in memory that is not torch's."""

    place: MemoryPlace
    num_bytes: int


TensorsByKind = Callable[[], Mapping[str, Iterable[Tensor | StoredBytes]]]
"""Returns the present tensors of each kind of MEMORY_KINDS."""


class MemoryWalk:
    """Says when to walk the tensors, and sums them by kind.

    Args:
        tensors: Returns the tensors to walk, by kind.
        place: Where the model is, ``device`` or ``host``.
    """

    def __init__(self, tensors: TensorsByKind, place: str) -> None:
        self._tensors = tensors
        self._place = place
        self._due_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Tell whether it is time for another walk."""
        return now_ns >= self._due_ns

    def walk(self) -> list[int]:
        """Return the bytes of each kind in each place, as ``layout.MEMORY`` has them."""
        begin = time.monotonic_ns()
        found = measure(self._tensors(), self._place)
        end = time.monotonic_ns()
        self._due_ns = end + max(WALK_EVERY_NS, MAX_SHARE * (end - begin))
        return [
            found.get((kind, place), layout.UNKNOWN)
            for kind in MEMORY_KINDS
            for place in MEMORY_PLACES
        ]


def measure(
    tensors: Mapping[str, Iterable[Tensor | StoredBytes]], place: str
) -> dict[tuple[str, str], int]:
    """Return the bytes by kind and place; a kind that is named and empty has 0 in ``place``."""
    found: dict[tuple[str, str], int] = {}
    seen: set[tuple[torch.device, int]] = set()
    for kind, each_of_kind in tensors.items():
        places = dict.fromkeys(MEMORY_PLACES, 0)
        for tensor in each_of_kind:
            if isinstance(tensor, StoredBytes):
                places[tensor.place] += tensor.num_bytes
                continue
            for plain in _components(tensor):
                if plain.is_meta or plain.layout is not torch.strided:
                    continue
                storage = plain.untyped_storage()
                key = (storage.device, storage.data_ptr())
                if key[1] and key not in seen:
                    seen.add(key)
                    places["host" if storage.device.type == "cpu" else "device"] += storage.nbytes()
        for where, size in places.items():
            if size or where == place:
                found[kind, where] = size
    return found


def _components(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of which this rank's part of a tensor consists."""
    local = _local(tensor)
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is None:
        yield local
        return
    for name in flatten()[0]:
        yield from _components(getattr(local, name))


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that this rank holds."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        local: Tensor = to_local()
    return local


MEMORY_EVERY_NS: Final = 500_000_000


class MemorySampler:
    """Reads the process's and the allocator's totals, and walks the model's tensors.

    Args:
        file: Where bytes by kind go.
        device: The device of this rank.
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
        """Write the bytes by kind. An error ends these walks, with one warning."""
        if self._walk is None:
            return
        try:
            self._file.memory(self._walk.walk())
        except Exception as error:  # noqa: BLE001 - a model may hold tensors of any make
            self._walk = None
            self._file.event(
                "warning", f"memory by kind is not measured: {type(error).__name__}: {error}"
            )

"""Host memory for offloaded state: on 2 MiB pages, aligned for direct I/O, registered with CUDA.

A transfer between such memory and a disk is 1.6 to 2.6 times as fast as on pages of 4 KiB, because
the kernel pins 512 times fewer of them for each request. torch's own pinned memory is not used: its
allocator rounds up to powers of two and gives nothing back.

``HostArena`` hands out one large piece in parts, so that a huge page is not spent on each of them;
``RangeAllocator`` cuts buffers of any size from one range, and takes them back.

``give_back_free_memory`` returns freed pages to the system. glibc keeps what is freed for later.
Between large tensors that come and go lie small ones that stay, so the gaps fit nothing large any
more, and a model that is built tensor by tensor would keep the memory of all of it.
"""

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import OffloadError


def describe_bytes(num_bytes: int) -> str:
    """Three digits and a unit: ``"1.5 GiB"``."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:.0f} GiB"


@functools.cache
def _trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def give_back_free_memory() -> None:
    """Return the pages that this process has freed; nothing on systems whose C library does."""
    trim = _trim()
    if trim is not None:
        trim(0)


PAGE_BYTES = 4096
"""Direct I/O asks for addresses, offsets and lengths in multiples of a block, at most this."""

HUGE_PAGE_BYTES = 2 << 20

HUGE_PAGES_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def round_up(num_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """The least multiple that is not smaller."""
    return -(-num_bytes // multiple) * multiple


_INHERITED: list[mmap.mmap] = []
"""Mappings of the process that forked this one."""


class _Pages(mmap.mmap):
    """A private anonymous mapping that is taken back from CUDA before the kernel takes it."""

    registered_at: int | None = None
    owner: int = 0
    _getpid = staticmethod(os.getpid)  # at the end of the interpreter the module is gone

    def __del__(self) -> None:
        if self.owner != self._getpid():
            # A forked child has this object, but neither the CUDA context nor the pages. What it
            # has mapped at their address since must not be unmapped: keep the object instead.
            _INHERITED.append(self)
        elif self.registered_at is not None:
            _cudart().cudaHostUnregister(self.registered_at)


def allocate_host(num_bytes: int, *, device: torch.device) -> Tensor:
    """Zeroed host memory that copies from and to ``device`` and a disk run at full speed from.

    It begins on a boundary of its pages, 2 MiB unless it is smaller, and is returned to the system,
    at once and wholly, with the last tensor that views it. A process forked meanwhile does not see
    it: otherwise reads that the parent has in flight could arrive in the child's copy, and the next
    step would take the memory twice.

    Args:
        num_bytes: How much.
        device: Where the data is computed with. On CUDA the memory is page-locked.

    Returns:
        A ``uint8`` tensor, shape ``(num_bytes,)``.

    Raises:
        OffloadError: When the system or CUDA does not give that much.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    page = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
    length = round_up(num_bytes, page)
    try:
        # One page more, for the boundary; what is never touched takes no memory.
        pages = _Pages(-1, length + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _lacking(num_bytes, error) from error
    pages.owner = os.getpid()
    if page == HUGE_PAGE_BYTES:
        _advise(pages, "MADV_HUGEPAGE")
    _advise(pages, "MADV_DONTFORK")
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % page
    whole = torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=num_bytes)
    whole.zero_()  # the first touch, on the thread and so the NUMA node that allocates
    if device.type == "cuda":
        _register(pages, whole.data_ptr(), length)
    return whole


def as_bytes(memory: Tensor) -> memoryview:
    """A contiguous CPU tensor as writable bytes. The caller keeps the tensor alive meanwhile."""
    num_bytes = memory.numel() * memory.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr())).cast("B")


def has_huge_pages() -> bool:
    """Whether the kernel gives 2 MiB pages to memory that asks for them."""
    try:
        return "[never]" not in HUGE_PAGES_SWITCH.read_text(encoding="ascii")
    except OSError:
        return False


def _advise(pages: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    try:
        pages.madvise(advice)
    except OSError as error:
        # What a kernel built without huge pages answers; preflight tells of it.
        if error.errno != errno.EINVAL:
            raise


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(pages: _Pages, address: int, length: int) -> None:
    result = _cudart().cudaHostRegister(address, length, 0)
    if int(result) != 0:
        raise OffloadError(
            f"CUDA did not lock {describe_bytes(length)} of host memory: {result}. Raise the limit "
            f"of locked memory (ulimit -l unlimited; in a container, --ulimit memlock=-1), or keep "
            f"less in host memory with a smaller strategy.offload_fraction."
        )
    pages.registered_at = address


def _lacking(num_bytes: int, error: OSError) -> OffloadError:
    lacking = OffloadError(
        f"the system gives no {describe_bytes(num_bytes)} of host memory: {error.strerror}. Set "
        f"strategy.offload_optimizer=nvme, or a smaller strategy.offload_fraction, or raise the "
        f"memory limit of this process or container."
    )
    lacking.errno = error.errno
    return lacking


ALIGNMENT_BYTES = 64
"""A cache line: no two parts share one."""


def copy_to_host(value: Tensor, into: Tensor, page_locked: Tensor) -> None:
    """Copy a flat tensor of a GPU into host memory that is not page-locked, at full speed.

    Args:
        value: What to copy, shape ``(numel,)``.
        into: As many elements of the same dtype.
        page_locked: Memory of ``allocate_host`` that the copy passes through, part by part.
    """
    passing = page_locked.view(value.dtype)
    for part, target in zip(
        torch.split(value, passing.numel()), torch.split(into, passing.numel()), strict=True
    ):
        target.copy_(passing[: part.numel()].copy_(part))


class HostArena:
    """Hands out parts of memory that ``allocate_host`` made for several of them.

    Args:
        device: Where the data is computed with.
        num_bytes: What is reserved at once.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self.device = device
        self.num_bytes = 0
        self._rest: Tensor | None = None
        self.reserve(num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Allocate what will be taken next, as ``bytes_of`` counts it; more comes as asked for."""
        if num_bytes > 0:
            self._rest = allocate_host(num_bytes, device=self.device)
            self.num_bytes += num_bytes

    @staticmethod
    def bytes_of(num_bytes: int) -> int:
        """What a part takes."""
        return round_up(max(1, num_bytes), ALIGNMENT_BYTES)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros."""
        wanted = numel * dtype.itemsize
        taken = self.bytes_of(wanted)
        if self._rest is None or self._rest.numel() < taken:
            self.reserve(taken)
        assert self._rest is not None
        part, self._rest = self._rest[:wanted], self._rest[taken:]
        return part.view(dtype)


class RangeAllocator:
    """First fit over the free ranges of one tensor; neighbours that are free become one.

    Args:
        memory: ``uint8``, page-aligned; only whole pages are asked for.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._free = {0: memory.numel()} if memory.numel() else {}

    @property
    def num_bytes(self) -> int:
        """How much there is, free or not."""
        return self._memory.numel()

    def take(self, num_bytes: int) -> Tensor | None:
        """A part of the memory, or None when no free range is long enough."""
        for start in sorted(self._free):
            length = self._free[start]
            if length >= num_bytes:
                del self._free[start]
                if length > num_bytes:
                    self._free[start + num_bytes] = length - num_bytes
                return self._memory[start : start + num_bytes]
        return None

    def give_back(self, part: Tensor) -> None:
        """Free what ``take`` gave."""
        start = part.data_ptr() - self._memory.data_ptr()
        end = start + part.numel()
        end += self._free.pop(end, 0)
        for before, length in self._free.items():
            if before + length == start:
                self._free[before] = end - before
                return
        self._free[start] = end - start

    def owns(self, part: Tensor) -> bool:
        """Whether ``take`` gave this."""
        return 0 <= part.data_ptr() - self._memory.data_ptr() < self._memory.numel()

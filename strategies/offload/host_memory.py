"""Host memory for offloaded state: on 2 MiB pages, aligned for direct I/O, registered with CUDA.

A transfer between such memory and a disk is 1.6 to 2.6 times as fast as on pages of 4 KiB, because
the kernel pins 512 times fewer of them for each request. torch's own pinned memory is not used: its
allocator rounds up to powers of two and gives nothing back.

``HostArena`` allocates large pieces and returns parts of them, so that a part does not take a huge
page of its own; ``RangeAllocator`` allocates and frees ranges of any size within one tensor.

``give_back_free_memory`` returns freed pages to the system. glibc keeps freed memory for reuse, but
small tensors that stay between large ones that come and go leave gaps too small for the next, and
building a model tensor by tensor would then keep the memory of the whole model.
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
    """Format with three digits and a unit: ``"1.5 GiB"``."""
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
    """Return pages freed by this process to the system; no-op where the C library has no trim."""
    trim = _trim()
    if trim is not None:
        trim(0)


PAGE_BYTES = 4096
"""Direct I/O requires addresses, offsets and lengths in multiples of a block, at most this."""

HUGE_PAGE_BYTES = 2 << 20

HUGE_PAGES_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def round_up(num_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """Round up to a multiple."""
    return -(-num_bytes // multiple) * multiple


_INHERITED: list[mmap.mmap] = []
"""Mappings of the process that forked this one."""


class _Pages(mmap.mmap):
    """A private anonymous mapping that is unregistered from CUDA before it is unmapped."""

    registered_at: int | None = None
    owner: int = 0
    _getpid = staticmethod(os.getpid)  # at the end of the interpreter the module is gone

    def __del__(self) -> None:
        if self.owner != self._getpid():
            # A forked child has this object, but neither the CUDA context nor the pages. It may
            # have mapped something else at their address, so keep the object and do not unmap.
            _INHERITED.append(self)
        elif self.registered_at is not None:
            _cudart().cudaHostUnregister(self.registered_at)


def allocate_host(num_bytes: int, *, device: torch.device) -> Tensor:
    """Allocate zeroed host memory for copies from and to ``device`` and a disk at full speed.

    It begins on a page boundary (2 MiB unless it is smaller) and is returned to the system at once
    when the last tensor that views it is freed. A process forked meanwhile does not have it:
    otherwise reads in flight in the parent could arrive in the child's copy, and the next step
    would take the memory twice.

    Args:
        num_bytes: Size.
        device: Compute device. For CUDA the memory is page-locked.

    Returns:
        A ``uint8`` tensor, shape ``(num_bytes,)``.

    Raises:
        OffloadError: When the system or CUDA does not provide that much.
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
    """View a contiguous CPU tensor as writable bytes, while the caller keeps the tensor alive."""
    num_bytes = memory.numel() * memory.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr())).cast("B")


def has_huge_pages() -> bool:
    """Whether the kernel provides 2 MiB pages on request."""
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
        # EINVAL: a kernel built without huge pages, which the disk preflight reports.
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
"""A cache line: two parts never share one."""


def copy_to_host(value: Tensor, into: Tensor, page_locked: Tensor) -> None:
    """Copy a flat tensor of a GPU into host memory that is not page-locked, at full speed.

    Args:
        value: Source on the GPU, shape ``(numel,)``.
        into: Destination, ``(numel,)`` of the same dtype.
        page_locked: Memory of ``allocate_host`` that the copy passes through, part by part.
    """
    passing = page_locked.view(value.dtype)
    for part, target in zip(
        torch.split(value, passing.numel()), torch.split(into, passing.numel()), strict=True
    ):
        target.copy_(passing[: part.numel()].copy_(part))


class HostArena:
    """Returns parts of larger allocations of ``allocate_host``. Parts are never freed singly."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0
        self._rest: Tensor | None = None

    def reserve(self, num_bytes: int) -> None:
        """Allocate for the next parts, sized by ``bytes_of``. ``take`` allocates more if needed."""
        if num_bytes > 0:
            self._rest = allocate_host(num_bytes, device=self.device)
            self.num_bytes += num_bytes

    @staticmethod
    def bytes_of(num_bytes: int) -> int:
        """Return the bytes that a part of this size occupies."""
        return round_up(max(1, num_bytes), ALIGNMENT_BYTES)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed memory, shape ``(numel,)``."""
        wanted = numel * dtype.itemsize
        taken = self.bytes_of(wanted)
        if self._rest is None or self._rest.numel() < taken:
            self.reserve(taken)
        assert self._rest is not None
        part, self._rest = self._rest[:wanted], self._rest[taken:]
        return part.view(dtype)


class RangeAllocator:
    """First-fit allocator over the free ranges of one tensor; adjacent free ranges are merged.

    Args:
        memory: ``uint8``, contiguous, ``(num_bytes,)``. Callers align the sizes that they take.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._free = {0: memory.numel()} if memory.numel() else {}

    @property
    def num_bytes(self) -> int:
        """Total size, free or not."""
        return self._memory.numel()

    def take(self, num_bytes: int) -> Tensor | None:
        """Return ``(num_bytes,)`` of the memory, or None when no free range is long enough."""
        for start in sorted(self._free):
            length = self._free[start]
            if length >= num_bytes:
                del self._free[start]
                if length > num_bytes:
                    self._free[start + num_bytes] = length - num_bytes
                return self._memory[start : start + num_bytes]
        return None

    def give_back(self, part: Tensor) -> None:
        """Free a part that ``take`` returned."""
        start = part.data_ptr() - self._memory.data_ptr()
        end = start + part.numel()
        end += self._free.pop(end, 0)
        for before, length in self._free.items():
            if before + length == start:
                self._free[before] = end - before
                return
        self._free[start] = end - start

    def owns(self, part: Tensor) -> bool:
        """Whether ``take`` returned this part."""
        return 0 <= part.data_ptr() - self._memory.data_ptr() < self._memory.numel()

"""Host memory for offloading: where it begins, what it is made of, when it goes."""

import gc
import os
import re
import resource
from pathlib import Path

import pytest
import torch

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload import host_memory
from boltmesh.strategies.offload.host_memory import (
    HUGE_PAGE_BYTES,
    _Pages,
    allocate_host,
    has_huge_pages,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def data_bytes() -> int:
    """Private writable memory of this process."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("num_bytes", [1, 4095, 100_001, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 3])
def test_memory_is_zeroed_and_begins_on_a_page(num_bytes: int) -> None:
    buffer = allocate_host(num_bytes, device=CPU)
    assert buffer.shape == (num_bytes,)
    assert not buffer.any()
    page = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 4096
    assert buffer.data_ptr() % page == 0


@pytest.mark.skipif(not has_huge_pages(), reason="the kernel gives no huge pages")
def test_large_memory_is_on_huge_pages() -> None:
    buffer = allocate_host(8 * HUGE_PAGE_BYTES, device=CPU)
    maps = Path("/proc/self/smaps").read_text()
    ranges = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?AnonHugePages:\s+(\d+) kB.*?VmFlags: ([\w ]*)$",
        maps,
        re.MULTILINE | re.DOTALL,
    )
    here = [
        (int(huge), flags.split())
        for start, end, huge, flags in ranges
        if int(start, 16) <= buffer.data_ptr() < int(end, 16)
    ]
    [(huge_kib, flags)] = here
    assert "hg" in flags, "they are asked for"
    assert huge_kib > 0, "before the first page is touched: how many there are is up to the kernel"


def test_memory_goes_with_its_last_view() -> None:
    gc.collect()
    before = data_bytes()
    view = allocate_host(32 << 20, device=CPU)[7:9]
    assert data_bytes() - before >= 32 << 20
    assert not view.any()
    del view
    assert data_bytes() - before < 1 << 20


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_see_it() -> None:
    buffer = allocate_host(4 << 20, device=CPU)
    address = f"{buffer.data_ptr():x}"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        maps = Path("/proc/self/maps").read_text()
        spans = [line.split()[0].split("-") for line in maps.splitlines()]
        is_there = any(int(a, 16) <= int(address, 16) < int(b, 16) for a, b in spans)
        os.write(writer, b"seen" if is_there else b"gone")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4) == b"gone"
    os.close(reader)
    os.close(writer)


def test_memory_that_is_not_there_is_refused_with_advice() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (64 << 20), hard))
    try:
        with pytest.raises(OffloadError, match=r"no 128 MiB of host memory.*offload_fraction"):
            allocate_host(128 << 20, device=CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class FakeRuntime:
    """The two calls of the CUDA runtime that matter here."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802
        if self.result == 0:
            self.registered[address] = length
        return self.result

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_memory_is_locked_for_cuda_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(host_memory, "_cudart", lambda: runtime)
    buffer = allocate_host(3 * HUGE_PAGE_BYTES + 1, device=CUDA)
    assert runtime.registered == {buffer.data_ptr(): 4 * HUGE_PAGE_BYTES}
    half = buffer[100:]
    del buffer
    assert runtime.registered
    del half
    gc.collect()
    assert not runtime.registered


def test_a_forked_process_leaves_lock_and_mapping_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    inherited: list[_Pages] = []
    monkeypatch.setattr(host_memory, "_cudart", lambda: runtime)
    monkeypatch.setattr(host_memory, "_INHERITED", inherited)
    buffer = allocate_host(4096, device=CUDA)
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(_Pages, "_getpid", staticmethod(lambda: parent + 1))
        del buffer
        gc.collect()
    assert runtime.registered
    assert len(inherited) == 1
    assert not inherited[0].closed


def test_a_refused_lock_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_cudart", lambda: FakeRuntime(result=2))
    with pytest.raises(OffloadError, match=r"did not lock 4 KiB.*ulimit -l unlimited"):
        allocate_host(4096, device=CUDA)


@pytest.mark.gpu
def test_cuda_copies_from_it_without_waiting() -> None:
    buffer = allocate_host(64 << 20, device=CUDA)
    assert buffer.is_pinned()
    buffer.random_(0, 256)
    there = buffer.to(CUDA, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), buffer)

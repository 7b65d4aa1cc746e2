"""Whatever a disk does wrong ends the run with its cause, and nothing wrong is handed out.

First faults that a test puts in the place of the system's calls, then real ones.
"""

import errno
import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.disk.param_store import DiskParameterStore
from boltmesh.strategies.offload.disk.state_store import DiskStateStore
from boltmesh.strategies.offload.disk.swap_file import Swap
from tests.support.faulty_disk import (
    EIO,
    ENOSPC,
    FaultyCalls,
    cut_file,
    failing,
    file_name,
    flip_bit,
    lost,
    torn,
)

CPU = torch.device("cpu")
NUMEL = 5000
CHUNK_BYTES = 3 * 20_480
CHUNKS = 7


@pytest.fixture
def calls() -> FaultyCalls:
    return FaultyCalls()


@pytest.fixture
def swap(tmp_path: Path, calls: FaultyCalls) -> Swap:
    return Swap(tmp_path, CHUNKS * CHUNK_BYTES, rank=1, calls=calls)


@pytest.fixture
def store(swap: Swap) -> Iterator[DiskStateStore]:
    store = DiskStateStore(swap, device=CPU)
    for chunk in range(CHUNKS):
        store.create(chunk, [torch.full((NUMEL,), float(chunk)) for _ in range(3)])
    store.flush()
    yield store
    store.close()


def step(store: DiskStateStore) -> None:
    """One optimizer step over all chunks, as the engine makes it."""
    for chunk in range(CHUNKS):
        for ahead in range(chunk, min(CHUNKS, chunk + 4)):
            store.prefetch(ahead)
        for tensor in store.acquire(chunk):
            tensor.add_(1)
        store.release(chunk, is_dirty=True)


def steps_until_error(store: DiskStateStore) -> OffloadError:
    def steps() -> None:
        for _ in range(3):
            step(store)

    with pytest.raises(OffloadError) as caught:
        steps()
    return caught.value


def assert_dead(store: DiskStateStore, error: OffloadError) -> None:
    """Every way to the state raises the cause: nobody can save half of a step."""
    actions: list[Callable[[], object]] = [
        lambda: store.acquire(0),
        lambda: store.acquire(CHUNKS - 1),
        lambda: store.prefetch(0),
        store.flush,
        lambda: store.create(99, [torch.zeros(1)]),
    ]
    for action in actions:
        with pytest.raises(OffloadError) as caught:
            action()
        assert caught.value is error


@pytest.mark.parametrize("number", [ENOSPC, EIO, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("after", [0, 3])
def test_a_failed_write_names_chunk_file_space_and_cure(
    store: DiskStateStore, calls: FaultyCalls, number: int, after: int
) -> None:
    calls.before_write = failing(number, after=after)
    error = steps_until_error(store)
    message = str(error)
    assert re.match(
        r"rank 1 could not write chunk \d of the optimizer state to /.*/boltmesh-rank1-\w+\.swap "
        r"\([\d.]+ [KMG]iB free there\): ",
        message,
    )
    assert f"({errno.errorcode[number]})" in message
    cure = "ulimit -f" if number == errno.EFBIG else "strategy.offload_path"
    assert cure in message
    assert "resume from the last checkpoint, which this does not touch" in message
    assert error.errno == number
    assert isinstance(error.__cause__, OSError)
    assert_dead(store, error)


def test_a_failed_read_names_chunk_file_and_cure(store: DiskStateStore, calls: FaultyCalls) -> None:
    calls.before_read = failing(EIO, after=2)
    error = steps_until_error(store)
    assert "rank 1 could not read chunk " in str(error)
    assert "Input/output error (EIO). The disk reports a fault" in str(error)
    assert_dead(store, error)


def test_an_error_while_nobody_waits_reaches_the_next_call(
    store: DiskStateStore, calls: FaultyCalls
) -> None:
    """The last write of a step fails after the step has returned."""
    failed = threading.Event()

    def fail(fd: int, data: memoryview, offset: int) -> None:
        failed.set()
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    store.acquire(0)
    calls.before_write = fail
    store.release(0, is_dirty=True)
    assert failed.wait(10)
    with pytest.raises(OffloadError, match="ENOSPC"):
        store.flush()
    with pytest.raises(OffloadError, match="ENOSPC"):
        store.acquire(3)


@pytest.mark.parametrize("fault", [torn, lost])
def test_a_disk_that_lies_about_a_write_is_found_out_when_it_is_read(
    store: DiskStateStore, calls: FaultyCalls, fault: Callable[[int, memoryview, int], int]
) -> None:
    numbers = itertools.count()  # several threads write

    def lie_once(fd: int, data: memoryview, offset: int) -> int | None:
        return fault(fd, data, offset) if next(numbers) == 0 else None

    calls.before_write = lie_once
    step(store)
    store.flush()
    store._held.clear()  # what memory still has is right
    error = steps_until_error(store)
    assert re.search(r"could not read chunk \d of the optimizer state", str(error))
    assert "are not those that were written there" in str(error)
    assert "Set strategy.offload_path to a folder on another disk" in str(error)
    assert_dead(store, error)


def test_a_bug_in_a_transfer_is_raised_too(store: DiskStateStore, calls: FaultyCalls) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError("oops")

    calls.before_write = stumble
    error = steps_until_error(store)
    assert "ZeroDivisionError: oops" in str(error)


def test_memory_that_is_missing_for_a_read_ahead_is_raised(
    store: DiskStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise OffloadError("no memory")

    store._held.clear()
    monkeypatch.setattr("boltmesh.strategies.offload.disk.state_store.allocate_host", refuse)
    with pytest.raises(OffloadError, match="no memory"):
        step(store)


def test_creating_on_a_full_disk_is_refused(tmp_path: Path, calls: FaultyCalls) -> None:
    store = DiskStateStore(Swap(tmp_path, calls=calls), device=CPU)
    calls.free = 4096
    with pytest.raises(OffloadError, match=r"rank 0 could not take .*ENOSPC"):
        store.create(0, [torch.zeros(NUMEL)])
    store.close()


# Real faults.


def test_a_flipped_bit_on_the_disk_is_found(store: DiskStateStore, swap: Swap) -> None:
    step(store)
    store.flush()
    flip_bit(swap, 2 * CHUNK_BYTES + 12_345)
    error = steps_until_error(store)
    assert "could not read chunk 2 of the optimizer state" in str(error)
    assert f"bytes from byte {2 * CHUNK_BYTES} on are not those" in str(error)
    assert_dead(store, error)


def test_a_block_in_the_place_of_another_is_found(store: DiskStateStore, swap: Swap) -> None:
    """A disk that mixes up addresses: the block is whole, and not the one that belongs there."""
    step(store)
    store.flush()
    with open(file_name(swap), "r+b", buffering=0) as file:
        file.seek(3 * CHUNK_BYTES)
        other = file.read(CHUNK_BYTES)
        file.seek(2 * CHUNK_BYTES)
        file.write(other)
    error = steps_until_error(store)
    assert "could not read chunk 2 of the optimizer state" in str(error)
    assert_dead(store, error)


def test_a_chunk_that_is_damaged_once_read_is_not_handed_out(
    store: DiskStateStore, swap: Swap, calls: FaultyCalls
) -> None:
    """Read ahead and right, and changed in memory before it is requested."""
    store._held.clear()
    store.prefetch(5)
    with store.changed:
        store.wait_until(lambda: not store._held[5].is_moving)
    store._held[5].buffer[20_480] ^= 1
    with pytest.raises(OffloadError, match="could not read chunk 5") as caught:
        store.acquire(5)
    assert_dead(store, caught.value)


def test_damage_to_what_is_not_read_again_does_no_harm(store: DiskStateStore, swap: Swap) -> None:
    step(store)
    store.flush()
    for chunk in (CHUNKS - 1, CHUNKS - 2):  # in memory, and written over by the next step
        store.acquire(chunk)
        store.release(chunk, is_dirty=False)
    for chunk in (CHUNKS - 1, CHUNKS - 2):
        flip_bit(swap, chunk * CHUNK_BYTES)
    for chunk in (CHUNKS - 1, CHUNKS - 2):
        assert all((tensor == chunk + 1).all() for tensor in store.acquire(chunk))
        store.release(chunk, is_dirty=True)


@pytest.mark.parametrize("num_bytes", [0, 4 * CHUNK_BYTES, 4 * CHUNK_BYTES + 4096 + 700])
def test_a_file_that_somebody_shortens_is_a_short_read(
    store: DiskStateStore, swap: Swap, num_bytes: int
) -> None:
    step(store)
    store.flush()
    cut_file(swap, num_bytes)
    error = steps_until_error(store)
    assert "could not read chunk" in str(error)
    assert "the transfer ended at byte" in str(error) or "not those" in str(error)
    assert_dead(store, error)


def test_a_limit_of_file_sizes_stops_a_write(store: DiskStateStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK_BYTES, hard))
    try:
        error = steps_until_error(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search(r"could not write chunk \d .*\(EFBIG\)\. Raise the limit", str(error))


def test_a_file_that_is_closed_under_the_store_is_an_error(
    store: DiskStateStore, swap: Swap
) -> None:
    os.close(swap.file._fd)
    error = steps_until_error(store)
    swap.file._fd = -1
    assert "EBADF" in str(error)


FULL_DISK = """
import sys, torch
from pathlib import Path
from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.disk.state_store import DiskStateStore
from boltmesh.strategies.offload.disk.swap_file import Swap
folder = Path(sys.argv[1])
(folder / "last.ckpt").write_bytes(b"checkpoint" * 1000)
try:
    Swap(folder, 16 << 20, rank=2)
except OffloadError as error:
    print(error)
store = DiskStateStore(Swap(folder, 2 << 20, rank=2), device=torch.device("cpu"))
(folder / "other").write_bytes(bytes(5 << 20))
try:
    for chunk in range(9):
        store.create(chunk, [torch.zeros(1 << 18)])
except OffloadError as error:
    print(error)
store.close()
assert (folder / "last.ckpt").read_bytes() == b"checkpoint" * 1000
print(sorted(path.name for path in folder.iterdir()))
"""


def in_small_file_system(folder: Path, script: str) -> str:
    """Run a script in a mount namespace of its own, where ``folder`` is a disk of 8 MiB."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    owner = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=8m tmpfs {folder} && exec"
    command = ["unshare", "--mount", *owner, "sh", "-c", f'{mount} "$@"', "sh"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount here")
    command += [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_disk_that_is_really_full_is_refused_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    first, later, files = in_small_file_system(tmp_path, FULL_DISK).splitlines()
    full = r".*\(%s free there\): No space left on device \(ENOSPC\)"
    assert re.match(r"rank 2 could not take 16 MiB for " + full % r"7\.\d+ MiB", first)
    assert re.match(r"rank 2 could not take 1 MiB for " + full % r"[\d.]+ \w+", later)
    assert files == "['last.ckpt', 'other']"


# The store of parameters.


@pytest.fixture
def parameters(swap: Swap) -> Iterator[DiskParameterStore]:
    store = DiskParameterStore(swap, device=CPU, window_bytes=3 * 20_480)
    for index in range(8):
        store.create(index, torch.full((NUMEL,), float(index)))
    yield store
    store.close()


def pass_over(store: DiskParameterStore) -> None:
    for index in (*range(8), *reversed(range(8))):
        store.get(index)
        store.release(index)


def parameter_error(store: DiskParameterStore) -> OffloadError:
    def steps() -> None:
        for _ in range(10):
            store.begin_step()
            pass_over(store)
            for index in range(8):
                store.put(index, torch.ones(NUMEL))
        store.flush()

    with pytest.raises(OffloadError) as caught:
        steps()
    for action in (
        store.begin_step,
        store.flush,
        lambda: store.get(7),
        lambda: store.put(0, torch.zeros(NUMEL)),
    ):
        with pytest.raises(OffloadError) as again:
            action()
        assert again.value is caught.value
    return caught.value


@pytest.mark.parametrize("after", [0, 5, 20])
def test_a_failed_read_of_parameters_ends_the_run(
    parameters: DiskParameterStore, calls: FaultyCalls, after: int
) -> None:
    calls.before_read = failing(EIO, after=after)
    assert "could not read parameter shard" in str(parameter_error(parameters))


@pytest.mark.parametrize("after", [0, 5, 20])
def test_a_failed_write_of_parameters_ends_the_run(
    parameters: DiskParameterStore, calls: FaultyCalls, after: int
) -> None:
    calls.before_write = failing(ENOSPC, after=after)
    assert "could not write parameter shard" in str(parameter_error(parameters))


def test_a_damaged_parameter_is_never_computed_with(
    parameters: DiskParameterStore, swap: Swap
) -> None:
    flip_bit(swap, parameters._shards[4].extent.offset + 77)
    error = parameter_error(parameters)
    assert "could not read parameter shard 4 from" in str(error)
    assert "not those that were written there" in str(error)


def test_memory_that_is_missing_for_a_shard_is_raised(
    parameters: DiskParameterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise OffloadError("no memory")

    monkeypatch.setattr("boltmesh.strategies.offload.disk.param_store.allocate_host", refuse)
    with pytest.raises(OffloadError, match="no memory"):
        pass_over(parameters)

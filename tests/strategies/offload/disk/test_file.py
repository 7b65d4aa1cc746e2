"""The swap file takes its space at once, is nobody else's, and leaves nothing."""

import errno
import os
import resource
import stat
from pathlib import Path

import pytest

from boltmesh.errors import ConfigError, OffloadError
from boltmesh.strategies.offload.disk.swap_file import FileCalls, SwapFile
from tests.support.faulty_disk import EIO, ENOSPC, FaultyCalls, fault

MIB = 1 << 20


def make(folder: Path, num_bytes: int = MIB, calls: FileCalls | None = None) -> SwapFile:
    return SwapFile(folder, num_bytes, rank=3, calls=calls or FileCalls())


def test_the_file_is_private_unnamed_and_preallocated(tmp_path: Path) -> None:
    file = make(tmp_path, 3 * MIB + 1)
    status = os.fstat(file._fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert 512 * status.st_blocks >= 3 * MIB + 4096
    file.close()


def test_a_closed_file_gives_its_space_back(tmp_path: Path) -> None:
    file = make(tmp_path)
    link = Path(f"/proc/self/fd/{file._fd}")
    assert link.exists()
    fd = file._fd
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_extents_are_whole_pages_and_do_not_overlap(tmp_path: Path) -> None:
    file = make(tmp_path, 8192)
    extents = [file.allocate(str(n), n) for n in (1, 4096, 4097, 100_000)]
    assert [each.num_bytes for each in extents] == [4096, 4096, 8192, 102_400]
    ends = [each.offset + each.num_bytes for each in extents]
    assert [each.offset for each in extents] == [0, *ends[:-1]]
    assert os.fstat(file._fd).st_size == file.size == ends[-1]
    file.close()


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload_path=.*nowhere is no folder.*mkdir -p"):
        make(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OffloadError, match=r"rank 3 could not create .*EACCES.*may write to"):
        make(tmp_path)


def test_a_disk_that_is_too_small_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    calls = FaultyCalls()
    calls.free = 5 * MIB
    calls.allocate_error = EIO  # would be said if it was asked
    with pytest.raises(OffloadError) as caught:
        make(tmp_path, 1 << 30, calls)
    assert str(caught.value).startswith("rank 3 could not take 1 GiB for ")
    assert "(5 MiB free there): No space left on device (ENOSPC)." in str(caught.value)
    assert "set strategy.offload_path to a folder on a larger disk" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [ENOSPC, errno.EDQUOT, EIO])
def test_space_that_cannot_be_taken_is_refused(tmp_path: Path, number: int) -> None:
    calls = FaultyCalls()
    calls.allocate_error = number
    with pytest.raises(OffloadError, match=errno.errorcode[number]) as caught:
        make(tmp_path, MIB, calls)
    assert caught.value.errno == number
    assert isinstance(caught.value.__cause__, OSError)


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OffloadError, match=r"EFBIG.*ulimit -f unlimited"):
            make(tmp_path, 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_system_without_direct_io_goes_through_the_page_cache(tmp_path: Path) -> None:
    calls = FaultyCalls()
    calls.refuses_direct = True
    file = make(tmp_path, MIB, calls)
    assert not file.is_direct
    calls.sync_error = EIO
    with pytest.raises(OffloadError, match=r"rank 3 could not sync .*EIO"):
        file.sync()
    file.close()


def test_direct_io_has_nothing_to_sync(tmp_path: Path) -> None:
    calls = FaultyCalls()
    calls.sync_error = EIO
    file = make(tmp_path, MIB, calls)
    if not file.is_direct:
        pytest.skip("this file system refuses direct I/O")
    file.sync()
    file.close()


def test_what_the_kernel_does_not_know_is_not_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.fcntl", lambda *_: 0)
    assert FileCalls().make_direct(0)

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if flags:
            raise fault(errno.EINVAL)
        return 0

    monkeypatch.setattr("fcntl.fcntl", refuse)
    assert not FileCalls().make_direct(0)
    monkeypatch.delattr("os.O_DIRECT")
    assert not FileCalls().make_direct(0)


@pytest.mark.parametrize("step", [4096, 5000, 65_536])
def test_partial_transfers_go_on_at_whole_pages(tmp_path: Path, step: int) -> None:
    calls = FaultyCalls()
    file = make(tmp_path, MIB, calls)
    written = bytearray(65_536)

    def some(fd: int, data: memoryview, offset: int) -> int:
        now = min(step, len(data))
        written[offset : offset + now] = data[:now]
        return now

    calls.before_write = some
    data = bytes(n % 251 for n in range(65_536))
    file.write(memoryview(bytearray(data)), 0)
    assert bytes(written) == data
    assert all(offset % 4096 == 0 for offset in calls.writes)
    file.close()

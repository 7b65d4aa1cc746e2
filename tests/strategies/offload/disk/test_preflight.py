"""What a disk can do is measured before training and said in one line."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from boltmesh import file_system
from boltmesh.file_system import file_system_of
from boltmesh.strategies.offload.disk.preflight import (
    DiskLoad,
    DiskReport,
    announce_disks,
    measure_disk,
    preflight_line,
)
from boltmesh.strategies.offload.disk.swap_file import Swap
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from tests.support.faulty_disk import EIO, FaultyCalls, failing
from tests.support.ranks import run_ranks

GB = 10**9
GIB = 1 << 30

REPORT = DiskReport(
    host="one",
    folder="/nvme/swap",
    file_system="ext4",
    is_direct=True,
    taken_bytes=3 * GIB,
    free_bytes=50 * GIB,
    read_rate=4.0 * GB,
    write_rate=2.0 * GB,
    both_rate=1.5 * GB,
    adam_rate=1e9,
    has_huge_pages=True,
    locked_bytes=None,
    load=DiskLoad(step_read_bytes=6 * GB, step_write_bytes=6 * GB, numel=500_000_000),
)


def test_the_line_says_space_bandwidth_memory_and_time() -> None:
    assert preflight_line([REPORT]) == (
        "offload to /nvme/swap (ext4, direct I/O): 1 rank takes 3 GiB, 50 GiB stay free; "
        "each rank reads 4 GB/s, writes 2 GB/s, both at once 1.5 GB/s; 2 MiB pages; "
        "locked memory unlimited; an optimizer step takes about 4.0 s"
    )


def test_what_makes_it_slow_is_said() -> None:
    slow = replace(
        REPORT, is_direct=False, has_huge_pages=False, locked_bytes=8 << 20, file_system="nfs"
    )
    line = preflight_line([slow])
    assert "(nfs, through the page cache: it refuses direct I/O)" in line
    assert "no 2 MiB pages, so up to 2.6 times slower; locked memory up to 8 MiB" in line
    assert "(tmpfs, which is host memory, not a disk)" in preflight_line(
        [replace(REPORT, file_system="tmpfs")]
    )


def test_ranks_of_a_host_are_added_up_and_the_slowest_rank_counts() -> None:
    near = replace(REPORT, free_bytes=49 * GIB, read_rate=3.0 * GB)
    far = replace(REPORT, host="two", both_rate=0.5 * GB)
    line = preflight_line([REPORT, near, far])
    assert "2 ranks take 6 GiB, 49 GiB stay free; each rank reads 3 GB/s" in line
    assert line.endswith("an optimizer step takes about 12.0 s on two")


@pytest.mark.parametrize(
    ("load", "step_s"),
    [
        (DiskLoad(0, 0, 2_000_000_000), 2.0),  # arithmetic
        (DiskLoad(3 * GB, 3 * GB, 0), 2.0),  # both directions at once
        (DiskLoad(3 * GB, 5 * GB, 0), 3.0),  # what is left of the writes goes alone
        (DiskLoad(7 * GB, 3 * GB, 0), 3.0),
    ],
)
def test_a_step_takes_its_transfers_or_its_arithmetic(load: DiskLoad, step_s: float) -> None:
    assert replace(REPORT, load=load).step_s == pytest.approx(step_s)


def test_parameters_on_disk_are_read_in_each_pass() -> None:
    load = replace(REPORT.load, gather_bytes=GB)
    line = preflight_line([replace(REPORT, load=load)])
    assert line.endswith("an optimizer step takes about 4.0 s, reading all parameters 250 ms")


def test_measuring_moves_data_both_ways_within_the_file(tmp_path: Path) -> None:
    calls = FaultyCalls()
    swap = Swap(tmp_path, 1 << 20, calls=calls)
    report = measure_disk(swap, DiskLoad(1, 1, 1))
    assert {report.taken_bytes, swap.file.size} == {1 << 20}
    assert min(report.read_rate, report.write_rate, report.both_rate, report.adam_rate) > 0
    assert max(report.read_rate, report.write_rate) < 1e13
    assert max(calls.reads + calls.writes) < 1 << 20
    extent = swap.allocate("first", 100)
    assert extent.offset == 0  # measuring takes no space
    swap.close()


def test_a_disk_that_fails_is_found_before_training(tmp_path: Path) -> None:
    calls = FaultyCalls()
    calls.before_write = failing(EIO)
    swap = Swap(tmp_path, 1 << 20, rank=2, calls=calls)
    with pytest.raises(OSError, match=r"rank 2 could not write the sample of the preflight to"):
        measure_disk(swap, DiskLoad(1, 1, 1))
    swap.close()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/data/deep/er", "xfs"),
        ("/data 2", "btrfs"),
        ("/database", "ext4"),
        ("/over", "tmpfs"),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 8:2 / /data rw,noatime shared:1 - xfs /dev/b rw\n"
        "3 1 8:3 / /data\\0402 rw - btrfs /dev/c rw\n"
        "4 1 8:4 / /over rw - nfs /dev/d rw\n"
        "5 1 8:5 / /over rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(file_system, "MOUNTS", mounts)
    assert file_system_of(Path(folder)) == kind


def test_without_a_list_of_mounts_the_file_system_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "MOUNTS", tmp_path / "missing")
    assert file_system_of(tmp_path) == "unknown file system"


class Events(NullRecorder):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, kind: str, message: str) -> None:
        self.lines.append(message)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


CASES = [((True, True), "2 ranks take"), ((False, True), "1 rank takes"), ((False, False), None)]
"""Which ranks store something on a disk, and what is said of them."""


def announced(rank: int, world_size: int) -> list[tuple[list[str], list[str]]]:
    said = []
    for has_report, _ in CASES:
        handler, recorder = Lines(), Events()
        logging.getLogger("lightning.pytorch").addHandler(handler)
        group = dist.group.WORLD
        assert group is not None
        report = REPORT if has_report[rank] else None
        announce_disks(report, group=group, recorder=recorder)
        logging.getLogger("lightning.pytorch").removeHandler(handler)
        said.append((handler.lines, recorder.lines))
    return said


@pytest.mark.ranks
def test_one_rank_speaks_for_all() -> None:
    first, other = run_ranks(announced, 2)
    assert other == [([], [])] * len(CASES)
    for (lines, events), (_, expected) in zip(first, CASES, strict=True):
        assert [f"boltmesh: {event}" for event in events] == lines
        assert [expected in line for line in lines] == ([] if expected is None else [True])

"""A disk that fails during training ends the run; the last checkpoint is whole and goes on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.disk import swap_file
from tests.parity.resuming import Layout, Run, differences, fit, read_whole
from tests.support.faulty_disk import EIO, ENOSPC, Call, FaultyCalls, failing, torn
from tests.support.models import Regression
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

FAILING_STEP = 7
"""Between the checkpoint after step 5 and the one after step 10."""


def write_over(fd: int, into: memoryview, offset: int) -> None:
    """Damage the disk just before it is read."""
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def cut_off(fd: int, into: memoryview, offset: int) -> None:
    """Shorten the file just before it is read."""
    os.truncate(f"/proc/self/fd/{fd}", offset)


FAULTS: dict[str, tuple[str, Callable[[], Call], str]] = {
    "a full disk": ("before_write", lambda: failing(ENOSPC), r"could not write .*\(ENOSPC\)"),
    "a failing disk": ("before_read", lambda: failing(EIO), r"could not read .*\(EIO\)"),
    "torn blocks": ("before_write", lambda: torn, "are not those that were written there"),
    "a changed bit": ("before_read", lambda: write_over, "are not those that were written there"),
    # A write that comes between the cut and the read makes the file long again: of zeros.
    "a cut file": (
        "before_read",
        lambda: cut_off,
        "the transfer ended at byte|are not those that were written there",
    ),
}


def layout(ranks: int, folder: Path) -> Layout:
    nvme = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_path": folder}
    return Layout(ranks, {"stage": 3, **nvme})


def many_chunks() -> None:
    """So that a small model has more of them than memory holds."""
    stores.SMALL_NUMEL = 0
    stores.CHUNK_NUMEL = 16  # type: ignore[attr-defined]


def fit_in_many_chunks(rank: int, world_size: int, *arguments: object) -> None:
    many_chunks()
    fit(rank, world_size, *arguments)  # type: ignore[arg-type]


def fit_on_failing_disk(
    rank: int, world_size: int, name: str, failing_rank: int, *arguments: object
) -> None:
    calls = FaultyCalls()
    when, make, _ = FAULTS[name]

    def begin(module: Regression, *_: object) -> None:
        if rank == failing_rank and module.trainer.global_step == FAILING_STEP:
            setattr(calls, when, make())

    swap_file.FileCalls = lambda: calls  # type: ignore[misc,assignment]
    Regression.on_train_batch_start = begin  # type: ignore[assignment]
    fit_in_many_chunks(rank, world_size, *arguments)


def is_healthy(rank: int, world_size: int, checkpoint: Path) -> bool:
    """Whether all of it can be read."""
    return all(bool(torch.isfinite(each).all()) for each in read_whole(checkpoint, Run()).values())


def compared(rank: int, world_size: int, one: Path, other: Path) -> list[str]:
    return differences(read_whole(one, Run()), read_whole(other, Run()))


@pytest.mark.sample("a changed bit")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run_with_its_cause(name: str, tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "checkpoints"
    disk.mkdir()
    with pytest.raises(RankFailure, match=FAULTS[name][2]) as caught:
        run_ranks(fit_on_failing_disk, 1, name, 0, layout(1, disk), Run(), kept, 2)
    assert "OffloadError: rank 0 could not" in str(caught.value)
    assert list(disk.iterdir()) == []
    assert [each.name for each in kept.iterdir()] == ["epoch=0.ckpt"]
    assert run_ranks(is_healthy, 1, kept / "epoch=0.ckpt") == [True]


@pytest.mark.full
def test_one_rank_whose_disk_fails_ends_all_and_the_checkpoint_goes_on(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "failed"
    disk.mkdir()
    where = layout(2, disk)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_ranks(fit_in_many_chunks, 2, where, Run(), whole, 2)
    with pytest.raises(RankFailure, match=r"^rank 1: ") as caught:
        run_ranks(fit_on_failing_disk, 2, "a full disk", 1, where, Run(), kept, 2)
    assert "OffloadError: rank 1 could not write" in str(caught.value)
    assert [each.name for each in kept.iterdir()] == ["epoch=0.ckpt"]
    run_ranks(fit_in_many_chunks, 2, where, Run(), resumed, 2, kept / "epoch=0.ckpt")
    ends = [each / "epoch=1.ckpt" for each in (whole, resumed)]
    assert run_ranks(compared, 1, *ends) == [[]]

"""A run directory without room: one warning, no signal, and training goes on."""

import os
import subprocess
import sys
import textwrap

import pytest

from boltmesh.telemetry import layout

TRAINING = """
    import os, sys, warnings
    import torch
    from pathlib import Path
    from boltmesh.telemetry.job import JobInfo
    from boltmesh.telemetry.writer.recorder import open_recorder

    info = JobInfo.create(strategy="DDPStrategy", mesh={{"data": 1}}, world_size=1, id="full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = open_recorder(
            info, rank=0, local_rank=0, device=torch.device("cpu"), coordinates={{"data": 0}}
        )
        {fill}
        recorder.begin_loop(epoch=0, global_step=0)
        for number in range(3000):
            recorder.begin_batch(index=number, epoch=0)
            recorder.metrics(number, {{f"m{{number % 40}}": float(number)}})
            recorder.chunk(stage=0, microbatch=0, kind="F", start_ns=1, end_ns=2)
            recorder.end_batch(global_step=number + 1, loss=0.5, samples=1, tokens=None)
            if number % 10 == 0:
                recorder.event("checkpoint", "x" * 400)
        recorder.close()
    print(len(caught), "trained", recorder.is_on)
    print(*(str(each.message) for each in caught))
"""

FILL = """
        with open(os.environ["BOLTMESH_RUN_DIR"] + "/ballast", "wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(65536))
            except OSError:
                pass
"""


def mount(folder, size):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """Give a function that makes a run directory of so many bytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = []

    def make(size):
        mount(folder, size)
        mounted.append(folder)
        return folder

    yield make
    for each in mounted:
        subprocess.run(["umount", str(each)], check=True)


def train(folder, fill=""):
    script = textwrap.dedent(TRAINING).format(fill=textwrap.indent(textwrap.dedent(fill), "    "))
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "BOLTMESH_RUN_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_no_room_at_the_start_is_one_warning_and_leaves_no_file(small_disk):
    folder = small_disk(layout.FILE_BYTES)
    done = train(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 trained")
    assert "MiB free" in done.stdout
    assert "BOLTMESH_RUN_DIR" in done.stdout
    assert list((folder / "full").glob("*rank*")) == []


@pytest.mark.full
def test_a_disk_that_fills_up_later_does_not_kill_the_rank_nor_lose_a_record(small_disk):
    folder = small_disk(3 * layout.FILE_BYTES)
    done = train(folder, FILL)
    # A page of a mapping that the disk has no block for would end the process by SIGBUS.
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 trained")
    reading = """
        from boltmesh.telemetry.reader.reader import open_job
        with open_job("full") as job:
            seen = job.snapshot()
        print(seen.state, seen.global_step, seen.ranks[0].skipped_records, len(seen.events))
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(reading)],
        env={**os.environ, "BOLTMESH_RUN_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.split() == ["finished", "3000", "0", "256"]

"""The whole way, once each: a shell's command, its supervisor, real ranks, and how they end."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import TINY
from tests.support.forked_python import BOLTMESH, ForkedPython, run_python

TIMEOUT_S = 600


_started: list[ForkedPython] = []


@pytest.fixture(autouse=True)
def _nothing_left_running():
    """A job whose test has failed would take the machine from all others."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill_all()


def start(*arguments: str) -> ForkedPython:
    # Lightning warns of few loader workers and the like; the lines of boltmesh are what counts.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    _started.append(ForkedPython(*BOLTMESH, *arguments, env=environment))
    return _started[-1]


def job_after_steps(steps: int) -> dict:
    """The only job of this folder, once it has made so many steps."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done = run_python(*BOLTMESH, "top", "--once", "--json")
        if done.returncode == 0 and (job := json.loads(done.stdout))["global_step"] >= steps:
            return job
        time.sleep(0.2)
    raise AssertionError(f"the job made no {steps} steps: {done.stderr}")


def own_lines(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("boltmesh: ")]


@pytest.mark.ranks
@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint_and_exits_with_130(workplace):
    run = start("fit", str(TINY), "max_epochs=-1", "model.init_args.step_s=0.05")
    job_after_steps(15)
    run.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, error = run.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - began < 120
    assert run.returncode == 130, error
    assert out.startswith("boltmesh: fit tiny on 2 ranks into runs/tiny/0; watch it: boltmesh top")
    (kept,) = Path("runs/tiny/0/checkpoints").glob("interrupted-step=*.ckpt")
    step = torch.load(kept, weights_only=True)["global_step"]
    assert own_lines(error) == [
        (
            "boltmesh: stopping after this step (a validation that is due runs to its end "
            "first); once more kills the run."
        ),
        (
            f"boltmesh: stopped by Ctrl-C after step {step}; checkpoint: {kept}; resume with: "
            f"boltmesh fit {TINY} max_epochs=-1 model.init_args.step_s=0.05 resume=auto"
        ),
    ]
    assert "Traceback" not in error


@pytest.mark.ranks
@pytest.mark.slow
def test_ctrl_c_that_ends_the_reader_of_the_output_keeps_a_checkpoint(workplace):
    fit = shlex.join([sys.executable, *BOLTMESH, "fit", str(TINY), "max_epochs=-1"])
    run = subprocess.Popen(
        ["bash", "-c", f"{fit} model.init_args.step_s=0.05 2>&1 | tee all.log"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        job_after_steps(15)
        os.killpg(run.pid, signal.SIGINT)
        run.wait(TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert list(Path("runs/tiny/0/checkpoints").glob("interrupted-step=*.ckpt"))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_is_named_by_both_the_command_and_the_dashboard(workplace):
    run = start("fit", str(TINY), "max_epochs=-1", "model.init_args.step_s=0.05")
    job = job_after_steps(15)
    victim = next(each for each in job["ranks"] if each["rank"] == 1)["pid"]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    _, error = run.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - began < 120
    assert run.returncode == 1
    (line,) = own_lines(error)
    assert line.startswith(
        f"boltmesh: rank 1 (pid {victim}) was killed by signal 9 (SIGKILL) in "
    ), line
    assert line.endswith(
        f"; nothing else failed before it. Often the system ran out of memory: "
        f"see `boltmesh top {job['id']}`."
    )
    assert "Traceback" not in error
    afterwards = json.loads(run_python(*BOLTMESH, "top", job["id"], "--once", "--json").stdout)
    assert afterwards["state"] == "crashed"
    assert afterwards["cause"].startswith("rank 1 was killed by SIGKILL")
    assert not any(Path(f"/proc/{each['pid']}").exists() for each in job["ranks"])


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_of_torchrun_are_joined(workplace):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run = run_python(
        *(*launcher, *BOLTMESH, "fit", str(TINY), "max_epochs=1"),
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        timeout_s=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("boltmesh: fit tiny on 2 ranks into runs/tiny/0;") == 1
    assert run.stdout.count("boltmesh: trained 12 steps") == 1
    assert Path("runs/tiny/0/checkpoints/last.ckpt").is_file()

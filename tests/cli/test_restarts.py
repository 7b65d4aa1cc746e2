"""``boltmesh fit --restarts N``: ranks that die are started again, and the run is the same."""

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from boltmesh.cli import run_command
from boltmesh.launch import restarts
from boltmesh.launch.restarts import Restarts
from boltmesh.launch.stopping import StopSwitch
from boltmesh.run_folder import newest_step
from boltmesh.strategies.checkpoint.host_memory import DIR_VARIABLE
from tests.cli.conftest import TINY
from tests.cli.test_run_ranks import (
    assert_same,
    boltmesh,
    checkpoint,
    fit,
    metrics,
    stop_at,
)
from tests.cli.test_supervisor import supervisor
from tests.support.forked_python import BOLTMESH, ForkedPython

KILLS = f"{TINY.with_name('tiny.py')}:KillOnce"
STARTS = """
number = len(list(Path().glob("start-*-0")))
if rank.rank == 0:
    Path(f"start-{number}-0").write_text(os.environ.get("BOLTMESH_CONTINUED_RUN", "new"))
    Path(f"restarted-by-{number}").write_text(os.environ.get("BOLTMESH_RESTARTED_BY", "none"))
    Path("run").mkdir(exist_ok=True)
    rank.run_folder = Path("run")
    rank.report("running")
    if {saves}:
        Path("run/kept.ckpt").touch()
    {how}
time.sleep(20)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.1)


def job(most: int, how: str, *, saves: str = "True", num_ranks: int = 2) -> Restarts:
    """Ranks that load no torch; the first one ends like this, and has perhaps saved before."""
    body = STARTS.replace("{how}", how).replace("{saves}", saves)

    def find(folder: Path) -> tuple[Path, int | None] | None:
        kept = folder / "kept.ckpt"
        return (kept, 4) if kept.exists() else None

    return Restarts(most, lambda more: supervisor(body, variables=more, num_ranks=num_ranks), find)


def lines(error: str) -> list[str]:
    return [each for each in error.splitlines() if each.startswith("boltmesh: ")]


@pytest.mark.full
def test_a_budget_bounds_the_restarts_and_each_says_why_and_from_where(workplace, capfd):
    assert job(2, "os.kill(os.getpid(), signal.SIGKILL)").run() == 1
    assert [Path(f"start-{number}-0").read_text() for number in range(3)] == ["new", "run", "run"]
    first, second, last = lines(capfd.readouterr().err)
    killed = "was killed by signal 9 (SIGKILL); nothing else failed before it"
    assert killed in first
    assert first.endswith("; restart 1 of 2 in 0.1 s from step 4 (run/kept.ckpt)")
    assert second.endswith("; restart 2 of 2 in 0.2 s from step 4 (run/kept.ckpt)")
    assert killed in last
    assert last.endswith(
        "; no restart is left of 2; resume with: boltmesh fit mine.yaml resume=auto"
    )


def test_a_run_that_gains_no_step_between_two_failures_ends(workplace, capfd):
    assert job(9, "raise ValueError('planted')", saves="not number").run() == 1
    first, last = lines(capfd.readouterr().err)
    assert "failed: ValueError: planted" in first
    assert "restart 1 of 9" in first
    assert "; no further restart, because no step was gained since the failure before" in last


def test_watchers_are_told_who_starts_the_ranks_again_while_a_restart_is_left(workplace):
    assert job(1, "sys.exit(1)", num_ranks=1).run() == 1
    pids = [Path(f"restarted-by-{number}").read_text() for number in range(2)]
    assert pids == [str(os.getpid()), "none"]


def test_before_the_first_checkpoint_a_run_begins_anew_in_its_folder(workplace, capfd):
    how = "os.kill(os.getpid(), signal.SIGKILL) if number == 0 else sys.exit(0)"
    assert job(3, how, saves="False", num_ranks=1).run() == 0
    assert "restart 1 of 3 in 0.1 s from the beginning, as there is no" in capfd.readouterr().err
    assert Path("start-1-0").read_text() == "run"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ConfigError('wrong. Write right.')", 2),
        ("__import__('boltmesh.errors').errors.LossError('the loss is nan')", 1),
    ],
)
def test_what_another_start_cannot_mend_is_not_started_again(workplace, capfd, error, code):
    assert job(3, f"raise {error}").run() == code
    assert "; restart " not in capfd.readouterr().err
    assert not Path("start-1-0").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_the_user_stops_is_not_started_again(workplace, capfd, signum):
    how = f"os.kill(os.getppid(), {int(signum)}); time.sleep(20)"
    assert job(3, how).run() == 128 + signum
    assert "; restart " not in capfd.readouterr().err
    assert not Path("start-1-0").exists()


@pytest.mark.full
def test_a_signal_before_the_restart_ends_the_run(workplace, monkeypatch, capfd):
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 60.0)
    StopSwitch().install()

    def stop():
        while not Path("start-0-0").exists():
            time.sleep(0.05)
        time.sleep(5)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=stop)
    sender.start()
    assert job(3, "os.kill(os.getpid(), signal.SIGKILL)", num_ranks=1).run() == 143
    sender.join()
    assert lines(capfd.readouterr().err)[-1] == (
        "boltmesh: stopped by SIGTERM before the restart; "
        "resume with: boltmesh fit mine.yaml resume=auto"
    )


def test_ranks_of_another_launcher_are_not_for_restarts(workplace, monkeypatch, capfd):
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert run_command(["fit", str(TINY), "--restarts", "3"]) == 2
    assert capfd.readouterr().err == (
        "boltmesh: run.restarts=3 is for ranks that boltmesh fit starts, and torchrun has started "
        "these. Set run.restarts=0 and resume=auto, and use torchrun --max-restarts=3.\n"
    )


@pytest.mark.ranks
@pytest.mark.slow(60)
@pytest.mark.parametrize(
    "strategy", ["bolt_ddp", pytest.param("bolt_zero2", marks=pytest.mark.full)]
)
def test_a_run_whose_ranks_are_killed_twice_equals_one_that_was_not(workplace, strategy):
    keep = ["checkpoint.every_n_steps=2", f"strategy={strategy}", "trainer.val_check_interval=6"]
    kills = f"trainer.callbacks=[{{class_path: '{KILLS}', init_args: {{steps: [5, 9]}}}}]"
    older = Path("runs/tiny/0/checkpoints/last.ckpt")
    older.parent.mkdir(parents=True)
    torch.save({"global_step": 99}, older)  # of an earlier run, from which none may go on
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = ForkedPython(*BOLTMESH, *fit(*keep, kills, "--restarts", "3"), env=environment)
    out, error = command.communicate(timeout=800)
    assert command.returncode == 0, error
    told = [each for each in lines(error) if "restart" in each]
    last = Path("runs/tiny/1/checkpoints/last.ckpt")
    for number, (line, step) in enumerate(zip(told, (4, 8), strict=True), start=1):
        assert line.startswith("boltmesh: rank 1 (pid ")
        assert ") was killed by signal 9 (SIGKILL) in" in line
        assert line.endswith(
            f"; restart {number} of 3 in {2 ** (number - 1)} s from step {step} ({last})"
        ), line
    assert out.count(f"from {last} into runs/tiny/1; ") == 2
    assert not Path("runs/tiny/2").exists()
    assert newest_step(Path("runs/tiny/1")) == (last, 24)

    straight = workplace / "straight"
    straight.mkdir()
    ((first, second),) = boltmesh(straight, fit(*keep))
    assert (first[0], second[0]) == (0, 0), first
    expected = straight / "runs/tiny/0"
    assert metrics(Path("runs/tiny/1")) == metrics(expected)
    if strategy == "bolt_ddp":
        found, whole = checkpoint(last), checkpoint(expected / "checkpoints/last.ckpt")
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert_same(found[key], whole[key])
    else:
        for folder in (Path(), straight):
            run = folder / f"runs/tiny/{int(folder == Path())}/checkpoints/last.ckpt"
            assert run_command(["export", str(run), "--to", str(folder / "whole.ckpt")]) == 0
        found, whole = checkpoint(Path("whole.ckpt")), checkpoint(straight / "whole.ckpt")
        for key in ("state_dict", "optimizer_states"):
            assert_same(found[key], whole[key])


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(40)
@pytest.mark.parametrize(
    ("keeps", "origin"),
    [
        ("checkpoint.every_n_steps=2", "runs/tiny/0/checkpoints/last.ckpt"),
        ("strategy.checkpoint_in_memory_every=4", "memory of the hosts, step="),
    ],
    ids=["disk", "memory"],
)
def test_a_slurm_job_that_is_queued_again_goes_on_where_it_was_killed(
    workplace, monkeypatch, keeps, origin
):
    """srun's part is played here: it starts a process per rank, and ends all when one is killed."""
    monkeypatch.setenv(DIR_VARIABLE, str(workplace))
    kills = f"trainer.callbacks=[{{class_path: '{KILLS}', init_args: {{steps: [9]}}}}]"
    line = fit(keeps, "strategy.timeout_s=600", kills, "resume=auto")
    for attempt in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = [
            ForkedPython(
                *BOLTMESH,
                *line,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "SLURM_JOB_ID": "17",
                    "SLURM_JOB_NAME": "train",
                    "SLURM_JOB_NODELIST": "localhost",
                    "SLURM_NTASKS": "2",
                    "SLURM_NTASKS_PER_NODE": "2",
                    "SLURM_NODEID": "0",
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(rank),
                    "SLURM_RESTART_COUNT": str(attempt),
                },
            )
            for rank in range(2)
        ]
        said = [each.communicate(timeout=600) for each in ranks]
        codes = [each.returncode for each in ranks]
        assert (codes == [0, 0]) == (attempt == 1), said
    assert re.search(rf"from {origin}\d* into runs/tiny/0", said[0][0])
    straight = workplace / "straight"
    straight.mkdir()
    boltmesh(straight, fit("checkpoint.every_n_steps=2"))
    last = Path("runs/tiny/0/checkpoints/last.ckpt")
    found, expected = checkpoint(last), checkpoint(straight / last)
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(found[key], expected[key])


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(30)
def test_what_slurms_signal_has_saved_is_loaded_by_the_job_that_is_queued_again_alone(workplace):
    """Lightning would load it in every later run, validation or prediction of this name."""
    scontrol = workplace / "scontrol"
    scontrol.write_text("#!/bin/sh\n")
    scontrol.chmod(0o755)

    def run(*line: str, restarts: int = 0) -> str:
        slurm = {
            "SLURM_JOB_ID": "17",
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        path = f"{workplace}:{os.environ['PATH']}"
        done = ForkedPython(*BOLTMESH, *line, env={**os.environ, **slurm, "PATH": path})
        out, error = done.communicate(timeout=600)
        assert done.returncode == 0, error
        return out

    one = fit("devices=1", "checkpoint.enabled=false")
    run(*one, stop_at(3, rank=0, signum=int(signal.SIGUSR1)))
    saved = Path("runs/tiny/0/checkpoints/hpc_ckpt_1.ckpt")
    assert saved.exists()
    assert not list(Path("runs/tiny").glob("*.ckpt"))
    assert " from " not in run(*one)
    assert f" from {saved} " in run(*one, restarts=1)
    assert " from " not in run("validate", *one[1:], "ckpt_path=null")

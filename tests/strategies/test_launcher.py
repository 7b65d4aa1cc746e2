"""A script that starts its own ranks: one dies, all end soon, and the first is named."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from boltmesh.errors import ConfigError
from boltmesh.process import describe_exit
from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.lightning_compat import launchers
from boltmesh.telemetry.reader.reader import list_jobs, open_job
from tests.support.forked_python import run_python
from tests.support.scripts import script_of_two_ranks, wait_until_gone

SCRIPT = """
import time
import boltmesh
from lightning.pytorch import Trainer, Callback
from tests.support.models import Regression, regression_data

class Slow(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            import os
            os.write(1, f"READY {trainer.global_rank} {os.getpid()}\\n".encode())
        time.sleep(0.02)

trainer = Trainer(accelerator="cpu", devices=2, strategy="bolt_ddp", max_epochs=-1, logger=False,
                  callbacks=[Slow()], enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False)
trainer.fit(Regression(), regression_data(48, 4))
"""


ENDS_S = 40.0
"""Where nobody ended the others they would wait for half an hour."""


@pytest.mark.sample("1")
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path, victim: int) -> None:
    with script_of_two_ranks(SCRIPT, tmp_path) as (process, pids):
        assert process.pid == pids[0]
        os.kill(pids[victim], signal.SIGKILL)
        code = process.wait(ENDS_S)
        assert wait_until_gone(pids[1 - victim], ENDS_S)
    (job,) = list_jobs()
    with open_job(job.path) as opened:
        snapshot = opened.snapshot()
    assert snapshot.state == "crashed"
    assert snapshot.cause is not None
    assert f"rank {victim}" in snapshot.cause
    if victim == 1:
        assert code == 1
        stderr = (tmp_path / "stderr").read_text()
        assert f"local rank 1 (pid {pids[1]}) was killed by signal 9 (SIGKILL)" in stderr
        assert "SIGKILL" in snapshot.cause
    else:
        assert code == -signal.SIGKILL


FAILING = """
import boltmesh
from lightning.pytorch import Trainer
from tests.support.models import Regression, regression_data

class Fails(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == {rank}:
            raise ValueError("a label is out of range: 99")
        return super().training_step(batch, batch_idx)

Trainer(accelerator="cpu", devices=2, strategy="bolt_ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir={folder!r}).fit(Fails(), regression_data(48, 4))
"""


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_the_rank_that_failed_first_is_the_last_on_the_screen(
    tmp_path: Path, rank: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING.format(rank=rank, folder=str(tmp_path)))
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = run_python(str(script), env=environment)
    assert done.returncode == 1
    *_, before, last = done.stderr.rstrip().splitlines()
    assert done.stderr.count("Traceback (most recent call last)") == 1
    if rank == 0:
        assert last.endswith("ValueError: a label is out of range: 99")
    else:
        assert before == "ValueError: a label is out of range: 99"
        assert last == (
            "boltmesh: rank 1 failed: ValueError: a label is out of range: 99. "
            f"Tracebacks of other ranks: {tmp_path}/error-rank-*.txt"
        )
        assert "peer" in (tmp_path / "error-rank-0.txt").read_text()


@pytest.mark.sample("rank 0")
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["whole job", "rank 0"])
def test_a_sigterm_ends_the_whole_job(tmp_path: Path, send: Callable[[int, int], None]) -> None:
    with script_of_two_ranks(SCRIPT, tmp_path) as (process, pids):
        send(process.pid, signal.SIGTERM)
        assert process.wait(ENDS_S) == 128 + signal.SIGTERM
        assert wait_until_gone(pids[1], ENDS_S)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_notebook_is_told_how_it_starts_ranks(
    monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.setattr(launchers, "_IS_INTERACTIVE", True)
    with pytest.raises(ConfigError, match=r"Give the strategy start_method='fork'"):
        Trainer(accelerator="cpu", devices=devices, strategy="bolt_zero3", logger=False)
    forked = ZeROStrategy(start_method="fork")
    Trainer(accelerator="cpu", devices=devices, strategy=forked, logger=False)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exited with code 3"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-99, "was killed by signal 99 (unknown)"),
    ],
)
def test_exit_codes_are_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words

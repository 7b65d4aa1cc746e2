"""A rank that others wait for is named, with the line at which it stands, and ends the run."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import lightning.pytorch as lightning
import pytest
import torch
import torch.distributed as dist

from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.telemetry.reader.reader import open_job
from tests.support.blocks import Blocks
from tests.support.models import Regression, regression_data
from tests.support.ranks import RankFailure, connect, run_ranks
from tests.support.tiny import TinyExperts, TinySequence

pytestmark = [pytest.mark.ranks, pytest.mark.slow(20)]

TIMEOUT_S = 30.0
"""Ranks of a busy machine may be that far apart where one looks at the model first."""
TIMEOUTS_S = {"ddp": 10.0}
AT_ONCE = 3
"""How many jobs hang beside each other, for nearly all that they do is to wait."""
STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": DDPStrategy,
    "zero": partial(ZeROStrategy, stage=3),
    "expert": partial(ZeROStrategy, stage=1, expert=2),
    "context": ContextParallelStrategy,
    "tensor": partial(TensorParallelStrategy, size=2),
    "pipeline": partial(PipelineParallelStrategy, microbatches=2),
}


MODULES: dict[str, type[lightning.LightningModule]] = {
    "pipeline": Blocks,
    "expert": TinyExperts,
    "context": TinySequence,
}


def straying(base: type[lightning.LightningModule], what: str) -> lightning.LightningModule:
    """A module that trains well until the third batch, in which one rank goes its own way."""

    class Straying(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                if what == "sleeps" and dist.get_rank() == 1:
                    time.sleep(1000)  # stands here
                if what == "stops" and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if what == "reduces" and dist.get_rank() == 0:
                    dist.all_reduce(torch.zeros(1))  # reduces alone
            return super().training_step(batch, batch_idx)

    return Straying()


def stray(rank: int, world_size: int, folder: str, strategy: str, what: str) -> None:
    job_id = os.environ["BOLTMESH_JOB_ID"] = f"{strategy}-{what}"
    os.environ["BOLTMESH_RUN_DIR"] = f"{folder}/run"  # that of a test changes while others run
    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    rendezvous = [f"{folder}/{uuid4()}"]
    dist.broadcast_object_list(rendezvous)
    dist.destroy_process_group()  # which has the time limit of the test
    timeout_s = TIMEOUTS_S.get(strategy, TIMEOUT_S)
    connect(rank, world_size, rendezvous[0], timeout_s)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1,
        strategy=STRATEGIES[strategy](timeout_s=timeout_s),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    began = time.monotonic()
    try:
        module = straying(MODULES.get(strategy, Regression), what)
        trainer.fit(module, regression_data(64, 8))
    except RuntimeError as error:
        with open_job(job_id) as job:
            snapshot = job.snapshot()
        recorded = [each.message for each in snapshot.events if each.kind == "warning"]
        Path(folder, f"error-{rank}").write_text(f"{error}")
        Path(folder, f"recorded-{rank}").write_text("\n".join([str(snapshot.cause), *recorded]))
        Path(folder, f"took-{rank}").write_text(str(time.monotonic() - began))
    time.sleep(1.0)
    os._exit(3)


@dataclass
class Said:
    """What a job that hangs says."""

    errors: str
    """On stderr, of both ranks."""
    error: str
    """In the error that ends rank 0."""
    recorded: str
    """In telemetry."""


def hang(folder: Path, strategy: str, what: str) -> Said:
    with pytest.raises(RankFailure, match="exit code 3"):
        run_ranks(stray, 2, str(folder), strategy, what, grace_s=4.0)
    assert float((folder / "took-0").read_text()) < TIMEOUT_S + 60.0
    errors = "".join((folder / f"stderr-{rank}").read_text() for rank in range(2))
    return Said(errors, (folder / "error-0").read_text(), (folder / "recorded-0").read_text())


Job = tuple[str, str]
"""A strategy, and what a rank does in the third batch."""


@pytest.fixture(scope="module")
def said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Job, Future[Said]]]:
    """The jobs of the tests that are run, begun in their order; each test waits for its own."""
    jobs: list[Job] = [
        cast("Job", each.callspec.params["job"])
        for each in request.session.items
        if isinstance(each, pytest.Function) and each.path == request.path
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {job: pool.submit(hang, tmp_path_factory.mktemp("-".join(job)), *job) for job in jobs}


@pytest.mark.sample("ddp")
@pytest.mark.parametrize("job", [(each, "sleeps") for each in STRATEGIES], ids=list(STRATEGIES))
def test_the_line_of_a_rank_that_is_asleep_is_named(
    said: dict[Job, Future[Said]], job: Job
) -> None:
    found = said[job].result()
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), start=1)
        if "# stands here" in text and "time.sleep" in text
    )
    assert found.errors.count("boltmesh: hang: ") == 1
    place = f"test_hangs.py:{line} in training_step: time.sleep(1000)"
    for text in (found.errors, found.error, found.recorded):
        # The ranks of a pipeline send each other messages; once one has waited in vain for its
        # message, it goes on to tell the other so, in a collective that the other never enters.
        if job[0] == "pipeline" and "never entered" not in text:
            assert "rank 0 waits for rank 1 in " in text
        else:
            assert "rank 1 never entered " in text
            assert "in which rank 0 waits" in text
        assert place in text
    assert "after step 2" in found.error
    assert "the run ends in " in found.errors


@pytest.mark.full
@pytest.mark.parametrize("job", [("ddp", "reduces")], ids=["ddp"])
def test_ranks_that_take_other_branches_are_told_with_both_places(
    said: dict[Job, Future[Said]], job: Job
) -> None:
    found = said[job].result()
    assert found.errors.count("boltmesh: hang: ") == 1
    for text in (found.errors, found.error):
        assert "never entered all_reduce #" in text
        assert "Rank 1 waits for rank 0 in " in text
        assert "Rank 0 waits for rank 1 in " in text
        assert "reduces alone" in text
        assert "the same calls in the same order" in text


@pytest.mark.full
@pytest.mark.parametrize("job", [("ddp", "stops")], ids=["ddp"])
def test_a_rank_that_was_stopped_cannot_answer_and_that_is_said(
    said: dict[Job, Future[Said]], job: Job
) -> None:
    found = said[job].result()
    assert found.errors.count("boltmesh: hang: ") == 1
    for text in (found.errors, found.error):
        assert "rank 1 never entered " in text
        assert "is stopped by a signal" in text

"""The bubble ratio of live jobs of every schedule: screens, JSON and log beside the chunks."""

import json
import re
import time
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from typing_extensions import override

from boltmesh.strategies.pipeline.schedules.registry import schedule_table, simulate_ideal
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot
from boltmesh.tui.commands.top import job_json, job_text
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.support.pipelines import MICROBATCHES, pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data
from tests.tui.training import busy_cores

pytestmark = pytest.mark.ranks

STEPS = 10
LOOKS = (6, 8, 10)
NEAR = 0.02
STAGES_PER_RANK = {
    "gpipe": 1, "1f1b": 1, "looped_bfs": 2, "interleaved_1f1b": 2, "zero_bubble": 1, "zbv": 2,
    "dualpipev": 2, "pipedream_2bw": 1,
}  # fmt: skip


class Look(NamedTuple):
    """What one look at a job has shown, and what the chunks of the same look give."""

    shown: float
    """In JSON."""
    text: str
    truth: float
    num_steps: int


class SlowStart(Stack):
    """Blocks take a time that does not depend on the machine, the last one far more at first."""

    def __init__(self) -> None:
        super().__init__(depth=8, width=32, hidden=256)
        for block in self.blocks:
            block.register_forward_pre_hook(self._wait)

    def _wait(self, block: nn.Module, *_: Any) -> None:
        is_slow = self.global_step == 0 and block is self.blocks[-1]
        time.sleep(0.05 if is_slow else 0.003)


class Looks(Callback):
    """Looks at the running job from its first rank."""

    def __init__(self, stages_per_rank: int) -> None:
        self.found: list[Look] = []
        self._passes = stages_per_rank * MICROBATCHES

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step in LOOKS:
            with open_job() as job:
                seen = Observation(0.0, job.snapshot())
            document = json.loads(job_json(seen))["figures"]
            shares = true_shares(seen.job, self._passes)
            self.found.append(
                Look(
                    document["bubble_ratio"]["value"],
                    job_text(fold(None, seen), 160, Style(UNICODE)),
                    sum(shares.values()) / len(shares),
                    len(shares),
                )
            )


def true_shares(job: JobSnapshot, passes: int) -> dict[int, float]:
    """Idle share of each step in which every rank has done all forward and backward passes."""
    rows: list[dict[int, list[Chunk]]] = []
    for rank in job.ranks:
        rows.append({})
        for chunk in rank.chunks:
            rows[-1].setdefault(chunk.step, []).append(chunk)
    shares = {}
    for step in set.intersection(*map(set, rows)):
        parts = [row[step] for row in rows]
        kinds = [Counter(chunk.kind for chunk in part) for part in parts]
        if any(kind["F"] != passes or kind["B"] + kind["W"] != passes for kind in kinds):
            continue
        start = min(chunk.start for part in parts for chunk in part)
        window = max(chunk.end for part in parts for chunk in part) - start
        busy = sum(chunk.end - chunk.start for part in parts for chunk in part)
        shares[step] = 1 - busy / (len(parts) * window)
    return shares


def watched(rank: int, world_size: int, schedule: str) -> tuple[list[Look], float, float]:
    """Train; return the looks, the ratio that is logged last, and the true one of its steps."""
    seed_everything(1, verbose=False)
    looks = Looks(STAGES_PER_RANK[schedule])
    trainer = quiet_trainer(
        world_size,
        pipeline(schedule=schedule, telemetry=True),
        callbacks=[looks],
        logger=CSVLogger("."),
        log_every_n_steps=1,
        max_steps=STEPS,
        max_epochs=-1,
    )
    trainer.fit(SlowStart(), token_data(64, 8))
    logged = float(trainer.callback_metrics["boltmesh/bubble_ratio"])
    with open_job() as job:
        shares = true_shares(job.snapshot(), looks._passes)
    # A step is recorded when the next one begins.
    recorded = [share for step, share in shares.items() if step < STEPS]
    return looks.found, logged, sum(recorded) / len(recorded)


@pytest.mark.full
def test_load_on_the_machine_makes_no_difference() -> None:
    with busy_cores():
        _check("1f1b")


@pytest.mark.full
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_screens_json_and_log_have_the_ratio_of_the_chunks(schedule: str) -> None:
    _check(schedule)


def _check(schedule: str) -> None:
    (looks, logged, truth), *others = run_ranks(partial(watched, schedule=schedule), 2)
    assert len(looks) == len(LOOKS)
    # The first step of an asynchronous schedule is not whole.
    is_late = schedule == "pipedream_2bw"
    table = schedule_table(
        schedule,
        num_ranks=2,
        num_microbatches=MICROBATCHES,
        stages_per_rank=STAGES_PER_RANK[schedule],
    )
    ideal = f"{100 * simulate_ideal(table).bubble:.1f}"
    for number, look in zip(LOOKS, looks, strict=True):
        assert number - 1 - is_late <= look.num_steps <= number
        assert look.shown == pytest.approx(look.truth, abs=NEAR)
        (found,) = re.findall(r"bubble ([\d.]+)%  ideal ([\d.]+)%", look.text) or [None]
        assert found is not None, look.text
        assert float(found[0]) / 100 == pytest.approx(look.truth, abs=NEAR)
        assert found[1] == ideal
    assert [logged] * len(others) == [each[1] for each in others]
    assert logged == pytest.approx(truth, abs=NEAR)

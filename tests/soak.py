"""Jobs that train for an hour, whose memory, descriptors, threads and files must not grow.

::

    python -m tests.soak --minutes 60
    python -m tests.soak --minutes 10 --strategy bolt_pipeline lightning

One job of two ranks per strategy, all beside each other, with telemetry, logs, checkpoints and
validation. Each rank measures itself once in ``EVERY`` steps. ``lightning`` is plain Lightning
(``DDPStrategy``) as a peer: what it grows by is not ours. Growth is a least-squares line through
what was measured after the warm-up, which is the first third of the steps.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from tests.support.tiny import TinyData, TinyModel

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests/support/tiny.yaml"
STRATEGIES = ("bolt_zero3_cpu", "bolt_pipeline", "bolt_zero3_nvme")
PEER = "lightning"
GOAL_KB = 50.0
"""Growth of the resident memory of a rank per 1,000 steps."""
EVERY = 100
SAVE_EVERY = 1000
STEP_S = 0.01
"""Least time of a step, so that other processes of the machine go on."""
COLUMNS = ("step", "resident_kb", "anonymous_kb", "descriptors", "threads", "files")


class Growth(NamedTuple):
    """What one rank grew by after its warm-up."""

    strategy: str
    rank: int
    steps: int
    resident_kb: float
    """Per 1,000 steps."""
    anonymous_kb: float
    """Per 1,000 steps: without mapped files."""
    first_kb: int
    last_kb: int
    descriptors: set[int]
    threads: set[int]
    files: set[int]


class Meter(Callback):
    """Writes what its process holds to a file, once in ``EVERY`` steps.

    Args:
        folder: Gets one file per rank.
        watched: Rank 0 counts the files in this folder.
    """

    def __init__(self, folder: str, watched: str) -> None:
        self.folder, self.watched = folder, watched

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step % EVERY == EVERY // 2:  # between two saves
            with Path(self.folder, f"rank-{trainer.global_rank}").open("a") as file:
                csv.writer(file).writerow((step, *measured(self.watched)))


def measured(watched: str) -> tuple[int, ...]:
    """Return resident and anonymous memory, descriptors, threads, and files in a folder."""
    memory = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        memory[name] = int(value.split()[0])
    descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    files = sum(len(names) for _, _, names in os.walk(watched))
    return memory["Rss"], memory["Anonymous"], descriptors, threads, files


def soak(folder: Path, *, minutes: float, strategies: Sequence[str] = STRATEGIES) -> list[Growth]:
    """Train for so many minutes, and return what each rank of each job grew by.

    Raises:
        AssertionError: A job failed.
    """
    jobs = {name: _start(folder / name, name, minutes) for name in strategies}
    try:
        for name, job in jobs.items():
            code = job.wait(timeout=60 * minutes + 600)
            assert code == 0, f"{name}: {(folder / name / 'stderr').read_text()[-4000:]}"
    finally:
        for job in jobs.values():
            if job.poll() is None:
                job.kill()
    return [_growth(folder / name, name, rank) for name in strategies for rank in range(2)]


def _start(folder: Path, strategy: str, minutes: float) -> "subprocess.Popen[bytes]":
    (folder / "work").mkdir(parents=True)
    duration = f"00:{int(minutes) // 60:02}:{int(minutes) % 60:02}:{int(minutes * 60) % 60:02}"
    meter = (
        f"{{class_path: '{Path(__file__)}:Meter', "
        f"init_args: {{folder: '{folder}', watched: '{folder / 'work'}'}}}}"
    )
    command = [
        "-m", "boltmesh", "fit", str(TINY), f"strategy={strategy}", "max_epochs=-1",
        f"trainer.max_time={duration}", "data.init_args.samples=4800", "limit_val_batches=4",
        f"checkpoint.every_n_steps={SAVE_EVERY}", "log_every_n_steps=50",
        f"model.init_args.step_s={STEP_S}", "model.init_args.width=64",
        f"trainer.callbacks=[{meter}]",
    ]  # fmt: skip
    if strategy == PEER:
        command = ["-m", "tests.soak", "--peer", str(folder), duration]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "BOLTMESH_RUN_DIR": str(folder / "work/telemetry"),
    }
    with (folder / "stderr").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder / "work",
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def _train_peer(folder: str, duration: str) -> None:
    """Do in plain Lightning what the other jobs do."""
    Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=-1, max_time=duration, limit_val_batches=4, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, logger=CSVLogger("."),
        callbacks=[
            ModelCheckpoint(every_n_train_steps=SAVE_EVERY), Meter(folder, f"{folder}/work")
        ],
    ).fit(TinyModel(width=64, step_s=STEP_S), TinyData(samples=4800))  # fmt: skip


def _growth(folder: Path, strategy: str, rank: int) -> Growth:
    with (folder / f"rank-{rank}").open() as file:
        rows = [dict(zip(COLUMNS, map(int, row), strict=True)) for row in csv.reader(file)]
    rows = rows[len(rows) // 3 :]
    assert len(rows) >= 2, f"{strategy}: rank {rank} has taken too few steps"

    def slope(column: str) -> float:
        steps, values = [row["step"] for row in rows], [row[column] for row in rows]
        middle, level = sum(steps) / len(steps), sum(values) / len(values)
        above = sum((x - middle) * (y - level) for x, y in zip(steps, values, strict=True))
        return 1000 * above / sum((x - middle) ** 2 for x in steps)

    return Growth(
        strategy,
        rank,
        rows[-1]["step"],
        slope("resident_kb"),
        slope("anonymous_kb"),
        rows[0]["resident_kb"],
        rows[-1]["resident_kb"],
        *({row[column] for row in rows} for column in ("descriptors", "threads", "files")),
    )


def table(rows: Sequence[Growth]) -> str:
    """Return one line per rank."""
    head = f"{'strategy':16} rank   steps  KB per 1,000 steps: resident, anonymous"
    lines = [f"{head}  resident MB  descriptors, threads, files"]
    for row in rows:
        counts = ", ".join(_range(each) for each in (row.descriptors, row.threads, row.files))
        lines.append(
            f"{row.strategy:16} {row.rank:4} {row.steps:7,} {row.resident_kb:29.1f} "
            f"{row.anonymous_kb:10.1f}  {row.first_kb / 1024:.1f}-{row.last_kb / 1024:.1f}  "
            f"{counts}"
        )
    return "\n".join(lines)


def _range(values: set[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def main() -> None:
    """Run the jobs as the command line says, and print what they grew by."""
    parser = argparse.ArgumentParser(description="Jobs whose memory must not grow.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--strategy", nargs="+", default=STRATEGIES)
    parser.add_argument("--folder", type=Path, help="keep what was measured here")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        _train_peer(*given.peer)
        return
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = (given.folder or Path(scratch)).resolve()
        rows = soak(folder, minutes=given.minutes, strategies=given.strategy)
    print(table(rows))  # noqa: T201
    grown = [row for row in rows if row.strategy != PEER and row.resident_kb > GOAL_KB]
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()

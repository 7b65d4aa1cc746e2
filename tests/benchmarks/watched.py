"""Step time of a real run with and without a viewer: OMP_NUM_THREADS=1 python .../watched.py

Two ranks train under DDP over gloo and record what they always record. Meanwhile a viewer at 1 Hz
in a pseudo-terminal comes and goes, block after block; the run's own step records say how long the
steps of each block took. Printed are the medians and the median ratio of neighbouring blocks.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from boltmesh.telemetry.reader.job_reader import JobReader
from boltmesh.telemetry.reader.reader import open_job
from tests.benchmarks.viewer import Viewer

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from lightning.pytorch import Trainer
from boltmesh.strategies import DDPStrategy
from tests.benchmarks.ddp_step import Network, loader
trainer = Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(), max_epochs=-1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False)
trainer.fit(Network({width}), loader(2000, 2))
"""


def seconds_of_steps(job: JobReader, begin: float, end: float) -> list[float]:
    steps = [step for rank in job.snapshot().ranks for step in rank.steps]
    return [step.seconds for step in steps if begin <= step.end_time <= end]


def measure_block(job: JobReader, seconds: float) -> float:
    """Median step of the next seconds, looked at once at their end."""
    begin = time.time()
    time.sleep(seconds)
    return statistics.median(seconds_of_steps(job, begin, time.time()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BOLTMESH_RUN_DIR"] = f"{folder}/telemetry"
        os.environ["BOLTMESH_SETTINGS_DIR"] = f"{folder}/settings"
        script = Path(folder) / "run.py"
        script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), width=options.width))
        with subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            try:
                time.sleep(20)
                with open_job() as job:
                    without, watched = [], []
                    for number in range(options.blocks):
                        for is_watched in (number % 2 == 0, number % 2 == 1):
                            if not is_watched:
                                without.append(measure_block(job, options.seconds))
                                continue
                            viewer = Viewer([sys.executable, "-m", "boltmesh", "top"])
                            viewer.first_paint_s(b"DDPStrategy")
                            time.sleep(1.0)
                            watched.append(measure_block(job, options.seconds))
                            viewer.close()
            finally:
                run.kill()
    ratio = statistics.median(a / b for a, b in zip(watched, without, strict=True))
    print(
        f"step without a viewer {1e3 * statistics.median(without):.2f} ms, with one "
        f"{1e3 * statistics.median(watched):.2f} ms; median ratio {ratio:.4f}, {options.blocks} "
        f"pairs of {options.seconds:.0f} s, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()

"""What the dashboard costs to look at: first paint, CPU share and memory.

    python tests/benchmarks/viewer.py [--seconds 20] [--ranks 8 1024] [--beside "nvitop -m" ...]

A process of its own writes the telemetry files of a simulated job, with the product's own writer.
Each viewer runs in a pseudo-terminal of 160 x 45 cells: first paint is the time from its start to
the first frame that shows the text that is waited for, in turn for all, median of the rounds, and
the CPU time until then; the CPU share is the process's CPU time between two moments after its
start, in per cent of one core.
"""

import argparse
import contextlib
import fcntl
import os
import pty
import select
import shlex
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from boltmesh.telemetry import layout
from boltmesh.telemetry.job import (
    JobInfo,
    job_path,
    make_private_folder,
    rank_file,
    run_dir,
    write_job,
)
from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.writer.rank_file import RankFile

ROWS, COLUMNS = 45, 160
SMALL_PACE = (5, 4)
"""Steps a second and collectives a step of every rank."""
LARGE_PACE = (1, 20)
"""The same from LARGE ranks on: large jobs take large steps, and shard over more axes."""
LARGE = 256
TRENDS = ("step_s", "tokens_per_s", "memory_bytes", "bytes_per_s", "utilisation_percent",
          "power_watts", "temperature_celsius", "wall_s")  # fmt: skip
"""Series beside the loss, as the recorder adds them."""
EARLIER_POINTS = 27_000
"""Points that each series has had: a day of steps of 0.4 s, one point for eight of them."""
SETTLE_S = 4.0
"""Before the CPU share is taken: imports, the first paint, the rings read for the first time."""


def simulate(num_ranks: int, folder: str, ready: Any, stop: Any) -> None:
    """Write what ``num_ranks`` ranks of a DDP job would, until told to stop."""
    os.environ["BOLTMESH_RUN_DIR"] = folder
    job_id = f"simulated-{num_ranks}"
    info = JobInfo.create(
        strategy="DDPStrategy", mesh={"data": num_ranks}, world_size=num_ranks, id=job_id
    )
    make_private_folder(run_dir())
    path = job_path(info.id)
    make_private_folder(path)
    write_job(info, path)
    ranks = []
    for rank in range(num_ranks):
        file = RankFile(rank_file(path, rank), rank=rank, world_size=num_ranks)
        file.write_facts({"host": f"node{rank // 8}", "device": "cpu", "device_uuid": None,
                          "coordinates": {"data": rank}, "communication_note": None,
                          "expected": []})  # fmt: skip
        ranks.append((file, file.group_number("data", "data"), file.operator_number("allreduce")))
    for at in range(EARLIER_POINTS):
        write_points(ranks[0][0], 8 * at + 1)
    step = first = 8 * EARLIER_POINTS
    steps_per_second, collectives = LARGE_PACE if num_ranks >= LARGE else SMALL_PACE
    while not stop.is_set():
        begun = time.monotonic()
        for _ in range(steps_per_second):
            step += 1
            for file, group, operator in ranks:
                write_step(file, group, operator, step, step - first, collectives)
        if step >= first + 300:
            ready.set()
            stop.wait(max(0.0, 1.0 - (time.monotonic() - begun)))
    for file, _, _ in ranks:
        file.close()


def write_step(
    file: RankFile, group: int, operator: int, step: int, batch: int, collectives: int
) -> None:
    """Write optimizer step ``step``, the ``batch``th batch of this process."""
    for _ in range(collectives):
        ticket = file.enqueue(batch, group, operator, 3, layout.TRAFFIC_IS_TIMED, 25_000_000)
        file.complete(ticket, time.monotonic_ns())
    total_ns = 200_000_000 + step % 7 * 1_000_000
    phases = [total_ns // len(PHASES)] * len(PHASES)
    file.step(step, step, 0, layout.STEP_HAS_LOSS, time.time(), total_ns, *phases,
              2.0 + 1 / step, 16, 16_384)  # fmt: skip
    if step % 8 == 1:
        write_points(file, step)
    file.phase(step % len(PHASES))
    file.write_counters()
    file.status(1, 0, 0, 0, step, step, time.time(), 2**30, -1, -1, -1)


def write_points(file: RankFile, step: int) -> None:
    file.point("loss", step, 2.0 + 1 / step)
    for name in TRENDS:
        file.point(layout.TREND + name, step, 100.0 + step % 7)


AUTOGROUP = Path("/proc/self/autogroup")
"""On Linux a new session competes for the cores as a group of its own, of priority 0."""


class Viewer:
    """A program in a pseudo-terminal whose output is read all the time."""

    def __init__(self, command: list[str]) -> None:
        self.begun = time.perf_counter()
        priority = AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else ""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            if priority:  # the terminal's session gets that of the benchmark
                AUTOGROUP.write_text(priority)
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            # Compiled at each start, the dashboard's modules would cost 0.2 s more.
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            os.execvp(command[0], command)
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, size)
        self.seen = b""
        self.num_bytes = 0
        self.is_open = True
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        while self.is_open:
            readable, _, _ = select.select([self.terminal], [], [], 0.01)
            if readable:
                try:
                    chunk = os.read(self.terminal, 65536)
                except OSError:
                    return
                self.num_bytes += len(chunk)
                self.seen = (self.seen + chunk)[-200_000:]

    def first_paint_s(self, text: bytes, timeout_s: float = 120.0) -> float:
        while text not in self.seen:
            if time.perf_counter() - self.begun > timeout_s:
                raise TimeoutError(f"{text!r} never appeared: {self.seen[-300:]!r}")
            time.sleep(0.002)
        return time.perf_counter() - self.begun

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        time.sleep(0.05)
        os.close(self.terminal)


@contextlib.contextmanager
def job(num_ranks: int, folder: str) -> Iterator[None]:
    context = get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=simulate, args=(num_ranks, folder, ready, stop))
    process.start()
    try:
        if not ready.wait(300):
            raise TimeoutError("the simulated job did not come up")
        yield
    finally:
        stop.set()
        process.join(60)
        shutil.rmtree(Path(folder) / f"simulated-{num_ranks}", ignore_errors=True)


def paint(commands: dict[str, tuple[list[str], bytes]], rounds: int) -> None:
    """Print both times to the first paint; beside other work only the CPU time says anything."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, (command, text) in commands.items():
            viewer = Viewer(command)
            try:
                elapsed = viewer.first_paint_s(text)
                used = cpu_s([psutil.Process(viewer.pid)])
            finally:
                viewer.close()
            if number > 0:  # the first one may compile
                times[name].append((elapsed, used))
    for name, each in times.items():
        paints = [elapsed for elapsed, _ in each]
        print(f"  first paint  {name:<28} {statistics.median(paints):6.3f} s "
              f"({min(paints):.3f} to {max(paints):.3f}, {rounds} rounds), "
              f"{statistics.median(used for _, used in each):.3f} s of CPU",
              flush=True)  # fmt: skip


def cpu_s(processes: list[psutil.Process]) -> float:
    """User and system time of all of them, seconds."""
    times = [each.cpu_times() for each in processes]
    return sum(each.user + each.system for each in times)


def share(name: str, command: list[str], text: bytes, seconds: float) -> None:
    viewer = Viewer(command)
    try:
        viewer.first_paint_s(text)
        process = psutil.Process(viewer.pid)
        time.sleep(SETTLE_S)
        family = [process, *process.children(recursive=True)]
        before, sent = cpu_s(family), viewer.num_bytes
        begun = time.perf_counter()
        time.sleep(seconds)
        used = cpu_s(family) - before
        elapsed = time.perf_counter() - begun
        resident = sum(each.memory_info().rss for each in family)
        print(f"  CPU share    {name:<28} {100 * used / elapsed:6.2f} % of a core, "
              f"{resident / 2**20:.0f} MiB resident, "
              f"{(viewer.num_bytes - sent) / elapsed / 1e3:.1f} kB/s to the terminal",
              flush=True)  # fmt: skip
    finally:
        viewer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--beside", nargs="*", default=[], metavar="COMMAND",
                        help="other viewers, each as TEXT=COMMAND: waits for TEXT")  # fmt: skip
    options = parser.parse_args()
    top = [sys.executable, "-m", "boltmesh", "top"]
    others = {}
    for each in options.beside:
        text, _, command = each.rpartition("=")
        others[shlex.split(command)[0]] = (shlex.split(command), (text or "%").encode())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BOLTMESH_RUN_DIR"] = folder
        os.environ["BOLTMESH_SETTINGS_DIR"] = f"{folder}/settings"
        for number, num_ranks in enumerate(options.ranks):
            mine = [*top, f"simulated-{num_ranks}"]
            print(f"{num_ranks} ranks, {ROWS} x {COLUMNS}, load {os.getloadavg()[0]:.1f}")
            with job(num_ranks, folder):
                beside = others if number == 0 else {}
                commands = {"boltmesh top": (mine, b"simulated"), **beside}
                paint(commands, options.rounds)
                for name, (command, text) in commands.items():
                    share(name, command, text, options.seconds)


if __name__ == "__main__":
    main()

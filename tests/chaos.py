"""A run whose processes are killed at random, which has to end like one that was left alone.

::

    python -m tests.chaos --minutes 30
    python -m tests.chaos --minutes 30 --in-memory 10
    python -m tests.chaos --minutes 30 --in-memory 10 --hosts 2

``boltmesh fit --restarts`` trains on four ranks. Every 60 to 120 seconds SIGKILL meets one of its
ranks, its launcher, or half of its ranks. A killed launcher is started again with the same command
and ``resume=auto``, as a scheduler does. The losses of all steps, the parameters and the optimizer
state are compared with those of an uninterrupted run, to the bit.

With ``--in-memory`` the ranks keep copies in memory, and no restart may lose more steps than that.
With ``--hosts`` torchrun starts the ranks, one agent for each host; instead of a launcher, a host
is lost with its agent, its ranks and its memory.
"""

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.cli.test_run_ranks import TINY, assert_same, metrics
from tests.support.agents import Agent

ROOT = Path(__file__).parents[1]
KINDS = ("rank", "launcher", "half of the ranks")
HOST_KINDS = ("rank", "host")
_LOST = re.compile(r"after step (\d+);.* from step (\d+)")
STEP_S = 0.1
POLL_S = 0.2


class Chaos(NamedTuple):
    """What happened in one trial."""

    kills: Counter[str]
    restarts: list[str]
    """Lines of the launchers about restarts."""
    seconds: float
    steps: int
    num_repeated: int
    """Steps that were logged more than once."""


def run_chaos(
    folder: Path,
    *,
    minutes: float,
    every_s: tuple[float, float] = (60.0, 120.0),
    num_ranks: int = 4,
    strategy: str = "bolt_zero2",
    seed: int = 0,
    in_memory_every: int | None = None,
    num_hosts: int = 1,
    steps: int | None = None,
) -> Chaos:
    """Run the trial in a folder.

    Args:
        folder: An empty one.
        minutes: Kills go on for so long; the run then ends by itself.
        every_s: Least and most seconds from one kill to the next.
        num_ranks: See ``--ranks``.
        strategy: Name of the strategy.
        seed: Of the moments and the kinds of kills.
        in_memory_every: ``checkpoint_in_memory_every``.
        num_hosts: Hosts that the ranks are on.
        steps: Optimizer steps of the run; None: for half of the minutes on an idle machine.

    Raises:
        AssertionError: The run did not end by itself, or ended otherwise than one left alone.
    """
    # Half of the time is for starts on a slow machine, and for steps that are repeated.
    steps = steps or max(20, int(0.5 * minutes * 60 / STEP_S))
    # An epoch has 300 steps. A checkpoint of its last one is written before its validation, which
    # Lightning leaves out where a run resumes from it, so that only every third epoch has one.
    on_disk_every = 18 if in_memory_every is None else 180
    overrides = (
        f"strategy={strategy}", "max_epochs=-1", f"max_steps={steps}",
        "data.init_args.samples=4800", "limit_val_batches=4", "strategy.timeout_s=60",
        f"checkpoint.every_n_steps={on_disk_every}",
    )  # fmt: skip
    command = [sys.executable, "-m", "boltmesh", "fit", str(TINY), *overrides]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "BOLTMESH_RUN_DIR": str(folder / "telemetry"),
    }
    straight = [*command, f"devices={num_ranks}", "run.name=straight"]
    subprocess.run(straight, cwd=folder, env=environment, check=True, capture_output=True)
    disturbed = [
        *command, "run.name=chaos", f"model.init_args.step_s={STEP_S}", "resume=auto",
        f"devices={num_ranks // num_hosts}", f"trainer.num_nodes={num_hosts}",
    ]  # fmt: skip
    if in_memory_every is not None:
        disturbed.append(f"strategy.checkpoint_in_memory_every={in_memory_every}")
    chance = random.Random(seed)
    if num_hosts > 1:
        trial: _Trial = _HostTrial(disturbed, folder, environment, chance, every_s)
    else:
        trial = _Trial([*disturbed, "--restarts", "1000"], folder, environment, chance, every_s)
    began = time.monotonic()
    trial.run(until=began + 60 * minutes)
    seconds = time.monotonic() - began
    runs = folder / "runs"
    assert [each.name for each in (runs / "chaos").iterdir()] == ["0"], "one folder for all starts"
    expected, found = metrics(runs / "straight/0"), metrics(runs / "chaos/0")
    differing = [step for step in expected if expected[step] != found.get(step)]
    unequal = sorted(found.keys() ^ expected.keys(), key=int)
    assert not unequal, f"steps that one of the two has not logged: {unequal[:20]}"
    assert not differing, f"losses differ at steps {differing[:10]}"
    one, other = (_whole(runs / f"{name}/0", folder, environment) for name in ("straight", "chaos"))
    assert one["global_step"] == other["global_step"] == steps
    for key in ("state_dict", "optimizer_states"):
        assert_same(one[key], other[key])
    lost = [
        int(found[1]) + 1 - int(found[2]) for found in _LOST.finditer("\n".join(trial.restarts()))
    ]
    assert in_memory_every is None or max(lost, default=0) <= in_memory_every, lost
    kept = {each.name for each in (runs / "chaos/0/checkpoints").iterdir()}
    assert len(kept) <= 4, f"kills have left checkpoints: {sorted(kept)}"
    rows = sum(len(each.read_text().splitlines()) - 1 for each in runs.glob("chaos/0/logs/*/*.csv"))
    straight_rows = sum(
        len(each.read_text().splitlines()) - 1 for each in runs.glob("straight/0/logs/*/*.csv")
    )
    return Chaos(trial.kills, trial.restarts(), seconds, steps, rows - straight_rows)


class _Trial:
    """The command that is disturbed, and started again when its launcher was killed."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        chance: random.Random,
        every_s: tuple[float, float],
    ) -> None:
        self._command = command
        self._folder = folder
        self._environment = environment
        self._chance = chance
        self._every_s = every_s
        self._kinds: list[str] = []
        self._log = folder / "stderr"
        self._saved_at_kill = 0
        self.kills: Counter[str] = Counter()

    def run(self, until: float) -> None:
        """Start the command, kill until the time is over, and wait for its end."""
        began = time.monotonic()
        launcher = self._start()
        try:
            while launcher.poll() is None:
                is_over = not self._wait(launcher, self._chance.uniform(*self._every_s))
                # A job that fails twice without a step in between ends, as it should. On a busy
                # machine a start may take longer than the time to the next kill.
                while not (is_over or self._has_gained()):
                    is_over = not self._wait(launcher, POLL_S)
                if is_over or time.monotonic() > until:
                    break
                if self._kill(launcher) == "launcher":
                    launcher.wait()
                    launcher = self._start()
            launcher.wait(timeout=max(600.0, until - began))
        finally:
            if launcher.poll() is None:
                launcher.kill()
        assert launcher.returncode == 0, self._log.read_text()[-4000:]

    def restarts(self) -> list[str]:
        """Return the lines about restarts."""
        return [line for line in self._log.read_text().splitlines() if "; restart " in line]

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as errors:
            return subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def _wait(self, launcher: "subprocess.Popen[bytes]", seconds: float) -> bool:
        """Return whether it still runs after so many seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if launcher.poll() is not None:
                return False
            time.sleep(POLL_S)
        return True

    def _has_gained(self) -> bool:
        """Return whether there is a checkpoint that is newer than the kill before."""
        return self._newest_save() > self._saved_at_kill

    def _newest_save(self) -> int:
        newest = 0
        for each in (self._folder / "runs/chaos").glob("*/checkpoints/*"):
            with suppress(FileNotFoundError):  # deleted meanwhile, for a newer one
                newest = max(newest, each.stat().st_mtime_ns)
        return newest

    def _kill(self, launcher: "subprocess.Popen[bytes]") -> str | None:
        if not self._kinds:  # each kind comes as often as the others
            self._kinds = self._chance.sample(KINDS, len(KINDS))
        ranks = _children(launcher.pid)
        if not ranks:  # it waits before a restart
            return None
        kind = self._kinds.pop()
        count = {"rank": 1, "launcher": 0}.get(kind, len(ranks) // 2)
        pids = [launcher.pid] if kind == "launcher" else self._chance.sample(ranks, count)
        self._saved_at_kill = self._newest_save()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.kills[kind] += 1
        print(f"{time.strftime('%H:%M:%S')} killed: {kind}", flush=True)  # noqa: T201
        return kind


class _HostTrial(_Trial):
    """The same command on several hosts, of which the last one may be lost.

    The first one has torchrun's store; without it all agents end.
    """

    _agents: list[Agent]

    def run(self, until: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        line = self._command[3:]  # behind python -m boltmesh
        self._agents = [Agent(host, line, self._folder, port=port) for host in range(2)]
        first = self._agents[0].process
        try:
            while self._wait(first, self._chance.uniform(*self._every_s)):
                if time.monotonic() > until:
                    break
                if self._kill_one() == "host":
                    self._agents[1] = Agent(1, line, self._folder, port=port)
            for agent in self._agents:
                agent.process.wait(timeout=600)
        finally:
            for agent in self._agents:
                agent.end()
        said = self._agents[0].said()
        assert first.returncode == 0, said[-4000:]

    def restarts(self) -> list[str]:
        starts = (each for agent in self._agents for each in agent.said().splitlines())
        return [each for each in starts if each.startswith("boltmesh: fit ") and " from " in each]

    def _kill_one(self) -> str | None:
        if not self._kinds:
            self._kinds = self._chance.sample(HOST_KINDS, len(HOST_KINDS))
        ranks = [pid for agent in self._agents for pid in agent.ranks()]
        if len(ranks) < 4:  # they are being started
            return None
        kind = self._kinds.pop()
        if kind == "host":
            self._agents[1].lose()
        else:
            os.kill(self._chance.choice(ranks), signal.SIGKILL)
        self.kills[kind] += 1
        print(f"{time.strftime('%H:%M:%S')} killed: {kind}", flush=True)  # noqa: T201
        return kind


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return sorted(found)


def _whole(run: Path, folder: Path, environment: dict[str, str]) -> Any:
    """Return the newest checkpoint of a run as plain Lightning has it."""
    last, target = run / "checkpoints/last.ckpt", folder / f"{run.parent.name}.ckpt"
    export = [sys.executable, "-m", "boltmesh", "export", str(last), "--to", str(target)]
    source = last
    if last.is_dir():
        subprocess.run(export, cwd=folder, env=environment, check=True, capture_output=True)
        source = target
    return torch.load(source, weights_only=True)


def main() -> None:
    """Run the trial as the command line says, and print what happened."""
    parser = argparse.ArgumentParser(description="A run that is killed at random.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--strategy", default="bolt_zero2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, nargs=2, default=(60.0, 120.0), metavar="SECONDS")
    parser.add_argument("--in-memory", type=int, metavar="N", help="checkpoint_in_memory_every")
    parser.add_argument("--steps", type=int, help="fewer than usual on a busy machine")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        seen = run_chaos(
            Path(folder),
            minutes=given.minutes,
            every_s=tuple(given.every),
            num_ranks=given.ranks,
            strategy=given.strategy,
            seed=given.seed,
            in_memory_every=given.in_memory,
            num_hosts=given.hosts,
            steps=given.steps,
        )
    print("\n".join(seen.restarts))  # noqa: T201
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(seen.kills.items()))
    print(  # noqa: T201
        f"{sum(seen.kills.values())} kills ({kinds}) in {seen.seconds / 60:.1f} min; {seen.steps} "
        f"steps, {seen.num_repeated} repeated; losses, parameters and optimizer state equal those "
        f"of an uninterrupted run to the bit"
    )


if __name__ == "__main__":
    main()

"""Where the commands find jobs: on this host, on others, in a recording, in the demo."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, get_args

from typing_extensions import TypeIs

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.tui.commands.console import narrate
from boltmesh.tui.sources.live import LiveSource, Observation, Source

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.reader import JobSummary
    from boltmesh.tui.sources.replay import ReplaySource
    from boltmesh.tui.sources.ssh.hosts import Hosts

GPU_DEMO = "gpu"
"""The demo that begins with the devices, which it reads through a driver of its own."""
CPU_SAMPLE_S = 0.25
"""Wait between two looks of a command that looks once: a CPU share is a difference of two."""

Place: TypeAlias = "Path | Hosts | None"
"""Where jobs are: a run directory of this host, None for the default one, or other hosts."""


def place_of(
    hosts: Sequence[str],
    remote_command: str | None,
    run_dir: Path | None,
    *,
    interval_s: float = 1.0,
) -> Place:
    """Return where the options of a command say that jobs are."""
    if not hosts:
        if remote_command is not None:
            raise ConfigError("--remote-command is for another host. Add --ssh HOST.")
        return run_dir
    from boltmesh.tui.sources.ssh.hosts import Hosts
    from boltmesh.tui.sources.ssh.remote import Remote

    folder = None if run_dir is None else str(run_dir)
    return Hosts([Remote(host, remote_command, folder, interval_s) for host in hosts])


def with_slurm(hosts: Sequence[str], job: str) -> tuple[str, ...]:
    """Return ``hosts`` and those of a SLURM job."""
    from boltmesh.tui.sources.ssh.hosts import slurm_hosts

    return (*hosts, *slurm_hosts(job))


def list_slurm_jobs(
    hosts: Sequence[str], remote_command: str | None, run_dir: Path | None
) -> Sequence["JobSummary"]:
    """Return the jobs on ``hosts`` and on the hosts of the user's SLURM jobs, newest first.

    A host that does not answer is reported and left out.
    """
    from boltmesh.tui.sources.ssh.hosts import slurm_hosts

    found: dict[str, JobSummary] = {}
    for host in (*hosts, *slurm_hosts()):
        for job in _jobs_of(place_of((host,), remote_command, run_dir)):
            found.setdefault(job.id, job)  # ranks on several hosts are one job
    return sorted(found.values(), key=lambda job: -job.started)


def _jobs_of(place: Place) -> Sequence["JobSummary"]:
    try:
        return list_jobs(place)
    except TelemetryError as error:
        narrate(str(error))
        return []


def is_here(place: Place) -> TypeIs[Path | None]:
    """Say whether jobs are looked for on this host."""
    return place is None or isinstance(place, Path)


def where(place: Place) -> str:
    """Return in words where jobs are looked for."""
    from boltmesh.telemetry.job import run_dir

    if is_here(place):
        return f"in {place or run_dir()}"
    folder = place.remotes[0].run_dir
    return f"on {place.name}" if folder is None else f"in {folder} on {place.name}"


def attach(job: str | None, place: Place) -> Source:
    """Return a job as a source."""
    if not is_here(place):
        return place.open(job)

    from boltmesh.telemetry.reader.reader import open_job

    try:
        return LiveSource(open_job(job, place))
    except TelemetryError as error:
        # Here it is the name that is wrong, and the message has the nearest one.
        raise ConfigError(str(error)) from error


def open_named(word: str | None, place: Place) -> Source:
    """Return a job, or the end of a recording if the word is the path of a file."""
    if word is not None and Path(word).is_file():
        return open_replay(Path(word), None, has_end=True)
    return attach(word, place)


def list_jobs(place: Place) -> Sequence["JobSummary"]:
    """Return the jobs of a place, the newest first."""
    if not is_here(place):
        return place.list_jobs()

    from boltmesh.telemetry.reader import reader

    return reader.list_jobs(place)


def other_running(job: str | None, place: Place) -> Sequence[str]:
    """Return the running jobs but the newest, where none is named; there has to be a job at all."""
    if job is not None:
        return ()
    found = list_jobs(place)
    if not found:
        raise ConfigError(
            f"No job of yours is {where(place)}. Start one with 'boltmesh fit CONFIG', or see a "
            f"synthetic one with 'boltmesh top --demo'."
        )
    return [item.id for item in found if item.state == "running"][1:]


def open_source(job: str | None, *, demo: bool, place: Place) -> Source:
    """Return the one job of a command without a screen."""
    if demo:
        return _open_demo(job)
    others = other_running(job, place)
    if others:
        narrate(
            f"{len(others) + 1} jobs are running; this is the newest. "
            f"Name another: {', '.join(others[:3])}."
        )
    return attach(job, place)


def _open_demo(kind: str | None) -> Source:
    """Return the demo, in one of the states that a job can be in."""
    from boltmesh.tui.demo import DEFAULT_MESH, EXPERTS_MESH, DemoSource, Scenario

    scenarios: dict[str, Scenario] = {each: each for each in get_args(Scenario)}
    if kind == GPU_DEMO:
        from boltmesh.tui.demo.nvml import NvmlDemoSource

        return NvmlDemoSource()
    if kind is not None and kind not in scenarios:
        kinds = ", ".join([*scenarios, GPU_DEMO])
        raise ConfigError(f"--demo shows no job of yours, and has no {kind!r}. Use {kinds}.")
    mesh = EXPERTS_MESH if kind == "experts" else DEFAULT_MESH
    return DemoSource(scenario=scenarios[kind or "healthy"], mesh=mesh)


def check_replay(
    job: str | None,
    *,
    demo: bool,
    replay: Path | None,
    at_s: float | None,
    on_alert: str | None,
    once: bool,
) -> None:
    """Refuse options that contradict a recording, or need one."""
    if replay is None:
        if at_s is not None:
            raise ConfigError("--at is a moment of a recording. Add --replay FILE.")
        if on_alert is not None and (demo or once):
            other = "--demo" if demo else "--once"
            raise ConfigError(f"--on-alert watches a job that runs. Leave out {other}.")
        return
    if job is not None or demo:
        raise ConfigError(f"--replay shows {replay} alone. Leave out {job or '--demo'}.")
    if on_alert is not None:
        raise ConfigError("--on-alert watches a job that runs. Leave out --replay.")


def open_replay(path: Path, at_s: float | None, *, has_end: bool = False) -> "ReplaySource":
    """Open a recording at a moment; without one at its begin, or its end."""
    from boltmesh.tui.sources.replay import ReplaySource

    source = ReplaySource(path)
    first, last = source.span()
    if at_s is not None:
        source.seek(first + at_s)
        if at_s > last - first:
            narrate(f"{path} ends after {last - first:.1f} s; this is its end.")
    elif has_end:
        source.seek(last)
    return source


def settled(source: Source) -> Observation:
    """Return a look at a job; at a running one the second, for some rates need two."""
    seen = source.read()
    if seen.job.state == "running":
        time.sleep(CPU_SAMPLE_S)
        seen = source.read()
    return seen

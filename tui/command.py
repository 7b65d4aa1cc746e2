"""``boltmesh top`` and ``boltmesh jobs`` as functions that return an exit code.

Data go to stdout, everything else to stderr. Textual is imported only when a screen is opened.
"""

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from typing_extensions import TypeIs

from boltmesh.errors import BoltMeshError, ConfigError, TelemetryError
from boltmesh.tui.clean import clean
from boltmesh.tui.drawing.glyphs import ASCII, UNICODE
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.report import job_json, job_text, jobs_json, jobs_text
from boltmesh.tui.source import InterruptionError, LiveSource, Observation, Source
from boltmesh.tui.state import fold

if TYPE_CHECKING:
    from boltmesh.telemetry.reader import JobSummary
    from boltmesh.tui.replay import ReplaySource
    from boltmesh.tui.ssh.hosts import Hosts

OK = 0
INTERRUPTED = 130

THEMES = ("night", "day", "terminal", "mono")
INTERVAL_S = 1.0
SSH_INTERVAL_S = 2.0
DEFAULT_WIDTH = 100
"""Of a summary that goes to a file or a pipe, unless COLUMNS says otherwise."""
CPU_SAMPLE_S = 0.25
"""A process's CPU share is a difference of two looks; who looks once waits this long between."""

Place: TypeAlias = "Path | Hosts | None"
"""Where jobs are: a run directory of this host, None for the default one, or other hosts."""


def top(
    job: str | None = None,
    *,
    once: bool = False,
    as_json: bool = False,
    demo: bool = False,
    replay: Path | None = None,
    at_s: float | None = None,
    on_alert: str | None = None,
    ssh: Sequence[str] = (),
    remote_command: str | None = None,
    has_mouse: bool = True,
    ascii_only: bool = False,
    theme: str | None = None,
    run_dir: Path | None = None,
    interval_s: float | None = None,
) -> int:
    """Show a job: on a screen, or as text or JSON on stdout.

    Args:
        job: Id, unique prefix of an id, or folder of a job. None: the running one; where several
            run, the screen lets the user choose and text takes the newest; where none runs, the
            newest that ended.
        once: Print one summary and return.
        as_json: Print JSON instead of text; without ``once``, a line each interval until the job
            ends.
        demo: Show a synthetic job.
        replay: Show a recording. ``once`` takes its last frame, JSON without ``once`` each frame.
        at_s: The moment of the recording to begin with, or to take, in seconds from its begin.
        on_alert: Command for ``/bin/sh``, run for each alert.
        ssh: Hosts that run the job, as ssh takes them; none for this one.
        remote_command: What runs boltmesh there; None: it is looked for.
        has_mouse: Take the mouse; without it the terminal's own selection and copying work.
        ascii_only: Draw with ASCII; also chosen where the terminal's encoding has nothing else.
        theme: One of ``THEMES``. None: what the terminal can show.
        run_dir: Where jobs keep their telemetry, here or there. None: the default of this user.
        interval_s: Time between two looks. None: a second, or two over ssh.

    Returns:
        The exit code: 0, 2 where the user has to change something, 130 after Ctrl-C.
    """
    with _as_exit_code() as exit_code:
        if theme is not None and theme not in THEMES:
            raise ConfigError(f"--theme {theme}: there is no such theme. Use {', '.join(THEMES)}.")
        if demo and job is not None:
            raise ConfigError(f"--demo shows no job of yours. Leave out {job} or --demo.")
        _check_replay(job, demo=demo, replay=replay, at_s=at_s, on_alert=on_alert, once=once)
        if ssh and (demo or replay is not None):
            shown = "--demo" if demo else "--replay"
            raise ConfigError(f"{shown} shows nothing of another host. Leave out {shown} or --ssh.")
        if interval_s is None:
            interval_s = SSH_INTERVAL_S if ssh else INTERVAL_S
        place = _place(
            ssh, remote_command, run_dir, interval_s=CPU_SAMPLE_S if once else interval_s
        )
        is_screen = not (once or as_json)
        if is_screen and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError(
                "The dashboard needs a terminal. Use 'boltmesh top --once' for text or "
                "'boltmesh top --once --json' for JSON."
            )
        look = _look(ascii_only=ascii_only)
        if is_screen:
            _open_screen(
                job,
                demo=demo,
                replay=replay,
                at_s=at_s,
                on_alert=on_alert,
                has_mouse=has_mouse,
                look=look,
                theme=theme,
                place=place,
                interval_s=interval_s,
            )
            return OK
        if replay is not None:
            with contextlib.closing(_open_replay(replay, at_s, has_end=once)) as recording:
                _print_recording(recording, once=once, as_json=as_json, look=look)
            return exit_code()
        with contextlib.closing(_open_source(job, demo=demo, place=place)) as source:
            if once:
                _print_once(source, as_json=as_json, look=look)
            else:
                _print_until_the_end(source, interval_s=interval_s, on_alert=on_alert)
    return exit_code()


def record(
    job: str | None,
    file: Path,
    *,
    interval_s: float = 1.0,
    for_s: float | None = None,
    force: bool = False,
    run_dir: Path | None = None,
) -> int:
    """Keep a job's telemetry in a file for ``top --replay``; return the exit code.

    Ends with the job, after ``for_s`` seconds or with Ctrl-C, which is no failure.
    """
    with _as_exit_code() as exit_code:
        from boltmesh.tui.record import Recording
        from boltmesh.tui.record import record as keep

        with (
            contextlib.closing(_open_source(job, demo=False, place=run_dir)) as source,
            Recording(file, has_force=force) as recording,
        ):
            with contextlib.suppress(KeyboardInterrupt):
                keep(
                    source,
                    recording,
                    interval_s=interval_s,
                    for_s=for_s,
                    on_begin=lambda: _narrate(
                        f"recording into {file}; Ctrl-C ends it, the job goes on."
                    ),
                )
            if recording.num_frames:
                _narrate(
                    f"{file}: {recording.summary()} "
                    f"See it with: boltmesh top --replay {shlex.quote(str(file))}"
                )
    return exit_code()


def export_metrics(
    job: str | None = None,
    *,
    form: str = "prometheus",
    table: str | None = None,
    output: Path | None = None,
    every_s: float | None = None,
    replay: Path | None = None,
    at_s: float | None = None,
    run_dir: Path | None = None,
) -> int:
    """Write a job's figures as Prometheus text or CSV; return the exit code.

    Args:
        job: As for :func:`top`.
        form: ``prometheus`` or ``csv``.
        table: For CSV: one of ``boltmesh.tui.tables.TABLES``.
        output: A file that is replaced whole; None: stdout.
        every_s: Write the file again and again until the job ends.
        replay: Take a recording instead of a job.
        at_s: The moment of the recording, in seconds from its begin; None: its end.
        run_dir: Where jobs keep their telemetry.
    """
    with _as_exit_code() as exit_code:
        from boltmesh.tui.export import check_export, export

        _check_replay(job, demo=False, replay=replay, at_s=at_s, on_alert=None, once=True)
        check_export(form=form, table=table, output=output, every_s=every_s, replay=replay)
        source = (
            _open_source(job, demo=False, place=run_dir)
            if replay is None
            else _open_replay(replay, at_s, has_end=True)
        )
        with contextlib.closing(source):
            if replay is None and form == "prometheus":
                _settled(source)
            export(
                source,
                form=form,
                table=table,
                output=output,
                every_s=every_s,
                out=_write,
            )
    return exit_code()


def jobs(
    *,
    as_json: bool = False,
    ascii_only: bool = False,
    ssh: str | None = None,
    remote_command: str | None = None,
    run_dir: Path | None = None,
) -> int:
    """List this user's jobs on this or another host, newest first; return the exit code."""
    with _as_exit_code() as exit_code:
        hosts = () if ssh is None else (ssh,)
        found = _list_jobs(_place(hosts, remote_command, run_dir))
        if as_json:
            _print(jobs_json(found))
        elif found:
            look = _look(ascii_only=ascii_only)
            _print(jobs_text(found, _width(), look, now=time.time()))
        else:
            host = "this host" if ssh is None else ssh
            _narrate(f"no job of yours is on {host}. Start one with 'boltmesh fit CONFIG'.")
    return exit_code()


@contextlib.contextmanager
def _as_exit_code() -> Iterator[Callable[[], int]]:
    """Turn what a viewer may raise into one line on stderr and an exit code."""
    code = OK
    try:
        yield lambda: code
    except BoltMeshError as error:
        _narrate(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has seen enough, as `head` does. Python would complain once more
        # when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_replay(
    job: str | None,
    *,
    demo: bool,
    replay: Path | None,
    at_s: float | None,
    on_alert: str | None,
    once: bool,
) -> None:
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


def _open_replay(path: Path, at_s: float | None, *, has_end: bool = False) -> "ReplaySource":
    """Open a recording at a moment; without one at its begin, or its end."""
    from boltmesh.tui.replay import ReplaySource

    source = ReplaySource(path)
    first, last = source.span()
    if at_s is not None:
        source.seek(first + at_s)
        if at_s > last - first:
            _narrate(f"{path} ends after {last - first:.1f} s; this is its end.")
    elif has_end:
        source.seek(last)
    return source


def _place(
    hosts: Sequence[str],
    remote_command: str | None,
    run_dir: Path | None,
    *,
    interval_s: float = 1.0,
) -> Place:
    if not hosts:
        if remote_command is not None:
            raise ConfigError("--remote-command is for another host. Add --ssh HOST.")
        return run_dir
    from boltmesh.tui.ssh.hosts import Hosts
    from boltmesh.tui.ssh.remote import Remote

    folder = None if run_dir is None else str(run_dir)
    return Hosts([Remote(host, remote_command, folder, interval_s) for host in hosts])


def _is_here(place: Place) -> TypeIs[Path | None]:
    return place is None or isinstance(place, Path)


def _open_source(job: str | None, *, demo: bool, place: Place) -> Source:
    if demo:
        from boltmesh.tui.demo import DemoSource

        return DemoSource()
    others = _others(job, place)
    if others:
        _narrate(
            f"{len(others) + 1} jobs are running; this is the newest. "
            f"Name another: {', '.join(others[:3])}."
        )
    return _attach(job, place)


def _open_screen(
    job: str | None,
    *,
    demo: bool,
    replay: Path | None,
    at_s: float | None,
    on_alert: str | None,
    has_mouse: bool,
    look: Look,
    theme: str | None,
    place: Place,
    interval_s: float,
) -> None:
    source: Source | None
    if replay is not None:
        source = _open_replay(replay, at_s)
    elif demo:
        source = _open_source(None, demo=True, place=None)
    else:
        source = None if _others(job, place) else _attach(job, place)
    if source is not None and not _is_here(place):
        _wait_for_first_look(source)

    from boltmesh.tui.app import DashboardApp
    from boltmesh.tui.settings import settings_path

    is_alone = demo or replay is not None
    app = DashboardApp(
        source,
        list_jobs=None if is_alone else lambda: _list_jobs(place),
        open_source=None if is_alone else lambda job_id: _attach(job_id, place),
        is_ascii=look.glyphs.is_ascii,
        palette=theme,
        interval_s=interval_s,
        settings_path=None if demo else settings_path(),
        on_alert=on_alert,
    )
    for name in ("COLUMNS", "LINES"):
        # Where a shell exports them they are the size of its start, and the terminal's own counts.
        os.environ.pop(name, None)
    app.run(mouse=has_mouse)
    if replay is not None and (note := getattr(source, "note", None)) is not None:
        _narrate(note)
    if app.settings_note is not None:
        _narrate(app.settings_note)
    if app.detached_from is not None and not is_alone:
        there = "" if _is_here(place) else f" --ssh {place.remotes[0].host}"
        _narrate(
            f"detached from {app.detached_from}, which goes on. 'boltmesh top{there}' attaches "
            f"again."
        )


def _wait_for_first_look(source: Source) -> None:
    """Let a connection that cannot be had be told before there is a screen."""
    try:
        source.read()
    except BaseException:
        source.close()
        raise


def _attach(job: str | None, place: Place) -> Source:
    if not _is_here(place):
        return place.open(job)

    from boltmesh.telemetry.reader import open_job

    try:
        return LiveSource(open_job(job, place))
    except TelemetryError as error:
        # Here it is the name that is wrong, and the message has the nearest one.
        raise ConfigError(str(error)) from error


def _list_jobs(place: Place) -> Sequence["JobSummary"]:
    if not _is_here(place):
        return place.list_jobs()

    from boltmesh.telemetry.reader import list_jobs

    return list_jobs(place)


def _others(job: str | None, place: Place) -> Sequence[str]:
    """Return the running jobs but the newest, where none is named; there has to be a job at all."""
    if job is not None:
        return ()
    found = _list_jobs(place)
    if not found:
        where = "this host" if _is_here(place) else place.name
        raise ConfigError(
            f"No job of yours is on {where}. Start one with 'boltmesh fit CONFIG', or see a "
            f"synthetic one with 'boltmesh top --demo'."
        )
    return [item.id for item in found if item.state == "running"][1:]


def _print_once(source: Source, *, as_json: bool, look: Look) -> None:
    seen = _settled(source)
    _print(job_json(seen) if as_json else job_text(fold(None, seen), _width(), look))


def _settled(source: Source) -> Observation:
    """Return a look at a job; at a running one the second, for some rates need two."""
    seen = source.read()
    if seen.job.state == "running":
        time.sleep(CPU_SAMPLE_S)
        seen = source.read()
    return seen


def _print_until_the_end(source: Source, *, interval_s: float, on_alert: str | None) -> None:
    with contextlib.ExitStack() as stack:
        watchman = None
        if on_alert is not None:
            from boltmesh.tui.watchman import Watchman

            watchman = stack.enter_context(contextlib.closing(Watchman(on_alert, say=_narrate)))
        is_interrupted = False
        while True:
            try:
                seen = source.read()
            except InterruptionError as error:
                if not is_interrupted:
                    _narrate(str(error))
                is_interrupted = True
                time.sleep(interval_s)
                continue
            if is_interrupted:
                _narrate("connected again.")
                is_interrupted = False
            _print(job_json(seen))
            if watchman is not None:
                watchman.look(seen)
            if seen.job.state != "running":
                return
            time.sleep(interval_s)


def _print_recording(recording: "ReplaySource", *, once: bool, as_json: bool, look: Look) -> None:
    """Print the frame that is asked for, or all of them, which waits for no clock."""
    if not once:
        for seen in recording.frames():
            _print(job_json(seen))
    else:
        seen = recording.read()
        _print(job_json(seen) if as_json else job_text(fold(None, seen), _width(), look))
    if recording.note is not None:
        _narrate(recording.note)


def _look(*, ascii_only: bool) -> Look:
    """Headings and signs are for the eye; in a summary words say the same."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    is_ascii = ascii_only or not encoding.startswith("utf") or os.environ.get("TERM") == "linux"
    return Look(ASCII if is_ascii else UNICODE, has_headings=False, has_signs=False)


def _width() -> int:
    return max(20, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def _print(text: str) -> None:
    _write(text + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _narrate(text: str) -> None:
    sys.stderr.write(f"boltmesh: {clean(text)}\n")

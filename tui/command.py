"""``boltmesh top`` and ``boltmesh jobs`` as functions that return an exit code.

Data go to stdout, everything else to stderr. Textual is imported only when a screen is opened.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from boltmesh.errors import BoltMeshError, ConfigError, TelemetryError
from boltmesh.tui.clean import clean
from boltmesh.tui.drawing.glyphs import ASCII, UNICODE
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.report import job_json, job_text, jobs_json, jobs_text
from boltmesh.tui.source import LiveSource, Source
from boltmesh.tui.state import fold

if TYPE_CHECKING:
    from boltmesh.telemetry.reader import JobSummary

OK = 0
INTERRUPTED = 130

THEMES = ("night", "day", "terminal", "mono")
DEFAULT_WIDTH = 100
"""Of a summary that goes to a file or a pipe, unless COLUMNS says otherwise."""
CPU_SAMPLE_S = 0.25
"""A process's CPU share is a difference of two looks; ``--once`` waits this long between them."""


def top(
    job: str | None = None,
    *,
    once: bool = False,
    as_json: bool = False,
    demo: bool = False,
    ascii_only: bool = False,
    theme: str | None = None,
    run_dir: Path | None = None,
    interval_s: float = 1.0,
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
        ascii_only: Draw with ASCII; also chosen where the terminal's encoding has nothing else.
        theme: One of ``THEMES``. None: what the terminal can show.
        run_dir: Where jobs keep their telemetry. None: the default of this user.
        interval_s: Time between two looks.

    Returns:
        The exit code: 0, 2 where the user has to change something, 130 after Ctrl-C.
    """
    with _as_exit_code() as exit_code:
        if theme is not None and theme not in THEMES:
            raise ConfigError(f"--theme {theme}: there is no such theme. Use {', '.join(THEMES)}.")
        if demo and job is not None:
            raise ConfigError(f"--demo shows no job of yours. Leave out {job} or --demo.")
        is_screen = not (once or as_json)
        if is_screen and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError(
                "The dashboard needs a terminal. Use 'boltmesh top --once' for text or "
                "'boltmesh top --once --json' for JSON."
            )
        look = _look(ascii_only=ascii_only)
        if is_screen:
            _open_screen(
                job, demo=demo, look=look, theme=theme, run_dir=run_dir, interval_s=interval_s
            )
            return OK
        with contextlib.closing(_open_source(job, demo=demo, run_dir=run_dir)) as source:
            if once:
                _print_once(source, as_json=as_json, look=look)
            else:
                _print_until_the_end(source, interval_s=interval_s)
    return exit_code()


def jobs(*, as_json: bool = False, ascii_only: bool = False, run_dir: Path | None = None) -> int:
    """List this user's jobs on this host, newest first; return the exit code."""
    with _as_exit_code() as exit_code:
        found = _list_jobs(run_dir)
        if as_json:
            _print(jobs_json(found))
        elif found:
            look = _look(ascii_only=ascii_only)
            _print(jobs_text(found, _width(), look, now=time.time()))
        else:
            _narrate("no job of yours is on this host. Start one with 'boltmesh fit CONFIG'.")
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


def _open_source(job: str | None, *, demo: bool, run_dir: Path | None) -> Source:
    if demo:
        from boltmesh.tui.demo import DemoSource

        return DemoSource()
    found = _require_jobs(job, run_dir)
    running = [item for item in found if item.state == "running"]
    if job is None and len(running) > 1:
        _narrate(
            f"{len(running)} jobs are running; this is the newest. "
            f"Name another: {', '.join(item.id for item in running[1:4])}."
        )
    return _attach(job, run_dir)


def _open_screen(
    job: str | None,
    *,
    demo: bool,
    look: Look,
    theme: str | None,
    run_dir: Path | None,
    interval_s: float,
) -> None:
    source: Source | None
    if demo:
        source = _open_source(None, demo=True, run_dir=None)
    else:
        found = _require_jobs(job, run_dir)
        num_running = sum(item.state == "running" for item in found)
        source = None if job is None and num_running > 1 else _attach(job, run_dir)

    from boltmesh.tui.app import DashboardApp

    app = DashboardApp(
        source,
        list_jobs=None if demo else lambda: _list_jobs(run_dir),
        open_source=None if demo else lambda job_id: _attach(job_id, run_dir),
        is_ascii=look.glyphs.is_ascii,
        palette=theme,
        interval_s=interval_s,
    )
    # Without the mouse the terminal's own selection and copying go on working.
    app.run(mouse=False)
    if app.detached_from is not None and not demo:
        _narrate(
            f"detached from {app.detached_from}, which goes on. 'boltmesh top' attaches again."
        )


def _attach(job: str | None, run_dir: Path | None) -> Source:
    from boltmesh.telemetry.reader import open_job

    try:
        return LiveSource(open_job(job, run_dir))
    except TelemetryError as error:
        # Here it is the name that is wrong, and the message has the nearest one.
        raise ConfigError(str(error)) from error


def _list_jobs(run_dir: Path | None) -> Sequence["JobSummary"]:
    from boltmesh.telemetry.reader import list_jobs

    return list_jobs(run_dir)


def _require_jobs(job: str | None, run_dir: Path | None) -> Sequence["JobSummary"]:
    found = _list_jobs(run_dir)
    if not found and job is None:
        raise ConfigError(
            "No job of yours is on this host. Start one with 'boltmesh fit CONFIG', or see a "
            "synthetic one with 'boltmesh top --demo'."
        )
    return found


def _print_once(source: Source, *, as_json: bool, look: Look) -> None:
    seen = source.read()
    if seen.job.state == "running":
        time.sleep(CPU_SAMPLE_S)
        seen = source.read()
    _print(job_json(seen) if as_json else job_text(fold(None, seen), _width(), look))


def _print_until_the_end(source: Source, *, interval_s: float) -> None:
    while True:
        seen = source.read()
        _print(job_json(seen))
        if seen.job.state != "running":
            return
        time.sleep(interval_s)


def _look(*, ascii_only: bool) -> Look:
    """Headings and signs are for the eye; in a summary words say the same."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    is_ascii = ascii_only or not encoding.startswith("utf") or os.environ.get("TERM") == "linux"
    return Look(ASCII if is_ascii else UNICODE, has_headings=False, has_signs=False)


def _width() -> int:
    return max(20, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _narrate(text: str) -> None:
    sys.stderr.write(f"boltmesh: {clean(text)}\n")

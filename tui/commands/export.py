"""``boltmesh export-metrics``: one look at a job, or many, as Prometheus, OpenMetrics or CSV."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.tui.commands import targets
from boltmesh.tui.commands.console import as_exit_code, narrate, write
from boltmesh.tui.export.html import html_page
from boltmesh.tui.export.prometheus import prometheus_text
from boltmesh.tui.export.tables import TABLES, csv_text
from boltmesh.tui.sources.live import Observation, Source
from boltmesh.tui.sources.replay import ReplaySource
from boltmesh.tui.state import fold


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
    """Write a job's figures as text for Prometheus, OpenMetrics or CSV; return the exit code.

    Args:
        job: As for :func:`top`.
        form: ``prometheus``, ``openmetrics`` or ``csv``.
        table: For CSV: one of ``boltmesh.tui.export.tables.TABLES``.
        output: A file that is replaced whole; None: stdout.
        every_s: Write the file again and again until the job ends.
        replay: Take a recording instead of a job.
        at_s: The moment of the recording, in seconds from its begin; None: its end.
        run_dir: Where jobs keep their telemetry.
    """
    with as_exit_code() as exit_code:
        targets.check_replay(job, demo=False, replay=replay, at_s=at_s, on_alert=None, once=True)
        check_export(form=form, table=table, output=output, every_s=every_s, replay=replay)
        source = (
            targets.open_source(job, demo=False, place=run_dir)
            if replay is None
            else targets.open_replay(replay, at_s, has_end=True)
        )
        with contextlib.closing(source):
            if replay is None and form != "csv":
                targets.settled(source)
            export(
                source,
                form=form,
                table=table,
                output=output,
                every_s=every_s,
                out=write,
            )
    return exit_code()


def write_report(
    job: str | None = None,
    *,
    output: Path | None = None,
    replay: Path | None = None,
    run_dir: Path | None = None,
) -> int:
    """Write a run as one HTML page; return the exit code.

    Args:
        job: As for :func:`top`.
        output: The file, replaced whole; None: the job's id with ``.html`` in the working
            directory, which must not exist.
        replay: Take the end of a recording instead of a job.
        run_dir: Where jobs keep their telemetry.
    """
    with as_exit_code() as exit_code:
        targets.check_replay(job, demo=False, replay=replay, at_s=None, on_alert=None, once=True)
        source = (
            targets.open_source(job, demo=False, place=run_dir)
            if replay is None
            else targets.open_replay(replay, None, has_end=True)
        )
        with contextlib.closing(source):
            seen = source.read() if replay is not None else targets.settled(source)
        path = output or Path(f"{seen.job.id}.html")
        if output is None and path.exists():
            raise ConfigError(f"{path} exists. Name another file, or the same, with --output.")
        _replace(path, (html_page(fold(None, seen)),), is_first=True)
        narrate(f"written: {path}")
    return exit_code()


FORMS = ("prometheus", "openmetrics", "csv")
DEFAULT_TABLE = "steps"


def check_export(
    *,
    form: str,
    table: str | None,
    output: Path | None,
    every_s: float | None,
    replay: Path | None,
) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigError: One line, which option to leave out or to add.
    """
    if form not in FORMS:
        raise ConfigError(f"--format {form}: there is no such format. Use {', '.join(FORMS)}.")
    if table is not None and form != "csv":
        raise ConfigError("--table chooses what a CSV file has. Add --format csv.")
    if table is not None and table not in TABLES:
        raise ConfigError(f"--table {table}: there is no such table. Use {', '.join(TABLES)}.")
    if every_s is None:
        return
    if form == "csv":
        raise ConfigError("--every renews a file of metrics. Leave it out, or --format csv.")
    if replay is not None:
        raise ConfigError("--every watches a job that runs. Leave out --replay.")
    if output is None:
        raise ConfigError("--every renews a file. Add --output FILE.")


def export(
    source: Source,
    *,
    form: str,
    table: str | None,
    output: Path | None,
    every_s: float | None,
    out: Callable[[str], object],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write observations of the source, once or, with ``every_s``, until the job ends for good.

    Raises:
        ConfigError: The file cannot be made.
        TelemetryError: The job can no longer be read, or the file no longer written.
    """
    is_first = True
    while True:
        seen = source.read()
        if form == "csv":
            parts: Iterable[str] = csv_text(table or DEFAULT_TABLE, _looks(source, seen))
        else:
            is_open = form == "openmetrics"
            parts = (prometheus_text(seen, "openmetrics" if is_open else "prometheus"),)
        if output is None:
            for part in parts:
                out(part)
        else:
            _replace(output, parts, is_first=is_first)
        if every_s is None or seen.job.is_over:
            return
        is_first = False
        sleep(every_s)


def _looks(source: Source, seen: Observation) -> Iterable[Observation]:
    """Return the looks up to the one that is shown: all of a recording, or this one."""
    if not isinstance(source, ReplaySource):
        return (seen,)
    until = source.position
    source.seek(source.span()[0])
    return source.frames(until=until)


def _replace(path: Path, parts: Iterable[str], *, is_first: bool) -> None:
    """Replace a file whole, so that a collector never reads half of one.

    Others may read it, as the umask allows: node_exporter runs as a user of its own.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no plain file. Name a file.")
    # node_exporter reads *.prom alone, and passes this name over.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "w", encoding="utf-8", newline="") as file:
            file.writelines(parts)
        temporary.replace(path)
    except OSError as error:
        kind = ConfigError if is_first else TelemetryError
        raise kind(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

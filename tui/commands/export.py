"""``boltmesh export-metrics``: a job's figures for other programs."""

import contextlib
from pathlib import Path

from boltmesh.tui.commands import places
from boltmesh.tui.commands.console import as_exit_code, write


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
        table: For CSV: one of ``boltmesh.tui.export.tables.TABLES``.
        output: A file that is replaced whole; None: stdout.
        every_s: Write the file again and again until the job ends.
        replay: Take a recording instead of a job.
        at_s: The moment of the recording, in seconds from its begin; None: its end.
        run_dir: Where jobs keep their telemetry.
    """
    with as_exit_code() as exit_code:
        from boltmesh.tui.export.command import check_export, export

        places.check_replay(job, demo=False, replay=replay, at_s=at_s, on_alert=None, once=True)
        check_export(form=form, table=table, output=output, every_s=every_s, replay=replay)
        source = (
            places.open_source(job, demo=False, place=run_dir)
            if replay is None
            else places.open_replay(replay, at_s, has_end=True)
        )
        with contextlib.closing(source):
            if replay is None and form == "prometheus":
                places.settled(source)
            export(
                source,
                form=form,
                table=table,
                output=output,
                every_s=every_s,
                out=write,
            )
    return exit_code()

"""Commands that show, record and export the telemetry of jobs."""

from pathlib import Path

import click

from boltmesh.cli.config import NumberRange

RUN_DIR = click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where jobs keep telemetry.",
)

REMOTE_COMMAND = click.option(
    "--remote-command",
    metavar="COMMAND",
    help="Command that runs boltmesh there, for example /venv/bin/boltmesh or 'docker exec -i NAME "
    "boltmesh'. [the PATH of a login, else that of a job there]",
)


@click.command()
@click.argument("job", required=False)
@click.argument("other", required=False)
@click.option("--once", is_flag=True, help="Print a summary, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line for each look.")
@click.option(
    "--demo",
    is_flag=True,
    help="Show a made-up job: healthy, straggler, input_bound, hang, crashed, experts or gpu.",
)
@click.option("--replay", type=click.Path(path_type=Path), help="Show a recording.")
@click.option(
    "--at",
    "at_s",
    type=NumberRange(min=0.0),
    help="Moment of the recording, in seconds from its beginning.",
)
@click.option("--on-alert", metavar="COMMAND", help="Run a command for each alert.")
@click.option(
    "--ssh",
    metavar="HOST",
    multiple=True,
    help="Watch a job there, over your own ssh; again for each further host of the same job.",
)
@click.option("--slurm", metavar="JOBID", help="The hosts of this SLURM job, instead of --ssh.")
@REMOTE_COMMAND
@click.option("--no-mouse", is_flag=True, help="Leave the mouse to the terminal.")
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII.")
@click.option("--theme", help="night, day, terminal or mono.")
@RUN_DIR
@click.option(
    "--interval",
    "interval_s",
    type=NumberRange(min=0.1),
    help="Seconds between two looks. [1; 2 over ssh]",
)
def top(
    job: str | None,
    other: str | None,
    once: bool,
    as_json: bool,
    demo: bool,
    replay: Path | None,
    at_s: float | None,
    on_alert: str | None,
    ssh: tuple[str, ...],
    slurm: str | None,
    remote_command: str | None,
    no_mouse: bool,
    ascii_only: bool,
    theme: str | None,
    run_dir: Path | None,
    interval_s: float | None,
) -> int:
    """Watch a running job, or look back at one that has ended.

    JOB is a name, an id, the beginning of either, or the folder of a job; without it the
    running one. With --demo it is what happens to the made-up job.
    With OTHER the two are compared; each may be a recording.
    """
    from boltmesh.tui.commands.top import top as show

    return show(
        job,
        other,
        once=once,
        as_json=as_json,
        demo=demo,
        replay=replay,
        at_s=at_s,
        on_alert=on_alert,
        ssh=ssh,
        slurm=slurm,
        remote_command=remote_command,
        has_mouse=not no_mouse,
        ascii_only=ascii_only,
        theme=theme,
        run_dir=run_dir,
        interval_s=interval_s,
    )


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[JOB] FILE")
@click.option(
    "--interval",
    "interval_s",
    type=NumberRange(min=0.1),
    default=1.0,
    help="Seconds between two frames. [1]",
)
@click.option("--for", "for_s", type=NumberRange(min=0.1), help="Stop after this many seconds.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@RUN_DIR
def record(
    words: tuple[str, ...],
    interval_s: float,
    for_s: float | None,
    force: bool,
    run_dir: Path | None,
) -> int:
    """Keep a job's telemetry in FILE, for 'boltmesh top --replay FILE'.

    Ends with the job or with Ctrl-C; the job goes on. JOB is chosen as by 'boltmesh top'.
    """
    from boltmesh.tui.commands.record import record as keep

    if len(words) > 2:
        raise click.UsageError(f"record takes a job and a file, and not also {words[2]}.")
    return keep(
        words[0] if len(words) == 2 else None,
        Path(words[-1]),
        interval_s=interval_s,
        for_s=for_s,
        force=force,
        run_dir=run_dir,
    )


@click.command()
@click.argument("job", required=False)
@click.option(
    "--output", type=click.Path(path_type=Path), help="The file to replace. [JOB.html, if new]"
)
@click.option("--replay", type=click.Path(path_type=Path), help="Take the end of a recording.")
@RUN_DIR
def report(job: str | None, output: Path | None, replay: Path | None, run_dir: Path | None) -> int:
    """Write a run as one HTML page: charts, phases, memory, traffic, findings, config.

    JOB is chosen as by 'boltmesh top'.
    """
    from boltmesh.tui.commands.export import write_report

    return write_report(job, output=output, replay=replay, run_dir=run_dir)


@click.command("export-metrics")
@click.argument("job", required=False)
@click.option(
    "--format",
    "form",
    default="prometheus",
    help="prometheus, openmetrics or csv. [prometheus]",
)
@click.option(
    "--table", help="Table for CSV: steps, metrics, collectives, ranks, offload or figures. [steps]"
)
@click.option("--output", type=click.Path(path_type=Path), help="Write a file, whole or not.")
@click.option(
    "--every",
    "every_s",
    type=NumberRange(min=0.1),
    help="Write it again every so many seconds, until the job ends.",
)
@click.option("--replay", type=click.Path(path_type=Path), help="Take a recording.")
@click.option(
    "--at",
    "at_s",
    type=NumberRange(min=0.0),
    help="Moment of the recording, in seconds from its beginning. [its end]",
)
@RUN_DIR
def export_metrics(
    job: str | None,
    form: str,
    table: str | None,
    output: Path | None,
    every_s: float | None,
    replay: Path | None,
    at_s: float | None,
    run_dir: Path | None,
) -> int:
    """Write a job's figures for Prometheus, as OpenMetrics or as CSV.

    JOB is chosen as by 'boltmesh top'.
    """
    from boltmesh.tui.commands.export import export_metrics as export

    return export(
        job,
        form=form,
        table=table,
        output=output,
        every_s=every_s,
        replay=replay,
        at_s=at_s,
        run_dir=run_dir,
    )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--ssh", metavar="HOST", help="List the jobs there, over your own ssh.")
@click.option("--slurm", is_flag=True, help="List those on all hosts of your SLURM jobs.")
@REMOTE_COMMAND
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII.")
@RUN_DIR
def jobs(
    as_json: bool,
    ssh: str | None,
    slurm: bool,
    remote_command: str | None,
    ascii_only: bool,
    run_dir: Path | None,
) -> int:
    """List your jobs on this host: alive, finished, failed and crashed."""
    from boltmesh.tui.commands.top import jobs as show

    return show(
        as_json=as_json,
        ssh=ssh,
        slurm=slurm,
        remote_command=remote_command,
        ascii_only=ascii_only,
        run_dir=run_dir,
    )


@click.command()
@click.argument("job", required=False)
@click.option("--list", "wants_list", is_flag=True, help="Write one frame that lists your jobs.")
@RUN_DIR
@click.option(
    "--interval",
    "interval_s",
    type=NumberRange(min=0.1),
    default=1.0,
    help="Seconds between two frames. [1]",
)
def stream(job: str | None, wants_list: bool, run_dir: Path | None, interval_s: float) -> int:
    """Write a job's telemetry to stdout, for 'boltmesh top --ssh' on another host.

    Ends when stdin or stdout is closed. JOB is chosen as by 'boltmesh top'.
    """
    from boltmesh.tui.commands.record import stream as write

    return write(job, wants_list=wants_list, run_dir=run_dir, interval_s=interval_s)

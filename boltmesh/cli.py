"""The ``boltmesh`` command. Loads torch, Lightning or the dashboard only where a command needs it.

Exit codes: 0 for success, 1 for a failed run, 2 for what the user can mend, 130 after Ctrl-C and
143 after SIGTERM. Errors are one line on stderr; ``--traceback`` shows where they come from.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from boltmesh import __version__
from boltmesh.errors import BoltMeshError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.placement import Placement
    from boltmesh.rank import Rank

Verb = Literal["fit", "validate", "test", "predict"]

CONFIG_HELP = (
    "CONFIG is the name of a recipe or the path of a YAML file. Keys are changed with key=value, "
    "for example trainer.max_steps=100; keys of trainer and run need no section: max_steps=100."
)

REMOTE_COMMAND = click.option(
    "--remote-command",
    metavar="COMMAND",
    help="What runs boltmesh there, for example /venv/bin/boltmesh or 'docker exec -i NAME "
    "boltmesh'. [the PATH of a login, else what a job there says]",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run_command(given))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = boltmesh.main(args=arguments, prog_name="boltmesh", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except click.Abort:
        return 130
    except BoltMeshError as error:
        return _complain(str(error), error.exit_code)
    except BrokenPipeError:
        # Whoever reads stdout has seen enough. Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _complain(message: str, exit_code: int) -> int:
    print(f"boltmesh: {message}", file=sys.stderr)
    return exit_code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def boltmesh() -> None:
    """Train Lightning modules on many devices, and watch them from a terminal."""


def _run_command(verb: Verb, summary: str) -> None:
    """Add ``fit``, ``validate``, ``test`` or ``predict``."""

    @click.argument("config")
    @click.argument("overrides", nargs=-1, metavar="[key=value ...]")
    @click.option("--print-config", is_flag=True, help="Print the merged config, and stop.")
    @click.option("--dry-run", is_flag=True, help="Build everything, show it, and stop.")
    @click.option(
        "--traceback", "wants_traceback", is_flag=True, help="Show where errors come from."
    )
    def command(
        config: str,
        overrides: tuple[str, ...],
        print_config: bool,
        dry_run: bool,
        wants_traceback: bool,
    ) -> int:
        from boltmesh.rank import Rank

        rank = Rank.enter()
        rank.wants_traceback = wants_traceback
        if print_config:
            return rank.execute(lambda: _print_config(config, overrides))
        if dry_run:
            return rank.execute(lambda: _show(verb, config, overrides, rank))
        return rank.execute(lambda: _start(verb, config, overrides, rank))

    boltmesh.command(verb, help=f"{summary}\n\n{CONFIG_HELP}")(command)


_run_command("fit", "Train.")
_run_command("validate", "Run the validation data through a checkpoint.")
_run_command("test", "Run the test data through a checkpoint.")
_run_command("predict", "Write the predictions of a checkpoint, one file per rank.")


@boltmesh.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@click.option("--steps", type=click.IntRange(min=1), default=4, help="Optimizer steps. [4]")
@click.option("--traceback", "wants_traceback", is_flag=True, help="Show where errors come from.")
def check(config: str, overrides: tuple[str, ...], steps: int, wants_traceback: bool) -> int:
    """Compare this layout with one process, and name the first difference.

    Trains both for a few optimizer steps on the same data. Exit code 1 when they differ.
    """
    from boltmesh.rank import Rank

    rank = Rank.enter()
    rank.wants_traceback = wants_traceback

    def work() -> int:
        from boltmesh.check import check as compare

        return compare(config, overrides, steps=steps, rank=rank)

    return rank.execute(work)


@boltmesh.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@click.option("--strategy", metavar="NAME", help="Show one in detail, for example zero3_nvme.")
@click.option(
    "--devices", type=click.IntRange(min=1), help="Ranks of a node. [trainer.devices of CONFIG]"
)
@click.option("--size", metavar="NAME", help="Size of the GPT that comes along: 125M to 175B.")
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    help="YAML file with what was measured of the machines: says what fits, and the least time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    config: str,
    overrides: tuple[str, ...],
    strategy: str | None,
    devices: int | None,
    size: str | None,
    cluster: Path | None,
    as_json: bool,
) -> int:
    """Predict the memory and the traffic of every ZeRO stage and offload, or a pipeline's stages.

    Nothing is built: the devices, and the memory, need not be here. Of a config with a pipeline,
    or with --strategy pipeline, the stages with their cost and memory, and the expected bubble,
    or with --strategy tensor, what each rank keeps of which matrix.
    """
    from boltmesh.plan import plan as predict

    _see_working_directory()
    return predict(
        config,
        overrides,
        strategy=strategy,
        devices=devices,
        size=size,
        cluster=cluster,
        as_json=as_json,
    )


@boltmesh.command()
@click.argument("name")
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    required=True,
    metavar="P",
    help="Ranks of the pipeline, each with --stages-per-rank stages.",
)
@click.option("--microbatches", type=click.IntRange(min=1), required=True, metavar="M")
@click.option(
    "--stages-per-rank",
    type=click.IntRange(min=1),
    metavar="V",
    help="[1, or 2 where the schedule is made for several]",
)
@click.option(
    "--forward",
    type=click.FloatRange(min=0.0, min_open=True),
    default=1.0,
    help="Time of one stage for one microbatch, in any unit. [1]",
)
@click.option(
    "--backward",
    type=click.FloatRange(min=0.0, min_open=True),
    default=2.0,
    help="The same; half of it for the input's gradient, half for the weights'. [2]",
)
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def schedule(
    name: str,
    stages: int,
    microbatches: int,
    stages_per_rank: int | None,
    forward: float,
    backward: float,
    ascii_only: bool,
    as_json: bool,
) -> int:
    """Draw one step of a pipeline schedule, its bubble, and what it keeps.

    NAME is gpipe, 1f1b, looped_bfs, interleaved_1f1b, zero_bubble, zbv, dualpipev or pipedream_2bw.
    Stages are taken as equal, and transfers as free.
    """
    from boltmesh.schedule import schedule as draw

    return draw(
        name,
        stages=stages,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        forward=forward,
        backward=backward,
        ascii_only=ascii_only,
        as_json=as_json,
    )


@boltmesh.command()
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Print a summary, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line for each look.")
@click.option("--demo", is_flag=True, help="Show a made-up job.")
@click.option("--replay", type=click.Path(path_type=Path), help="Show a recording.")
@click.option(
    "--at",
    "at_s",
    type=click.FloatRange(min=0.0),
    help="Moment of the recording, in seconds from its beginning.",
)
@click.option("--on-alert", metavar="COMMAND", help="Run a command for each alert.")
@click.option(
    "--ssh",
    metavar="HOST",
    multiple=True,
    help="Watch a job there, over your own ssh; again for each further host of the same job.",
)
@REMOTE_COMMAND
@click.option("--no-mouse", is_flag=True, help="Leave the mouse to the terminal.")
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII.")
@click.option("--theme", help="night, day, terminal or mono.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where jobs keep telemetry.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    help="Seconds between two looks. [1; 2 over ssh]",
)
def top(
    job: str | None,
    once: bool,
    as_json: bool,
    demo: bool,
    replay: Path | None,
    at_s: float | None,
    on_alert: str | None,
    ssh: tuple[str, ...],
    remote_command: str | None,
    no_mouse: bool,
    ascii_only: bool,
    theme: str | None,
    run_dir: Path | None,
    interval_s: float | None,
) -> int:
    """Watch a running job, or look back at one that has ended.

    JOB is an id, the beginning of one, or the folder of a job; without it the running one.
    """
    from boltmesh.tui.commands.top import top as show

    return show(
        job,
        once=once,
        as_json=as_json,
        demo=demo,
        replay=replay,
        at_s=at_s,
        on_alert=on_alert,
        ssh=ssh,
        remote_command=remote_command,
        has_mouse=not no_mouse,
        ascii_only=ascii_only,
        theme=theme,
        run_dir=run_dir,
        interval_s=interval_s,
    )


@boltmesh.command()
@click.argument("words", nargs=-1, required=True, metavar="[JOB] FILE")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    help="Seconds between two frames. [1]",
)
@click.option(
    "--for", "for_s", type=click.FloatRange(min=0.1), help="Stop after this many seconds."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where jobs keep telemetry.")
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


@boltmesh.command("export-metrics")
@click.argument("job", required=False)
@click.option("--format", "form", default="prometheus", help="prometheus or csv. [prometheus]")
@click.option("--table", help="Of CSV: steps, metrics, collectives, ranks or offload. [steps]")
@click.option("--output", type=click.Path(path_type=Path), help="Write a file, whole or not.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    help="Write it again every so many seconds, until the job ends.",
)
@click.option("--replay", type=click.Path(path_type=Path), help="Take a recording.")
@click.option(
    "--at",
    "at_s",
    type=click.FloatRange(min=0.0),
    help="Moment of the recording, in seconds from its beginning. [its end]",
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where jobs keep telemetry.")
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
    """Write a job's figures as Prometheus text or as CSV.

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


@boltmesh.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--ssh", metavar="HOST", help="List the jobs there, over your own ssh.")
@REMOTE_COMMAND
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where jobs keep telemetry.")
def jobs(
    as_json: bool,
    ssh: str | None,
    remote_command: str | None,
    ascii_only: bool,
    run_dir: Path | None,
) -> int:
    """List your jobs on this host: alive, finished, failed and crashed."""
    from boltmesh.tui.commands.jobs import jobs as show

    return show(
        as_json=as_json,
        ssh=ssh,
        remote_command=remote_command,
        ascii_only=ascii_only,
        run_dir=run_dir,
    )


@boltmesh.command()
@click.argument("job", required=False)
@click.option("--list", "wants_list", is_flag=True, help="Write one frame that lists your jobs.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where jobs keep telemetry.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    help="Seconds between two frames. [1]",
)
def stream(job: str | None, wants_list: bool, run_dir: Path | None, interval_s: float) -> int:
    """Write a job's telemetry to stdout, for 'boltmesh top --ssh' on another host.

    Ends when stdin or stdout is closed. JOB is chosen as by 'boltmesh top'.
    """
    from boltmesh.tui.recording.stream import stream as write

    return write(job, wants_list=wants_list, run_dir=run_dir, interval_s=interval_s)


def _print_config(config: str, overrides: Sequence[str]) -> int:
    from omegaconf import OmegaConf

    from boltmesh.configs.load import load

    print(OmegaConf.to_yaml(load(config, overrides)), end="")
    return 0


def _see_working_directory() -> None:
    """As `python -m` has it: a config can name code that lies in the working directory."""
    if str(Path.cwd()) not in {str(Path(each).absolute()) for each in sys.path}:
        sys.path.insert(0, str(Path.cwd()))


def _prepare(
    verb: Verb, config: str, overrides: Sequence[str], *, for_show: bool
) -> tuple["DictConfig", "Placement", str]:
    """The config, where its ranks run, and what errors call it."""
    from boltmesh.configs.load import find, load
    from boltmesh.preflight import check_config

    _see_working_directory()
    loaded, source = load(config, overrides), str(find(config))
    placement = check_config(loaded, source=source, is_fit=verb == "fit", for_show=for_show)
    return loaded, placement, source


def _show(verb: Verb, config: str, overrides: Sequence[str], rank: "Rank") -> int:
    loaded, placement, source = _prepare(verb, config, overrides, for_show=True)

    from boltmesh.run import RunBuilder, describe
    from boltmesh.stage_plan import PIPELINE, plan_stages, strategy_section, write_stages
    from boltmesh.tensor_plan import TENSOR, plan_tensor, write_tensor

    built = RunBuilder(loaded, verb, placement, rank, source=source).build(for_show=True)
    print(describe(built, loaded, verb, placement))
    if verb == "fit" and loaded.strategy.name == PIPELINE:
        given = strategy_section(loaded)
        print(f"\n{write_stages(plan_stages(loaded, placement.world_size, given, source=source))}")
    if verb == "fit" and loaded.strategy.name == TENSOR:
        given = strategy_section(loaded)
        made = plan_tensor(loaded, placement.num_local_ranks, given, source=source)
        print(f"\n{write_tensor(made)}")
    return 0


def _start(verb: Verb, config: str, overrides: Sequence[str], rank: "Rank") -> int:
    loaded, placement, source = _prepare(verb, config, overrides, for_show=False)

    from boltmesh.launch import Supervisor, resume_command
    from boltmesh.telemetry.job import ID_VARIABLE, NAME_VARIABLE, new_job_id

    os.environ.setdefault(NAME_VARIABLE, loaded.run.name)
    line = [verb, config, *overrides]
    rank.resume_command = resume_command(line)
    if placement.launcher is None:
        job_id = os.environ.setdefault(ID_VARIABLE, new_job_id())
        if placement.num_local_ranks > 1:
            flag = ["--traceback"] if rank.wants_traceback else []
            return Supervisor(
                [*line, *flag],
                num_ranks=placement.num_local_ranks,
                job_id=job_id,
                wants_traceback=rank.wants_traceback,
            ).run()

    from boltmesh.run import run

    run(loaded, verb, placement, rank, source=source)
    return 0

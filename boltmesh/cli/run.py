"""Commands that train or run a config, or compare it: with one process, between strategies."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from boltmesh.cli.config import CONFIG_HELP, TRACEBACK, see_working_directory, takes_config
from boltmesh.cli.signals import stopped_cleanly
from boltmesh.errors import ConfigError
from boltmesh.process import outlive_readers

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.launch.placement import Placement
    from boltmesh.launch.rank import Rank


Verb = Literal["fit", "validate", "test", "predict"]


def command_of(verb: Verb, summary: str) -> click.Command:
    """Return ``fit``, ``validate``, ``test`` or ``predict``."""

    @takes_config
    @click.option("--print-config", is_flag=True, help="Print the merged config, and stop.")
    @click.option("--dry-run", is_flag=True, help="Build everything, show it, and stop.")
    @TRACEBACK
    def command(
        config: str,
        overrides: tuple[str, ...],
        print_config: bool,
        dry_run: bool,
        wants_traceback: bool,
        restarts: int | None = None,
    ) -> int:
        from boltmesh.launch.rank import Rank

        rank = Rank.attach()
        rank.wants_traceback = wants_traceback
        if restarts is not None:
            overrides = (*overrides, f"run.restarts={restarts}")
        if print_config:
            return rank.run(lambda: _print_config(config, overrides))
        if dry_run:
            return rank.run(lambda: _show(verb, config, overrides, rank))
        return rank.run(lambda: _start(verb, config, overrides, rank))

    if verb == "fit":
        command = _RESTARTS(command)
    return click.command(verb, help=f"{summary}\n\n{CONFIG_HELP}")(command)


_RESTARTS = click.option(
    "--restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start the ranks again after a failure, up to N times, from the newest whole checkpoint "
    "of the run. [run.restarts of the config: 0]",
)


@click.command()
@takes_config
@click.option("--steps", type=click.IntRange(min=1), default=4, help="Optimizer steps. [4]")
@TRACEBACK
def check(config: str, overrides: tuple[str, ...], steps: int, wants_traceback: bool) -> int:
    """Compare this layout with one process, and name the first difference.

    Trains both for a few optimizer steps on the same data. Exit code 1 when they differ.
    """
    from boltmesh.launch.rank import Rank

    rank = Rank.attach()
    rank.wants_traceback = wants_traceback

    def work() -> int:
        from boltmesh.check.command import check as compare

        return compare(config, overrides, steps=steps, rank=rank)

    return rank.run(work)


def _print_config(config: str, overrides: Sequence[str]) -> int:
    from omegaconf import OmegaConf

    from boltmesh.configs.load import load

    print(OmegaConf.to_yaml(load(config, overrides)), end="")
    return 0


def _prepare(
    verb: Verb, config: str, overrides: Sequence[str], *, for_show: bool
) -> tuple["DictConfig", "Placement", str]:
    """The config, the placement of its ranks, and its name in errors."""
    from boltmesh.configs.load import load, source_named
    from boltmesh.preflight import check_config

    see_working_directory()
    loaded, source = load(config, overrides), source_named(config, overrides)
    placement = check_config(loaded, source=source, is_fit=verb == "fit", for_show=for_show)
    return loaded, placement, source


def _show(verb: Verb, config: str, overrides: Sequence[str], rank: "Rank") -> int:
    loaded, placement, source = _prepare(verb, config, overrides, for_show=True)

    from boltmesh.plan.command import CONTEXT, DIVIDING, EXPERT, plan_divided
    from boltmesh.plan.strategy_options import as_mapping
    from boltmesh.run import RunBuilder, describe
    from boltmesh.strategies.cost_model.step_time import Machine

    built = RunBuilder(loaded, verb, placement, rank, source=source).build(for_show=True)
    print(describe(built, loaded, verb, placement))
    if verb != "fit":
        return 0
    given, name = as_mapping(loaded.strategy), loaded.strategy.name
    planned = [EXPERT] if name != EXPERT and given.get("expert") is not None else []
    if name in DIVIDING and name != CONTEXT:  # its step may need a run to be counted
        planned.append(name)
    for each in planned:
        per_node = placement.num_local_ranks
        plan = plan_divided(each, loaded, per_node, given, Machine(), source, as_json=False)
        print(f"\n{plan}")
    return 0


def _start(verb: Verb, config: str, overrides: Sequence[str], rank: "Rank") -> int:
    outlive_readers()
    loaded, placement, source = _prepare(verb, config, overrides, for_show=False)

    from boltmesh.launch.supervisor import Supervisor, resume_command
    from boltmesh.telemetry.job import ID_VARIABLE, NAME_VARIABLE, new_job_id

    os.environ.setdefault(NAME_VARIABLE, loaded.run.name)
    line = [verb, config, *overrides]
    rank.resume_command = resume_command(line)
    restarts = loaded.run.restarts if verb == "fit" else 0
    if placement.launcher is None:
        job_id = os.environ.setdefault(ID_VARIABLE, new_job_id())
        if placement.num_local_ranks > 1 or restarts:
            flag = ["--traceback"] if rank.wants_traceback else []

            def supervisor(variables: Mapping[str, str]) -> Supervisor:
                return Supervisor(
                    [*line, *flag],
                    num_ranks=placement.num_local_ranks,
                    job_id=job_id,
                    wants_traceback=rank.wants_traceback,
                    variables=variables,
                )

            from boltmesh.launch.restarts import Restarts
            from boltmesh.run_folder import newest_step
            from boltmesh.strategies.checkpoint.host_memory import forget_run

            job = Restarts(restarts, supervisor, newest_step) if restarts else supervisor({})
            try:
                return job.run()
            finally:
                if job.run_folder is not None:
                    forget_run(job.run_folder)
    elif restarts and not rank.is_supervised:
        raise ConfigError(_refuse_restarts(restarts, placement.launcher.name))

    from boltmesh.run import run

    run(loaded, verb, placement, rank, source=source)
    return 0


def _refuse_restarts(restarts: int, launcher: str) -> str:
    own = "queue the job again (sbatch --requeue)" if launcher == "srun" else "start them again"
    if launcher == "torchrun":
        own = f"torchrun --max-restarts={restarts}"
    return (
        f"run.restarts={restarts} is for ranks that boltmesh fit starts, and {launcher} has "
        f"started these. Set run.restarts=0 and resume=auto, and use {own}."
    )


@click.command()
@takes_config
@click.option(
    "--strategies",
    required=True,
    metavar="A,B,C",
    help="Names such as bolt_ddp; NAME+KEY=VALUE gives an argument, or with a point in KEY any "
    "key of the config; NAME:no_p2p runs with peer-to-peer switched off; one_process; replicated.",
)
@click.option("--steps", type=click.IntRange(min=1), default=20, help="Optimizer steps. [20]")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=5, help="Steps before that do not count. [5]"
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=1, help="Runs of each, back and forth. [1]"
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write OUTPUT.md and OUTPUT.csv as well.",
)
def bench(
    config: str,
    overrides: tuple[str, ...],
    strategies: str,
    steps: int,
    warmup: int,
    rounds: int,
    output: Path | None,
) -> int:
    """Run the same model and data under several strategies, and compare them in one table.

    Each runs as a job of its own. One that is refused or fails has a row with the reason. Losses
    are compared if the data are distributed in the same way.
    """
    from boltmesh.advisor.tune import planned_variants
    from boltmesh.bench.command import bench as compare

    see_working_directory()
    with stopped_cleanly():
        return compare(
            config,
            overrides,
            strategies=strategies,
            steps=steps,
            warmup=warmup,
            rounds=rounds,
            output=output,
            plan=planned_variants,
        )

"""The comparison of strategies."""

from pathlib import Path

import click

from boltmesh.cli.config import see_working_directory, takes_config
from boltmesh.cli.signals import stopped_cleanly


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
    of those that share the data alike are compared.
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

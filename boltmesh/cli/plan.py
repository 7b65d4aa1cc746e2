"""Commands that train nothing: predictions of a config or a schedule, and facts of this host."""

from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from boltmesh.cli.config import NumberRange, see_working_directory, takes_config
from boltmesh.cli.signals import stopped_cleanly
from boltmesh.errors import ConfigError

MOST_DEVICES = 2**20


@click.command("plan auto")
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@click.option(
    "--model",
    help="In place of CONFIG: llama3-70b, the path of a config.json, or sizes: 'layers=70 …'.",
)
@click.option("--gpu", help="For example h100-80gb. [the devices that are here]")
@click.option(
    "--devices", type=click.IntRange(1, MOST_DEVICES), help="In all nodes. [trainer.devices]"
)
@click.option("--nodes", type=click.IntRange(min=1), help="[as many as usual for the GPU]")
@click.option("--network", metavar="8x400", help="Links of a node x Gbit/s. [usual for the GPU]")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences of a step. [4 M tokens]")
@click.option("--seq", type=click.IntRange(min=1), help="Tokens of a sequence. [of the model]")
@click.option("--dtype", type=click.Choice(["bf16", "fp8", "fp4"]), help="[bf16]")
@click.option("--top", "count", type=click.IntRange(1, 20), default=3, help="Layouts to show. [3]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan_auto(config: str | None, overrides: tuple[str, ...], **given: Any) -> int:
    """Choose a layout: the fastest that fit, with their time and memory by part, and why.

    The model of a CONFIG runs once on tensors without data, and every layout is printed as
    the command that starts it. With --model sizes are enough, and nothing is built or run. See
    docs/planner.md for both and for their errors.
    """
    if config is None:
        if given["model"] is None:
            raise ConfigError(
                "boltmesh plan auto needs a CONFIG, or --model MODEL --gpu NAME --devices N."
            )
        lacking = [each for each in ("gpu", "devices") if given[each] is None]
        if lacking:
            options = {"gpu": "--gpu h100-80gb", "devices": "--devices 8"}
            raise ConfigError(
                f"--model {given['model']} is planned for devices that are named: add "
                f"{' '.join(options[each] for each in lacking)}, or others."
            )
        from boltmesh.planner.command import plan_auto as choose

        return choose(**{**given, "dtype": given["dtype"] or "bf16"})
    if given["model"] is not None and "=" in config:
        raise ConfigError(
            f"{config} changes a CONFIG, and --model has none. Leave {config} out; sizes of a "
            f"model are one argument: --model 'layers=12 hidden=768 heads=12 vocab=50257 seq=1024'."
        )
    for option in ("model", "batch", "seq", "dtype"):
        if given.pop(option) is not None:
            raise ConfigError(
                f"--{option} is of plans by --model, and {config} has a model and batches of its "
                f"own. Leave --{option} out, or CONFIG."
            )
    from boltmesh.advisor.command import plan_config

    see_working_directory()
    return plan_config(config, overrides, **given)


class _PlanCommand(click.Command):
    """``boltmesh plan auto`` is a command of its own; everything else is a config."""

    @override
    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] == ["auto"]:
            return plan_auto.make_context("plan auto", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_PlanCommand)
@takes_config
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
    """Predict the memory and the traffic of every ZeRO stage and offload, or of a mesh.

    Nothing is built: the devices, and the memory, need not be here. With a pipeline in the config,
    or --strategy pipeline, it prints the stages with their cost and memory, and the expected
    bubble; with --strategy tensor what each rank keeps of which matrix; with --strategy 3d all axes
    together: the mesh, memory by kind, stages, and bytes of a step by axis. Arguments of that
    strategy are given as strategy.KEY=VALUE.

    boltmesh plan auto CONFIG chooses the layout itself.
    """
    from boltmesh.plan.command import plan as predict

    see_working_directory()
    return predict(
        config,
        overrides,
        strategy=strategy,
        devices=devices,
        size=size,
        cluster=cluster,
        as_json=as_json,
    )


@click.command()
@takes_config
@click.option("--gpu", help="For example h100-80gb. [the devices that are here]")
@click.option(
    "--devices", type=click.IntRange(1, MOST_DEVICES), help="In all nodes. [trainer.devices]"
)
@click.option("--nodes", type=click.IntRange(min=1), help="[as many as usual for the GPU]")
@click.option("--network", metavar="8x400", help="Links of a node x Gbit/s. [usual for the GPU]")
def advise(config: str, overrides: tuple[str, ...], **given: Any) -> int:
    """Say in words which layouts fit, which do not, and what to change first.

    Takes the same predictions as boltmesh plan auto CONFIG.
    """
    from boltmesh.advisor.command import advise as say

    see_working_directory()
    return say(config, overrides, **given)


@click.command()
@takes_config
@click.option("--steps", type=click.IntRange(min=1), default=10, help="Steps of each run. [10]")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, help="Steps before that do not count. [3]"
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, help="Runs of each, back and forth. [3]"
)
@click.option("--top", "count", type=click.IntRange(1, 10), default=3, help="Layouts to run. [3]")
@click.option(
    "--memory",
    "memory_gib",
    type=NumberRange(min=0.0, min_open=True),
    metavar="GIB",
    help="That a rank may take. [its share of the host, all of a GPU]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(config: str, overrides: tuple[str, ...], **given: Any) -> int:
    """Run the best layouts of boltmesh plan auto for some steps each, and name the fastest.

    Measures the rates of the devices that are here, and remembers them for later plans.
    """
    from boltmesh.advisor.tune import tune as measure

    see_working_directory()
    with stopped_cleanly():
        return measure(config, overrides, **given)


@click.command()
@click.argument("name", required=False)
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    default=4,
    metavar="P",
    help="Ranks of the pipeline, each with --stages-per-rank stages. [4]",
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    metavar="M",
    help="Microbatches of one optimizer step. [two for each rank]",
)
@click.option(
    "--stages-per-rank",
    type=click.IntRange(min=1),
    metavar="V",
    help="[1, or 2 where the schedule is made for several]",
)
@click.option(
    "--forward",
    type=NumberRange(min=0.0, min_open=True),
    default=1.0,
    help="Time of one stage for one microbatch, in any unit. [1]",
)
@click.option(
    "--backward",
    type=NumberRange(min=0.0, min_open=True),
    default=2.0,
    help="The same; half of it for the input's gradient, half for the weights'. [2]",
)
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def schedule(
    name: str | None,
    stages: int,
    microbatches: int | None,
    stages_per_rank: int | None,
    forward: float,
    backward: float,
    ascii_only: bool,
    as_json: bool,
) -> int:
    """Draw one step of a pipeline schedule, its bubble, and what is kept in memory.

    Without NAME, list the schedules. Stages are taken as equal, and transfers as free.
    """
    from boltmesh.plan.schedule import list_schedules
    from boltmesh.plan.schedule import schedule as draw

    if name is None:
        return list_schedules(as_json=as_json)
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


@click.command()
@click.option(
    "--offload-path",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Also test a disk for strategy.offload_path: one small file is written and read there.",
)
@click.option("--ascii", "ascii_only", is_flag=True, help="Print with ASCII.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(offload_path: Path | None, ascii_only: bool, as_json: bool) -> int:
    """Print versions, devices, links, disks and limits of this host, and what will work on it.

    Takes less than ten seconds. Add its output to an issue report.
    """
    from boltmesh.doctor.command import doctor as report

    return report(offload_path=offload_path, as_json=as_json, ascii_only=ascii_only)

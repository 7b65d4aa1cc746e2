"""The expected pipeline: its stages, what each rank keeps, and its bubble.

``boltmesh plan`` and ``boltmesh fit --dry-run`` print it. The bubble is simulated from the
schedule that will run, with the counted cost of each stage; transfers take no time in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from boltmesh.configs.advice import located
from boltmesh.errors import ConfigError
from boltmesh.plan.strategy_options import class_of, optimizer_copies
from boltmesh.plan.text import align, size_text
from boltmesh.schedule_sim import NOMINAL, Action, peaks_by_stage
from boltmesh.strategies.pipeline.schedules.registry import simulate_ideal

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.plan.stage_model import PipelineModel

PIPELINE = "bolt_pipeline"


@dataclass(frozen=True)
class StageRow:
    """One stage."""

    stage: int
    rank: int
    units: tuple[str, ...]
    parameters: int
    cost_share: float
    """Share of the floating point operations of a step, and of parameters that are looked up."""
    in_flight: int
    """Microbatches whose activations it keeps at once at most."""


@dataclass(frozen=True)
class RankRow:
    """One rank."""

    rank: int
    kept_bytes: int
    """Parameters, gradients and optimizer state, between steps."""
    activation_bytes: int | None
    """At most; None if the bytes of a microbatch are unknown."""
    idle: float
    """Share of the common window."""


@dataclass(frozen=True)
class StagePlanSummary:
    """A pipeline before it runs."""

    model: str
    schedule: str
    rows: tuple[int, ...]
    """Rows of each microbatch."""
    stages: tuple[StageRow, ...]
    ranks: tuple[RankRow, ...]
    bubble: float
    """Expected, of these stages: idle over total, in the mean over the ranks."""
    even_bubble: float
    """The same, were all stages equal."""
    notes: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {"schema": 1, "pipeline": asdict(self)}


def plan_stages(
    config: "DictConfig", num_ranks: int, given: Mapping[str, Any], *, source: str
) -> StagePlanSummary:
    """Cut a config's model as the strategy's arguments say, and compute its cost.

    Raises:
        ConfigError: When model or data cannot be cut, or options do not fit.
    """
    from boltmesh.plan.stage_model import describe_stages
    from boltmesh.strategies.pipeline.options import PipelineOptions

    known = {each.name for each in fields(PipelineOptions)}
    try:
        options = PipelineOptions(**{key: each for key, each in given.items() if key in known})
        stages = num_ranks if options.stages is None else options.stages
        options.num_stages(stages)
    except ConfigError as error:
        raise ConfigError(f"{source}: strategy: {error}") from error
    if num_ranks % stages:
        raise ConfigError(
            f"{located(source, 'strategy.stages')}={stages} was asked of a job with {num_ranks} "
            f"ranks. Set strategy.stages=null, or plan for {stages} ranks with --devices {stages}."
        )
    made, optimizer, found = describe_stages(config, options, stages, source=source)
    copies, notes = optimizer_copies(config, *class_of(optimizer))
    if num_ranks > stages:
        count = num_ranks // stages
        notes = (*notes, f"{count} such pipelines, each with batches of its own")
    return plan_of(made, copies, (*found, *notes))


def plan_of(made: "PipelineModel", copies: int, notes: tuple[str, ...]) -> StagePlanSummary:
    """Simulate the schedule of a model that was cut, with the costs of its stages."""
    table = made.table
    mean = sum(each.cost for each in made.stages) / len(made.stages)
    even = simulate_ideal(table)

    def seconds(action: Action) -> float:
        return NOMINAL.seconds(action) * (made.stages[action.stage].cost / mean if mean else 1.0)

    own = simulate_ideal(table, seconds)
    peaks = peaks_by_stage(table.order)
    ranks = []
    for rank, held in enumerate(made.ranks):
        live = [
            None if (size := made.stages[stage].activation_bytes) is None else size * peaks[stage]
            for stage in table.stages_of(rank)
        ]
        known = [each for each in live if each is not None]
        ranks.append(
            RankRow(
                rank=rank,
                kept_bytes=held.parameter_bytes + held.trained_bytes * (1 + copies),
                activation_bytes=sum(known) if len(known) == len(live) else None,
                idle=own.idle_shares[rank],
            )
        )
    return StagePlanSummary(
        model=made.name,
        schedule=table.name,
        rows=made.rows,
        stages=tuple(
            StageRow(
                stage=number,
                rank=table.rank_of_stage[number],
                units=each.units,
                parameters=each.parameters,
                cost_share=each.cost / (mean * len(made.stages)) if mean else 0.0,
                in_flight=peaks[number],
            )
            for number, each in enumerate(made.stages)
        ),
        ranks=tuple(ranks),
        bubble=own.bubble,
        even_bubble=even.bubble,
        notes=notes,
    )


def write_stages(plan: StagePlanSummary) -> str:
    """Two tables, of the stages and of the ranks, and the bubble."""
    sizes = sorted(set(plan.rows))
    rows = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    stages, ranks = plan.stages, plan.ranks
    activations = [each.activation_bytes for each in ranks]
    title = (
        f"{plan.model} in {len(stages)} stages on {len(ranks)} ranks: {plan.schedule}, "
        f"{len(plan.rows)} microbatches of {rows} rows"
    )
    return "\n".join(
        [
            title,
            "",
            *stage_table(stages),
            "",
            *align(
                [
                    ("rank", [str(each.rank) for each in ranks]),
                    ("kept", [size_text(each.kept_bytes) for each in ranks]),
                    ("activations", ["?" if n is None else size_text(n) for n in activations]),
                    ("idle", [f"{100 * each.idle:.1f}%" for each in ranks]),
                ]
            ),
            "",
            bubble_text(plan),
            "kept: parameters, gradients and optimizer state. in flight: microbatches whose",
            "activations a stage keeps at once at most.",
            *(f"{each}." for each in plan.notes),
        ]
    )


def stage_table(stages: Sequence[StageRow]) -> list[str]:
    """Return a line for each stage."""
    return align(
        [
            ("stage", [str(each.stage) for each in stages]),
            ("rank", [str(each.rank) for each in stages]),
            ("parameters", [f"{each.parameters:,}" for each in stages]),
            ("cost", [f"{100 * each.cost_share:.1f}%" for each in stages]),
            ("in flight", [str(each.in_flight) for each in stages]),
        ],
        ("layers", [_range(each.units) for each in stages]),
    )


def bubble_text(plan: StagePlanSummary) -> str:
    """Return the expected bubble in a sentence."""
    return (
        f"expected bubble {100 * plan.bubble:.1f}% of the time, and "
        f"{100 * plan.even_bubble:.1f}% were all stages equal; transfers take no time in it."
    )


def _range(units: tuple[str, ...]) -> str:
    if len(units) <= 3:
        return ", ".join(units)
    return f"{units[0]} ... {units[-1]} ({len(units)})"

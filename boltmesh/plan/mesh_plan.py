"""Expected stages, memory and traffic of a job on a mesh of several axes, before a rank is started.

``write_mesh`` is the text that ``boltmesh plan`` and ``boltmesh fit --dry-run`` print.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from boltmesh.axes import divisors
from boltmesh.errors import BoltMeshError, LayoutError
from boltmesh.plan.stage_plan import StagePlanSummary, bubble_text, plan_of, stage_table
from boltmesh.plan.strategy_options import (
    AUTO_NOTE,
    as_mapping,
    copies_note,
    float8_note,
    offload_error,
    trainer_reads_gradients,
)
from boltmesh.plan.text import align, size_text
from boltmesh.strategies.cost_model.memory import MemoryEstimate, copied_bytes
from boltmesh.strategies.cost_model.model import Bytes, widths_of
from boltmesh.strategies.cost_model.step_time import Machine
from boltmesh.strategies.mesh import AXES, MeshLayout, fit_layout
from boltmesh.strategies.registry import STRATEGIES
from boltmesh.strategy_arguments import check_strategy_arguments
from boltmesh.telemetry.snapshot import MEMORY_PLACES

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.plan.mesh_rank import MeshJob
    from boltmesh.plan.tensor_plan import TensorSummary
    from boltmesh.strategies.data_parallel.expected_traffic import ExtraTraffic
    from boltmesh.telemetry.traffic import ExpectedTraffic

SEVERAL_AXES = "bolt_3d"
_SHOWN_RANKS = 8
"""Most ranks of a group that are printed; of a longer group, the first and the last."""


@dataclass(frozen=True)
class PlaceRow:
    """The ranks at one place of the pipeline and context axes, which hold and move the same."""

    ranks: tuple[int, ...]
    parameters: int
    """Elements of its stages, and of their layers its part; before the data axis."""
    memory: MemoryEstimate
    activation_bytes: int | None
    """Kept for backward passes at most; None if it is not known."""
    idle: float | None
    """Share of the common window; None without a pipeline."""
    traffic: tuple["ExpectedTraffic", ...]
    """Traffic of an optimizer step, on one of them."""
    too_large: tuple[str, ...]
    """Places that have less memory than this needs."""
    extra: "ExtraTraffic | None"
    """Additional traffic of ZeRO-2 and 3 beside a pipeline."""

    def as_data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        kept = {kind: asdict(each) for kind, each in self.memory.kept.items()}
        return {
            "ranks": list(self.ranks),
            "parameters": self.parameters,
            "between_steps": {**kept, "total": asdict(self.memory.between_steps)},
            "activations": self.activation_bytes,
            "peak": asdict(self.memory.peak),
            "peak_moment": self.memory.peak_moment,
            "moments": self.memory.moments,
            "idle": self.idle,
            "traffic": [
                {
                    "axis": each.axis,
                    "operator": each.operator,
                    "calls": each.calls,
                    "bytes": each.payload_bytes,
                    "why": each.why,
                }
                for each in self.traffic
            ],
            "too_large": list(self.too_large),
        }


@dataclass(frozen=True)
class MeshPlan:
    """A job on a mesh before it runs."""

    model: str
    parameters: int
    """Elements of the whole model."""
    layout: MeshLayout
    zero_stage: int
    num_batches: int
    """In an optimizer step."""
    num_microbatches: int
    """Parts of a batch; 1 without a pipeline."""
    places: tuple[PlaceRow, ...]
    pipeline: StagePlanSummary | None
    tensor: "TensorSummary | None"
    is_on_host: bool
    notes: tuple[str, ...]

    @property
    def extra(self) -> "ExtraTraffic | None":
        """Additional traffic of ZeRO-2 and 3 beside a pipeline, on the rank that has most."""
        found = [each.extra for each in self.places if each.extra is not None]
        return max(found, key=lambda each: each.batch_bytes, default=None)

    def as_data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        extra = None
        if self.extra is not None:
            extra = {
                **asdict(self.extra),
                "step_bytes": self.extra.step_bytes,
                "microbatch_bytes": self.extra.per_microbatch(self.num_microbatches),
            }
        return {
            "schema": 1,
            "mesh": {
                "model": self.model,
                "parameters": self.parameters,
                "sizes": self.layout.sizes,
                "groups": {axis: self.layout.groups(axis) for axis in self.layout.sizes},
                "zero_stage": self.zero_stage,
                "batches": self.num_batches,
                "microbatches": self.num_microbatches,
                "places": [each.as_data() for each in self.places],
                "pipeline": None if self.pipeline is None else asdict(self.pipeline),
                "tensor": None if self.tensor is None else asdict(self.tensor),
                "extra_over_zero1": extra,
                "is_on_host": self.is_on_host,
                "notes": list(self.notes),
            },
        }


def plan_mesh(
    config: "DictConfig",
    ranks_per_host: int,
    given: Mapping[str, Any],
    machine: Machine,
    *,
    source: str,
    is_brief: bool = False,
) -> MeshPlan:
    """Put a config's model on its mesh, and compute its cost.

    Args:
        config: The whole.
        ranks_per_host: Ranks of each host.
        given: Arguments of the strategy.
        machine: Rates and memory of its ranks.
        source: The config's file, for errors.
        is_brief: The figures of the ranks are wanted alone: see ``describe_mesh``.

    Raises:
        ConfigError: When model or data cannot be divided, or options do not fit.
        LayoutError: When sizes do not fit the ranks, with the nearest that do.
    """
    from boltmesh.plan.mesh_model import describe_mesh

    job = _job_of(config, ranks_per_host, given, source)
    made = describe_mesh(config, job, source=source, is_brief=is_brief)
    pipeline = None
    if made.pipeline is not None:
        pipeline = plan_of(made.pipeline, made.state_copies, ())
    notes = [*made.notes]
    if config.trainer.accelerator == "auto":
        notes.append(AUTO_NOTE)
    notes += float8_note(given)
    if job.offload and (pipeline is not None or job.is_selective):
        notes.append("activations are those without activation_offload")
    if any(each.has_unknown_traffic for each in made.ranks):
        notes.append(
            "what the tensor or context axis moves is not known: layers cannot be run without ranks"
        )
    largest = max(made.ranks, key=lambda each: copied_bytes(each.memory.kept, num_hosts=1))
    notes += copies_note(config, given, largest.memory.kept)
    ranks, contexts = sorted(job.layout.groups("data", "tensor")), job.layout.size("context")
    return MeshPlan(
        model=made.name,
        parameters=made.numel,
        layout=job.layout,
        zero_stage=job.sharing.stage,
        num_batches=job.num_batches,
        num_microbatches=1 if pipeline is None else len(pipeline.rows),
        places=tuple(
            PlaceRow(
                ranks=tuple(ranks[at]),
                parameters=each.parameters,
                memory=each.memory,
                activation_bytes=each.activation_bytes,
                idle=None if pipeline is None else pipeline.ranks[at // contexts].idle,
                traffic=each.traffic,
                too_large=machine.places_too_small_for(each.memory.peak),
                extra=each.extra,
            )
            for at, each in enumerate(made.ranks)
        ),
        pipeline=pipeline,
        tensor=made.tensor,
        is_on_host=job.is_on_host,
        notes=tuple(notes),
    )


def _job_of(
    config: "DictConfig", ranks_per_host: int, given: Mapping[str, Any], source: str
) -> "MeshJob":
    """Check options as the strategy does, and find the layout."""
    entry = STRATEGIES[SEVERAL_AXES]
    arguments = {**entry.arguments, **{key: each for key, each in given.items() if key != "name"}}
    names = ("attention", "balance", "max_gather_bytes", "dims", "tile_tokens")
    sequences = {name: arguments[name] for name in names if name in arguments}
    cls = entry.load()
    check_strategy_arguments(cls, arguments, source=source)

    from boltmesh.plan.dry_model import NumberTypes
    from boltmesh.plan.mesh_rank import MeshJob
    from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
    from boltmesh.strategies.context.options import ContextOptions
    from boltmesh.strategies.data_parallel.shard_mesh import choose_shard_size
    from boltmesh.strategies.data_parallel.zero import ZeroAxis
    from boltmesh.strategies.pipeline.options import PipelineOptions, refuse_layout
    from boltmesh.strategies.tensor.expected_traffic import GroupWithoutRanks
    from boltmesh.strategies.tiling.logits import LogitTiling

    trainer, section = config.trainer, as_mapping(config.strategy)
    try:
        strategy = cls(**arguments)
        layout = fit_layout(
            world_size=ranks_per_host * trainer.num_nodes,
            ranks_per_host=ranks_per_host,
            **{axis: arguments[axis] for axis in AXES if axis in arguments},
        )
        divides = layout.size("context") > 1
        recompute = section.get("activation_checkpointing")
        offload = section.get("activation_offload", False)
        ActivationCheckpointing(recompute, bool(offload))  # refuses what a run refuses
        tiling = LogitTiling(section.get("tile_logits"))
        if layout.pipeline * layout.tensor > 1:
            tiling.refuse_division()
        expert = _expert_size(arguments.get("expert"), layout, ranks_per_host)
        stages = PipelineOptions()
        if layout.pipeline > 1:
            stages = strategy.pipeline_axis.options
            stages.num_stages(layout.pipeline)
            refuse_layout(stages, layout)
        shards = strategy.data_axis.options if isinstance(strategy.data_axis, ZeroAxis) else None
        shard_size = layout.data * layout.size("context")
        if shards is not None:
            shard_size = choose_shard_size(
                layout.groups("data", "context")[0], shards.shard_size, ranks_per_host
            )
    except BoltMeshError as error:
        raise type(error)(f"{source}: strategy: {error}") from error
    if shards is not None and shards.has_offload and not _keeps_fp32(trainer.precision):
        raise offload_error(trainer.precision, source)
    return MeshJob(
        layout=layout,
        shard_size=shard_size,
        shards=shards,
        stages=stages,
        layers={
            "plan": strategy.options.plan,
            "sequence_parallel": strategy.options.sequence_parallel,
            "loss_parallel": strategy.options.loss_parallel,
        },
        sequences=ContextOptions(**sequences) if divides else None,
        expert=expert,
        recompute=recompute,
        offload=offload,
        tile_logits=tiling.positions,
        widths=widths_of(trainer.precision),
        types=NumberTypes.of(trainer.precision),
        num_batches=trainer.accumulate_grad_batches,
        has_norm_clipping=bool(trainer.gradient_clip_val)
        and trainer.gradient_clip_algorithm in {None, "norm"},
        has_scaler=trainer.precision == "16-mixed",
        reads_gradients=trainer_reads_gradients(config),
        is_on_host=trainer.accelerator == "cpu",
        group=GroupWithoutRanks.of(0, layout.tensor),
    )


def _expert_size(asked: int | str | None, layout: MeshLayout, ranks_per_host: int) -> int:
    """Return the ranks that have all experts of a stage together.

    Raises:
        LayoutError: If they do not divide the ranks of a stage.
    """
    stage = layout.data * layout.size("context") * layout.tensor
    size = min(ranks_per_host, stage) if asked == "node" else int(asked or 1)
    if stage % size:
        raise LayoutError(
            f"expert={size} does not divide the {stage} ranks of a stage, data x context x tensor. "
            f"Use {' or '.join(map(str, divisors(stage)))}."
        )
    return size


def _keeps_fp32(precision: str) -> bool:
    return precision.endswith("-mixed") or precision == "32-true"


def write_mesh(plan: MeshPlan) -> str:
    """Return tables of the mesh, the stages, memory and traffic, and remarks on them."""
    lines = [_title(plan), "", *_mesh_table(plan)]
    if plan.pipeline is not None:
        stages = plan.pipeline
        rows = f"{min(stages.rows)}" if len(set(stages.rows)) == 1 else f"up to {max(stages.rows)}"
        lines += [
            "",
            f"{stages.schedule}, {len(stages.rows)} microbatches of {rows} rows; parameters and "
            f"cost are of one rank of a tensor group"
            if plan.layout.tensor > 1
            else f"{stages.schedule}, {len(stages.rows)} microbatches of {rows} rows",
            *stage_table(stages.stages),
        ]
    lines += ["", *_memory_table(plan), "", *_traffic_table(plan), ""]
    if plan.pipeline is not None:
        lines.append(bubble_text(plan.pipeline))
    if plan.extra is not None:
        where = "the rank that has most"
        lines.append(f"{plan.extra.sentence(plan.num_microbatches, rank=where)}.")
    lines += _remarks(plan)
    return "\n".join(lines)


def write_memory(plan: MeshPlan) -> str:
    """Return the memory of ranks as text."""
    return "\n".join([*_memory_table(plan), *plan.notes])


def _title(plan: MeshPlan) -> str:
    ranks = plan.layout.world_size
    sharing = "replicas" if plan.zero_stage == 0 else f"ZeRO-{plan.zero_stage}"
    count = f"{plan.parameters:,} parameters on {ranks} rank{'s' if ranks > 1 else ''}"
    return (
        f"{plan.model} with {count}: {plan.layout}, {sharing} over the data axis; "
        f"bytes are of one rank"
    )


def _mesh_table(plan: MeshPlan) -> list[str]:
    sizes = plan.layout.sizes
    groups = {axis: plan.layout.groups(axis) for axis in sizes}
    return align(
        [
            ("axis", list(sizes)),
            ("size", [str(size) for size in sizes.values()]),
            ("groups", [str(len(groups[axis])) for axis in sizes]),
        ],
        ("the first of them", [f"ranks {_numbers(groups[axis][0])}" for axis in sizes]),
    )


def _memory_table(plan: MeshPlan) -> list[str]:
    """A line for each place of the pipeline and each memory that something is in."""
    used = [
        place
        for place in MEMORY_PLACES
        if any(getattr(each.memory.peak, place) for each in plan.places)
    ]
    kinds = ("parameters", "gradients", "optimizer", "buffers")
    rows = [(each, place) for each in plan.places for place in used]
    at_work = "host" if plan.is_on_host else "device"

    def cell(row: PlaceRow, kind: str, place: str) -> str:
        return size_text(getattr(row.memory.kept.get(kind, Bytes()), place))

    def live(row: PlaceRow, place: str) -> str:
        if place != at_work:
            return "-"
        return "?" if row.activation_bytes is None else size_text(row.activation_bytes)

    columns = [
        ("memory of ranks", [_numbers(each.ranks) for each, _ in rows]),
        ("in", [place for _, place in rows]),
        *((kind, [cell(each, kind, place) for each, place in rows]) for kind in kinds),
        ("activations", [live(each, place) for each, place in rows]),
        ("peak", [size_text(getattr(each.memory.peak, place)) for each, place in rows]),
    ]
    if any(each.idle is not None for each in plan.places):
        idle = [f"{100 * (each.idle or 0):.1f}%" for each, _ in rows]
        columns.append(("idle", idle))
    if any(each.too_large for each in plan.places):
        fits = ["no" if place in each.too_large else "yes" for each, place in rows]
        columns.append(("fits", fits))
    return align(columns)


def _traffic_table(plan: MeshPlan) -> list[str]:
    """A line for each axis and operator, the most that a rank moves and the mean over them."""
    found: dict[tuple[str, str], list[ExpectedTraffic]] = {}
    for row in plan.places:
        for each in row.traffic:
            found.setdefault((each.axis, each.operator), []).append(each)
    if not found:
        return ["nothing moves between ranks"]
    order = sorted(found, key=lambda key: (*AXES, key[0]).index(key[0]))
    most = {key: max(found[key], key=lambda each: each.payload_bytes) for key in order}
    mean = {key: sum(each.payload_bytes for each in found[key]) / len(plan.places) for key in order}
    total = {axis: sum(mean[key] for key in order if key[0] == axis) for axis, _ in order}
    lines = align(
        [
            (
                "between ranks in a step",
                [f"  {axis:<9} {operator.strip('_')}" for axis, operator in order],
            ),
            ("calls", [_calls(most[key]) for key in order]),
            ("bytes of a rank", [size_text(round(most[key].payload_bytes)) for key in order]),
            ("mean", [size_text(round(mean[key])) for key in order]),
        ]
    )
    sums = ", ".join(f"{axis} {size_text(round(size))}" for axis, size in total.items())
    return [*lines, f"  a rank moves in the mean: {sums}"]


def _remarks(plan: MeshPlan) -> list[str]:
    moved = (
        "bytes between ranks are of the whole tensor of a collective; calls and bytes of a rank "
        "are those of the rank that has most"
    )
    memory = (
        "memory counts tensors between two steps, and at the fullest moment of one; libraries, the "
        "CUDA context and fragments come on top"
    )
    said = [moved, memory]
    if plan.is_on_host:
        said.append("the ranks compute on the CPU: device and host are one memory")
    if plan.tensor is not None:
        kept = size_text(plan.tensor.rank_bytes), size_text(plan.tensor.whole_bytes)
        said.append(
            f"of layers a rank of a tensor group keeps {kept[0]} of {kept[1]}; boltmesh plan "
            f"--strategy tensor shows which. A run proves that first, and what differs stays whole"
        )
        said += plan.tensor.notes
    return ["", *(f"{each}." for each in [*said, *plan.notes])]


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > _SHOWN_RANKS:
        return f"{ranks[0]} {ranks[1]} {ranks[2]} ... {ranks[-1]}"
    return " ".join(map(str, ranks))


def _calls(traffic: "ExpectedTraffic") -> str:
    return "" if traffic.calls is None else f"{traffic.calls:g}"

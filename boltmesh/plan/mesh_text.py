"""How the plan of a mesh reads: its ranks, its stages, memory by kind, bytes by axis."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from boltmesh.plan.mesh_plan import MeshPlan, PlaceRow
from boltmesh.plan.stage_plan import bubble_text, stage_table
from boltmesh.plan.text import align, size_text
from boltmesh.strategies.cost_model.model import Bytes
from boltmesh.strategies.mesh import AXES

if TYPE_CHECKING:
    from boltmesh.telemetry.traffic import ExpectedTraffic

PLACES = ("device", "host", "disk")
_SHOWN_RANKS = 8
"""Of a group; of a longer one the first and the last."""


def write_mesh(plan: MeshPlan) -> str:
    """Tables of the mesh, of the stages, of memory and of traffic, and what stands beside them."""
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
        place for place in PLACES if any(getattr(each.memory.peak, place) for each in plan.places)
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
        ("memory of ranks", [_span(each) for each, _ in rows]),
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


def _span(row: PlaceRow) -> str:
    return _numbers(row.ranks)


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > _SHOWN_RANKS:
        return f"{ranks[0]} {ranks[1]} {ranks[2]} ... {ranks[-1]}"
    return " ".join(map(str, ranks))


def _calls(traffic: "ExpectedTraffic") -> str:
    return "" if traffic.calls is None else f"{traffic.calls:g}"

"""Text of a plan: a table over all strategies, and one strategy in detail."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from boltmesh.strategies.cost_model.memory import MemoryEstimate
from boltmesh.strategies.cost_model.model import JobShape, ModelShape
from boltmesh.strategies.cost_model.step_time import StepTime
from boltmesh.strategies.cost_model.traffic import OperatorBytes
from boltmesh.telemetry.snapshot import MEMORY_PLACES


@dataclass(frozen=True)
class StrategyRow:
    """Memory, traffic and time of one strategy."""

    name: str
    is_own: bool
    """It is the config's own, with its options."""
    memory: MemoryEstimate
    traffic: list[OperatorBytes]
    time: StepTime
    too_large: tuple[str, ...]
    """Places that have less memory than this needs."""

    def as_data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        kept = {kind: asdict(each) for kind, each in self.memory.kept.items()}
        return {
            "name": self.name,
            "is_own": self.is_own,
            "between_steps": {**kept, "total": asdict(self.memory.between_steps)},
            "peak": asdict(self.memory.peak),
            "peak_moment": self.memory.peak_moment,
            "traffic": [asdict(each) for each in self.traffic],
            "seconds": asdict(self.time),
            "least_seconds": self.time.least_s,
            "too_large": list(self.too_large),
        }


def write_table(
    model: ModelShape, job: JobShape, rows: Sequence[StrategyRow], notes: Sequence[str]
) -> str:
    """All strategies, a line each; the columns are those that say something."""
    columns: list[tuple[str, list[str]]] = [
        ("strategy", [f"{'*' if row.is_own else ' '} {_short(row.name)}" for row in rows])
    ]
    peaks = [row.memory.peak for row in rows]
    kept = [row.memory.between_steps for row in rows]
    for place in MEMORY_PLACES:
        if any(getattr(each, place) for each in peaks):
            if place != "disk" and (place == "device" or job.is_on_host):
                for when, sizes in (("kept", kept), ("peak", peaks)):
                    cells = [size_text(getattr(each, place)) for each in sizes]
                    columns.append((f"{place}, {when}", cells))
            else:
                columns.append((place, [size_text(getattr(each, place)) for each in peaks]))
    columns.append(("sent a step", [size_text(_sent(row)) for row in rows]))
    if any(row.time.least_s is not None for row in rows):
        columns.append(("least time", [_time(row.time) for row in rows]))
    if any(row.too_large for row in rows):
        fits = [f"no: {' and '.join(row.too_large)}" if row.too_large else "yes" for row in rows]
        columns.append(("fits", fits))
    return "\n".join(
        [
            _title(model, job),
            *align(columns),
            *_remarks(model, job, notes, has_own=any(row.is_own for row in rows)),
        ]
    )


def write_row(model: ModelShape, job: JobShape, row: StrategyRow, notes: Sequence[str]) -> str:
    """One strategy: each kind of memory, each moment, each operator."""
    kinds = [*row.memory.kept.items(), ("all kept", row.memory.between_steps)]
    kinds.append(("peak", row.memory.peak))
    columns = [("between steps", [f"  {kind}" for kind, _ in kinds])]
    columns += [
        (place, [size_text(getattr(each, place)) for _, each in kinds])
        for place in MEMORY_PLACES
        if any(getattr(each, place) for _, each in kinds)
    ]
    lines = [_title(model, job, _short(row.name)), *align(columns), ""]
    where = "host" if job.is_on_host else "device"
    moments = list(row.memory.moments.items())
    words = [f"  {name}{' (the peak)' if name == row.memory.peak_moment else ''}"
             for name, _ in moments]  # fmt: skip
    lines += align([(f"on the {where} in a step", words), ("", [size_text(b) for _, b in moments])])
    if row.traffic:
        lines += ["", *align(_traffic_columns(row.traffic))]
    known = asdict(row.time)
    if any(known.values()):
        names = [f"  {name.removesuffix('_s')}" for name in known]
        values = ["?" if each is None else f"{each:.3g} s" for each in known.values()]
        lines += ["", *align([("time of each part", names), ("at least", values)])]
    for place in row.too_large:
        lines.append(f"needs more than the {place} has")
    return "\n".join([*lines, *_remarks(model, job, notes, has_own=False)])


def _traffic_columns(traffic: Sequence[OperatorBytes]) -> list[tuple[str, list[str]]]:
    calls = ["" if each.calls is None else str(each.calls) for each in traffic]
    return [
        ("between ranks in a step", [f"  {each.operator}" for each in traffic]),
        ("calls", calls),
        ("whole", [size_text(each.whole_bytes) for each in traffic]),
        ("sent by a rank", [size_text(each.wire_bytes) for each in traffic]),
    ]


def _title(model: ModelShape, job: JobShape, name: str | None = None) -> str:
    ranks = "1 rank" if job.num_ranks == 1 else f"{job.num_ranks} ranks"
    if job.num_shards != job.num_ranks:
        ranks += f" that shard over {job.num_shards}"
    what = f"{name}, " if name else ""
    count = f"{model.numel:,} parameters"
    if model.trained_numel != model.numel:
        count += f", {model.trained_numel:,} trained"
    return f"{what}{model.name} with {count} on {ranks}; bytes are of one rank\n"


def _remarks(model: ModelShape, job: JobShape, notes: Sequence[str], *, has_own: bool) -> list[str]:
    said = ["* as the config has it"] if has_own else []
    if model.activations is None:
        said.append("activations are not counted: add them to every peak")
    else:
        size = size_text(model.activations.saved_bytes).strip()
        said.append(f"activations {size}, {model.activations.how}")
    if job.is_on_host:
        said.append("the ranks compute on the CPU: device and host are one memory")
    said.append(
        f"counted are tensors, with a fused optimizer that keeps {job.state_copies} "
        f"{'tensor' if job.state_copies == 1 else 'tensors'} for each parameter; libraries, the "
        f"CUDA context and fragments come on top"
    )
    return ["", *(f"{each}." if not each.startswith("*") else each for each in [*said, *notes])]


def align(
    columns: Sequence[tuple[str, list[str]]], last: tuple[str, list[str]] | None = None
) -> list[str]:
    """Return a table, its head first: all columns but the first to the right.

    Args:
        columns: The title and the cells of each.
        last: One more, to the left.
    """
    if last is not None:
        bodies = align(columns)
        return [f"{line}  {cell}" for line, cell in zip(bodies, [last[0], *last[1]], strict=True)]
    widths = [max(len(each) for each in (title, *cells)) for title, cells in columns]
    lines = [[title for title, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _sent(row: StrategyRow) -> int:
    return sum(each.wire_bytes for each in row.traffic)


def _time(time: StepTime) -> str:
    return "?" if time.least_s is None else f"{time.least_s:.3g} s, {time.slowest}"


def size_text(num_bytes: int) -> str:
    """Return bytes in a unit that suits them."""
    if num_bytes == 0:
        return "-"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit / 10:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 2**10:.1f} KiB"


def _short(name: str) -> str:
    return name.removeprefix("bolt_")

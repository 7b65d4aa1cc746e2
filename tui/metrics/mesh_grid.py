"""Positions of the ranks in a drawing of the mesh: stages are rows, data x tensor goes across.

The innermost axis stays together, so that ranks which talk the most are neighbours. Where the
ranks of a stage do not fit into one line they are broken at round numbers, and where not even one
cell a rank fits, a cell stands for several.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.metrics.memo import remember_last

_LABEL_GAP = 2
_LEAST_ROOM_BESIDE_LABELS = 16
"""Cells; in a narrower place the labels go."""


class Cell(NamedTuple):
    """One cell and the ranks that it stands for."""

    ranks: tuple[int, ...]
    x: int
    y: int


class CellGrid(msgspec.Struct, frozen=True):
    """Cells of one width; their places are counted from the upper left corner of the drawing."""

    cell_width: int
    cells: tuple[Cell, ...]

    def cell_at(self, x: int, y: int) -> Cell | None:
        """Return the cell at a place."""
        for cell in self.cells:
            if cell.y == y and cell.x <= x < cell.x + self.cell_width:
                return cell
        return None


class MeshGrid(CellGrid, frozen=True):
    """Cells with labels left of and above them."""

    row_labels: dict[int, str]
    """By line."""
    column_labels: dict[int, str]
    """By the cell at which they start; they are drawn in the line above line 0."""
    left: int
    """Cells that the row labels take."""
    height: int
    """Lines without the column labels."""
    ranks_per_cell: int
    axes: str
    """Names of the axes down and across; empty on a mesh of one axis."""


class Layout(NamedTuple):
    """The ranks of a job by their coordinates on the screen."""

    stages: tuple[tuple[tuple[int, ...], ...], ...]
    """Stages of groups of ranks."""
    group_axis: str
    """The axis that the index of a group counts; empty if it is not a single one."""
    axes: str
    num_groups: int
    """Groups of the stage that has the most."""
    group_size: int
    """Ranks of the largest group."""


def plan_grid(
    job: JobSnapshot, width: int, height: int, *, cell_widths: Sequence[int]
) -> MeshGrid | None:
    """Return the grid with the widest cells that fit, or None if there is no room at all.

    ``cell_widths`` are tried in their order; the last one is used where nothing fits.
    """
    if width < 1 or height < 1 or not job.ranks:
        return None
    return grid_of(lay_out(job), width, height, cell_widths)


def grid_of(layout: Layout, width: int, height: int, cell_widths: Sequence[int]) -> MeshGrid | None:
    """Return the grid of ranks that are laid out already; there is place for a cell at least."""
    for cell_width in cell_widths:
        found = _fill(layout, width, height, cell_width)
        if found is not None:
            return found
    return _squeeze(layout, width, height, cell_widths[-1])


@remember_last
def lay_out(job: JobSnapshot) -> Layout:
    """Sort the ranks by their coordinates; those that have none stand in their order."""
    sizes = {axis: size for axis, size in job.mesh.items() if size > 1}
    outer = [axis for axis in job.mesh if axis not in {"pipeline", "tensor"}]
    stages: dict[int, dict[tuple[int, ...], list[tuple[int, int]]]] = {}
    for rank in job.ranks:
        at = rank.coordinates or _coordinates(rank, job)
        key = tuple(at.get(axis, 0) for axis in outer) if at else (rank.rank,)
        groups = stages.setdefault(at.get("pipeline", 0), {})
        groups.setdefault(key, []).append((at.get("tensor", 0), rank.rank))
    across = [axis for axis in sizes if axis in outer]
    words = [f"pipeline {sizes['pipeline']} down"] if "pipeline" in sizes else []
    names = [f"{axis} {size}" for axis, size in sizes.items() if axis != "pipeline"]
    words += [f"{' x '.join(names)} across"] if names else []
    ordered = tuple(
        tuple(tuple(rank for _, rank in sorted(groups[key])) for key in sorted(groups))
        for _, groups in sorted(stages.items())
    )
    return Layout(
        stages=ordered,
        group_axis=across[0] if len(across) == 1 and len(sizes) > 1 else "",
        axes=", ".join(words) if len(sizes) > 1 else "",
        num_groups=max(map(len, ordered)),
        group_size=max(len(group) for groups in ordered for group in groups),
    )


def _coordinates(rank: RankSnapshot, job: JobSnapshot) -> dict[str, int]:
    """Return where a rank that has not said so must be: the last axis runs fastest."""
    at: dict[str, int] = {}
    rest = rank.rank
    for axis, size in reversed(job.mesh.items()):
        rest, at[axis] = divmod(rest, max(1, size))
    return at if rest == 0 else {}


def _fill(layout: Layout, width: int, height: int, cell_width: int) -> MeshGrid | None:
    """Return a grid with one cell for each rank, or None where it does not fit."""
    gap = 0 if layout.group_size == 1 and cell_width == 1 else 1
    group_width = layout.group_size * cell_width + gap
    whole = layout.num_groups * group_width - gap
    stages = _stage_width(layout)
    if stages + whole <= width and len(layout.stages) <= height:
        return _place(layout, layout.num_groups, cell_width, gap, stages)
    for left in (_label_width(layout), 0):
        room = width - left
        if left and room < _LEAST_ROOM_BESIDE_LABELS:
            continue
        for per_line in _round_numbers(layout.num_groups, (room + gap) // group_width):
            num_lines = sum(-(-len(groups) // per_line) for groups in layout.stages)
            if num_lines <= height:
                return _place(layout, per_line, cell_width, gap, left)
    return None


def _round_numbers(total: int, fitting: int) -> list[int]:
    """Return how many groups a line may hold: all, else a large divisor, else what fits."""
    if fitting < 1:
        return []
    if fitting >= total:
        return [total]
    divisor = next(number for number in range(fitting, 0, -1) if total % number == 0)
    return [divisor, fitting] if 2 * divisor > fitting else [fitting]


def _stage_width(layout: Layout) -> int:
    """Return the width of labels that name a stage; there are none where there is one stage."""
    stages = len(layout.stages)
    return len(f"stage {stages - 1}") + _LABEL_GAP if stages > 1 else 0


def _label_width(layout: Layout) -> int:
    """Return the width of the labels of lines that are broken: a stage and a first rank."""
    last = max(rank for groups in layout.stages for group in groups for rank in group)
    stage = max(0, _stage_width(layout) - _LABEL_GAP + 1)
    return stage + len(f"rank {last}") + _LABEL_GAP


def _place(layout: Layout, per_line: int, cell_width: int, gap: int, left: int) -> MeshGrid:
    is_broken = per_line < layout.num_groups
    cells: list[Cell] = []
    row_labels: dict[int, str] = {}
    column_labels: dict[int, str] = {}
    y = 0
    for stage, groups in enumerate(layout.stages):
        for start in range(0, len(groups), per_line):
            line = groups[start : start + per_line]
            label = f"stage {stage}" if len(layout.stages) > 1 else ""
            if is_broken:
                stage_label = f"{label if start == 0 else ' ' * len(label)} " if label else ""
                label = f"{stage_label}rank {line[0][0]}"
            if left:
                row_labels[y] = label
            x = left
            for group in line:
                if y == 0 and not is_broken:
                    column_labels[x] = _column_label(layout, len(column_labels), group[0])
                for rank in group:
                    cells.append(Cell((rank,), x, y))
                    x += cell_width
                x += gap
            y += 1
    return MeshGrid(
        cell_width=cell_width,
        cells=tuple(cells),
        row_labels=row_labels,
        column_labels=column_labels,
        left=left,
        height=y,
        ranks_per_cell=1,
        axes=layout.axes,
    )


def _column_label(layout: Layout, index: int, first_rank: int) -> str:
    if layout.num_groups == 1:
        return ""
    if layout.group_axis:
        return f"{layout.group_axis} {index}"
    return f"rank {first_rank}" if len(layout.stages) == 1 else ""


def _squeeze(layout: Layout, width: int, height: int, cell_width: int) -> MeshGrid | None:
    """Return a grid in which each cell stands for as many ranks as are needed to fit."""
    lists = [[rank for group in groups for rank in group] for groups in layout.stages]
    per_line = width // cell_width
    if per_line < 1:
        return None
    if len(lists) > height:
        lists = [[rank for ranks in lists for rank in ranks]]
    num_merged = 1
    while sum(-(-len(ranks) // (num_merged * per_line)) for ranks in lists) > height:
        num_merged *= 2
    cells: list[Cell] = []
    y = 0
    for ranks in lists:
        merged = [tuple(ranks[at : at + num_merged]) for at in range(0, len(ranks), num_merged)]
        for place, members in enumerate(merged):
            across = place % per_line
            cells.append(Cell(members, across * cell_width, y + place // per_line))
        y += -(-len(merged) // per_line)
    return MeshGrid(
        cell_width=cell_width,
        cells=tuple(cells),
        row_labels={},
        column_labels={},
        left=0,
        height=y,
        ranks_per_cell=num_merged,
        axes=layout.axes,
    )

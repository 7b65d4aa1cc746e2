"""``boltmesh schedule``: a row of blocks for each rank of one step, and below its costs."""

import json
import math
from typing import Any, NamedTuple

from boltmesh.errors import ConfigError
from boltmesh.schedule_sim import StageTimes
from boltmesh.strategies.pipeline.schedules.registry import (
    Ideal,
    check_schedule,
    closed_form_bubble,
    schedule_kind,
    schedule_table,
    schedules,
    simulate_ideal,
)
from boltmesh.tui.commands.console import print_line, terminal_look, width
from boltmesh.tui.panels.gantt import GanttRow, draw_rows
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.ranks import row_names
from boltmesh.tui.render.style import Style, sentence

MOST_CELLS = 12
"""Cells of the shortest block: more would be no clearer."""
LEAST_CELLS_OF_TICK = 6
MOST_ACTIONS = 2**18
"""In one step: about a minute of computing."""


class _Scale(NamedTuple):
    """How much of a step is shown, and how large."""

    cells_per_time: float
    shown: float
    """Up to this time."""
    needed_width: int
    """Width of a terminal that shows all."""


def draw_schedule(
    ideal: Ideal, times: StageTimes, advice: str, width: int, look: Style
) -> list[str]:
    """The lines, none longer than ``width``."""
    rows = _rows(ideal)
    names, scale = _names_and_scale(ideal, rows, width)
    cells = round(scale.shown * scale.cells_per_time)
    drawn = draw_rows(rows, names, scale.shown, cells, width, look)
    lines = [*sentence(_title(ideal, times), width, look), Line(), *drawn.rows]
    lines.append(_axis(scale, len(names[0]), width))
    lines += drawn.legend
    if scale.shown < ideal.window:
        cut = (
            f"Cut at {scale.shown:g} of {ideal.window:g}: the whole needs "
            f"{scale.needed_width} columns."
        )
        lines += sentence(cut, width, look)
    lines.append(Line())
    for label, text in _facts(ideal, advice):
        lines += sentence(text, width, look, mark=label.ljust(13), max_lines=8)
    return [line.crop(width).plain.rstrip() for line in lines]


def _rows(ideal: Ideal) -> list[GanttRow]:
    return [
        GanttRow(rank=rank, stages=ideal.table.stages_of(rank), slots=row)
        for rank, row in enumerate(ideal.timetable)
    ]


def _names_and_scale(ideal: Ideal, rows: list[GanttRow], width: int) -> tuple[list[str], _Scale]:
    """Name the rows by number alone where that leaves room for the whole."""
    ranks = [(row.rank, row.stages) for row in rows]
    names = row_names(ranks, width)
    scale = _scale(ideal, len(names[0]), width)
    if scale.shown < ideal.window:
        short = row_names(ranks, 0)
        closer = _scale(ideal, len(short[0]), width)
        if closer.shown == ideal.window:
            return short, closer
    return names, scale


def _scale(ideal: Ideal, indent: int, width: int) -> _Scale:
    """The largest scale that fits whole; if numbers would not fit in blocks, for the first part."""
    shortest = min(slot.end - slot.start for row in ideal.timetable for slot in row)
    # A number, and one cell at least of the pattern that says what the block is.
    least = len(str(ideal.table.num_microbatches - 1)) + 1
    room = max(least, width - indent)
    fitting = math.floor(room * shortest / ideal.window)
    cells = min(MOST_CELLS, max(least, fitting))
    whole = math.ceil(ideal.window * cells / shortest)
    if whole <= room:
        return _Scale(cells / shortest, ideal.window, indent + whole)
    shortest_name = len(f"r{ideal.table.num_ranks - 1} ")
    needed = shortest_name + math.ceil(ideal.window * least / shortest)
    return _Scale(cells / shortest, room // cells * shortest, needed)


def _axis(scale: _Scale, indent: int, width: int) -> Line:
    """Times, at round numbers."""
    least = LEAST_CELLS_OF_TICK / scale.cells_per_time
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    line = Line()
    for tick in range(math.floor(scale.shown / step + 1e-9) + 1):
        text = f"{tick * step:g}"
        at = indent + round(tick * step * scale.cells_per_time)
        if at + len(text) <= width:
            line.pad_to(at).add(text, "muted")
    return line


def _title(ideal: Ideal, times: StageTimes) -> str:
    table = ideal.table
    stages = f"{table.num_stages} stage{'s' if table.num_stages != 1 else ''}"
    ranks = f"{table.num_ranks} rank{'s' if table.num_ranks != 1 else ''}"
    count = f"{table.num_microbatches} microbatch{'es' if table.num_microbatches != 1 else ''}"
    return (
        f"{table.name}: {stages} on {ranks}, {count}; through a stage, forward "
        f"{times.forward:g} and backward {times.backward:g}"
    )


def _facts(ideal: Ideal, advice: str) -> list[tuple[str, str]]:
    table = ideal.table
    peaks = ", ".join(map(str, ideal.peak_live_activations))
    first = ""
    if table.stages_per_rank > 1:
        first = f"; rank 0 has {', '.join(map(str, table.stages_of(0)))}"
    facts = [
        (
            "bubble",
            f"{ideal.bubble:.1%} of total, {ideal.bubble_of_ideal:.1%} of ideal (idle/busy)",
        ),
        ("peak live", f"{peaks} activations by rank, each of a microbatch in a stage"),
        ("stages", f"{table.num_stages}, {table.stages_per_rank} on each rank{first}"),
    ]
    note = schedule_kind(table.name).note
    if note:
        facts.append(("note", f"{note}."))
    facts.append(("next", advice))
    return facts


def _bubble(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None,
    times: StageTimes,
) -> float | None:
    """By formula where there is one: that needs no torch. None if the size does not exist."""
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    try:
        per_rank = check_schedule(name, **sizes, stages_per_rank=stages_per_rank)
    except ConfigError:
        return None
    known = closed_form_bubble(name, **sizes, stages_per_rank=per_rank, times=times)
    if known is not None:
        return known
    table = schedule_table(name, **sizes, stages_per_rank=per_rank)
    return simulate_ideal(table, times.seconds).bubble


def list_schedules(*, as_json: bool) -> int:
    """Print the names of all schedules, each with a summary."""
    kinds = schedules().values()
    if as_json:
        print_line(json.dumps([{"schedule": kind.name, "summary": kind.summary} for kind in kinds]))
        return 0
    widest = max(len(kind.name) for kind in kinds)
    for kind in kinds:
        print_line(f"{kind.name:<{widest}}  {kind.summary}")
    print_line("\nboltmesh schedule NAME draws one.")
    return 0


def schedule(
    name: str,
    *,
    stages: int,
    microbatches: int | None,
    stages_per_rank: int | None,
    forward: float,
    backward: float,
    ascii_only: bool,
    as_json: bool,
) -> int:
    """Draw one step of a schedule, or print it as JSON.

    Args:
        name: One of the registered schedules.
        stages: Ranks of the pipeline.
        microbatches: None for two a rank, which every schedule has.
        stages_per_rank: None for the schedule's default.
        forward: Time of one stage for one microbatch, in any unit.
        backward: The same of a whole backward.
        ascii_only: Draw with ASCII.
        as_json: Print JSON in place of the picture.

    Raises:
        ConfigError: There is no such schedule, or not in this size.
    """
    _refuse_large(stages, microbatches, stages_per_rank)
    table = schedule_table(
        name,
        num_ranks=stages,
        num_microbatches=2 * stages if microbatches is None else microbatches,
        stages_per_rank=stages_per_rank,
    )
    times = StageTimes.of(forward, backward)
    ideal = simulate_ideal(table, times.seconds)
    advice = next_to_try(ideal, times)
    if as_json:
        print_line(json.dumps(_as_data(ideal, times, advice)))
    else:
        look = terminal_look(ascii_only=ascii_only)
        print_line("\n".join(draw_schedule(ideal, times, advice, width(), look)))
    return 0


def _refuse_large(stages: int, microbatches: int | None, stages_per_rank: int | None) -> None:
    asked = 2 * stages if microbatches is None else microbatches
    per_rank = stages_per_rank or 1
    count = 2 * stages * asked * per_rank
    if count > MOST_ACTIONS:
        fitting = max(1, min(stages, math.isqrt(MOST_ACTIONS // (4 * per_rank))))
        raise ConfigError(
            f"--stages {stages} and --microbatches {asked} make a step of {count:,} actions, and "
            f"at most {MOST_ACTIONS:,} are simulated. A smaller step of the same ratio has nearly "
            f"the same bubble: write for example --stages {fitting} --microbatches {2 * fitting}."
        )


def next_to_try(ideal: Ideal, times: StageTimes) -> str:
    """Return the simplest change that lowers the bubble or the activations that are kept."""
    table = ideal.table
    if table.num_ranks == 1:
        return "One rank never waits. Take --stages 2 to divide the layers."
    if schedule_kind(table.name).is_asynchronous:
        return "Its weights are one step old: compare its loss with that of 1f1b."
    return _keeps_less(ideal, times) or _waits_less(ideal, times) or _with_more(ideal, times)


def _keeps_less(ideal: Ideal, times: StageTimes) -> str | None:
    """Name a schedule with the same bubble and fewer activations in memory."""
    table = ideal.table
    name = schedule_kind(table.name).smaller
    if not name:
        return None
    try:
        other = schedule_table(
            name,
            num_ranks=table.num_ranks,
            num_microbatches=table.num_microbatches,
            stages_per_rank=table.stages_per_rank,
        )
    except ConfigError:
        return None
    found = simulate_ideal(other, times.seconds)
    kept, less = max(ideal.peak_live_activations), max(found.peak_live_activations)
    if less >= kept or found.bubble > ideal.bubble + 1e-9:
        return None
    return f"{name} waits as long, and keeps {less} activations at most instead of {kept}."


def _waits_less(ideal: Ideal, times: StageTimes) -> str | None:
    table = ideal.table
    name = schedule_kind(table.name).faster
    if not name:
        return None
    has_size = schedule_kind(name).has_stages_per_rank(table.stages_per_rank)
    size = table.stages_per_rank if has_size else None
    bubble = _bubble(name, table.num_ranks, table.num_microbatches, size, times)
    if bubble is None or bubble > ideal.bubble - 0.001:
        return None
    return f"{name} computes gradients of weights in the gaps: {bubble:.1%} bubble."


def _with_more(ideal: Ideal, times: StageTimes) -> str:
    table = ideal.table
    more = 2 * table.num_microbatches
    bubble = _bubble(table.name, table.num_ranks, more, table.stages_per_rank, times)
    if bubble is None:
        return f"--microbatches {2 * table.num_ranks} or more, for the ranks to be busy."
    return f"--microbatches {more}: {bubble:.1%} bubble, if the batch can be cut that small."


def _as_data(ideal: Ideal, times: StageTimes, advice: str) -> dict[str, Any]:
    """Return the schedule for JSON; times in the unit of --forward and --backward."""
    table = ideal.table
    kind = schedule_kind(table.name)
    return {
        "schema": 1,
        "schedule": table.name,
        "ranks": table.num_ranks,
        "stages": table.num_stages,
        "stages_per_rank": table.stages_per_rank,
        "microbatches": table.num_microbatches,
        "forward": times.forward,
        "backward": times.backward,
        "window": ideal.window,
        "bubble": ideal.bubble,
        "bubble_of_ideal": ideal.bubble_of_ideal,
        "idle": list(ideal.idle_shares),
        "peak_live_activations": list(ideal.peak_live_activations),
        "rank_of_stage": list(table.rank_of_stage),
        "source": kind.source,
        "note": kind.note or None,
        "next": advice,
        "timeline": [
            [
                {
                    "stage": slot.action.stage,
                    "kind": slot.action.kind,
                    "microbatch": slot.action.microbatch,
                    "start": slot.start,
                    "end": slot.end,
                }
                for slot in row
            ]
            for row in ideal.timetable
        ],
    }

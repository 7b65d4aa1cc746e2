"""``boltmesh schedule``: draw a pipeline schedule, and say what it costs and keeps."""

import json
from dataclasses import dataclass
from typing import Any

from boltmesh.errors import ConfigError
from boltmesh.planning.schedule_text import draw_schedule
from boltmesh.strategies.pipeline.bubble import (
    Ideal,
    StageTimes,
    closed_form_bubble,
    simulate_ideal,
)
from boltmesh.strategies.pipeline.kinds import KINDS, check_schedule
from boltmesh.strategies.pipeline.schedules import schedule_table
from boltmesh.tui.commands.console import print_line, terminal_look, width

_SMALLER = {"gpipe": "1f1b", "looped_bfs": "interleaved_1f1b"}
_FASTER = {
    "gpipe": "zero_bubble",
    "1f1b": "zero_bubble",
    "interleaved_1f1b": "zero_bubble",
    "zero_bubble": "zbv",
}


@dataclass(frozen=True)
class _Size:
    """A schedule that might be tried instead."""

    name: str
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int | None

    def bubble(self, times: StageTimes) -> float | None:
        """By formula where there is one, for that needs no torch; None if it cannot be had."""
        sizes = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        try:
            per_rank = check_schedule(self.name, **sizes, stages_per_rank=self.stages_per_rank)
        except ConfigError:
            return None
        known = closed_form_bubble(self.name, **sizes, stages_per_rank=per_rank, times=times)
        if known is not None:
            return known
        table = schedule_table(self.name, **sizes, stages_per_rank=per_rank)
        return simulate_ideal(table, times.seconds).bubble


def schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    stages_per_rank: int | None,
    forward: float,
    backward: float,
    ascii_only: bool,
    as_json: bool,
) -> int:
    """Draw one step of a schedule, or print it as JSON.

    Raises:
        ConfigError: There is no such schedule, or not in this size.
    """
    table = schedule_table(
        name, num_ranks=stages, num_microbatches=microbatches, stages_per_rank=stages_per_rank
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


def next_to_try(ideal: Ideal, times: StageTimes) -> str:
    """What lowers the bubble, or what is kept, most simply from here."""
    table = ideal.table
    if table.num_ranks == 1:
        return "One rank waits for nobody. Take --stages 2 to divide the layers."
    if table.name == "pipedream_2bw":
        return "Its weights are one step old: compare its loss with that of 1f1b."
    return _keeps_less(ideal, times) or _waits_less(ideal, times) or _with_more(ideal, times)


def _keeps_less(ideal: Ideal, times: StageTimes) -> str | None:
    """The schedule that has the same bubble with less in memory, where it has these sizes."""
    table = ideal.table
    name = _SMALLER.get(table.name)
    if name is None:
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
    kept, others_kept = max(ideal.peak_live_activations), max(found.peak_live_activations)
    if others_kept >= kept or found.bubble > ideal.bubble + 1e-9:
        return None
    return f"{name} waits as long, and keeps {others_kept} activations at most instead of {kept}."


def _waits_less(ideal: Ideal, times: StageTimes) -> str | None:
    table = ideal.table
    name = _FASTER.get(table.name)
    if name is None:
        return None
    size = None if name == "zbv" else table.stages_per_rank
    bubble = _Size(name, table.num_ranks, table.num_microbatches, size).bubble(times)
    if bubble is None or bubble > ideal.bubble - 0.001:
        return None
    return f"{name} computes gradients of weights in the gaps: {bubble:.1%} bubble."


def _with_more(ideal: Ideal, times: StageTimes) -> str:
    table = ideal.table
    more = 2 * table.num_microbatches
    bubble = _Size(table.name, table.num_ranks, more, table.stages_per_rank).bubble(times)
    if bubble is None:
        return f"--microbatches {2 * table.num_ranks} or more, for the ranks to be busy."
    return f"--microbatches {more}: {bubble:.1%} bubble, if the batch can be cut that small."


def _as_data(ideal: Ideal, times: StageTimes, advice: str) -> dict[str, Any]:
    """The schedule as JSON has it; times in the unit of --forward and --backward."""
    table = ideal.table
    kind = KINDS[table.name]
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

"""Every schedule in every size: complete, in order, free of deadlock, equal to torch's own."""

import contextlib
import hashlib
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed.pipelining.schedules as of_torch

from boltmesh.errors import ConfigError
from boltmesh.schedule_sim import NOMINAL, actions
from boltmesh.strategies.pipeline.schedules.actions import with_communication
from boltmesh.strategies.pipeline.schedules.registry import (
    ScheduleTable,
    check_order,
    schedule_table,
    schedules,
)
from tests.support.message_sim import simulate_messages

RANKS = range(1, 7)
MICROBATCHES = range(1, 13)


def every_size(name: str) -> Iterator[ScheduleTable]:
    """All sizes that the schedule has, with up to three stages a rank."""
    for ranks, microbatches, size in itertools.product(RANKS, MICROBATCHES, (1, 2, 3)):
        sizes = {
            "num_ranks": ranks,
            "num_microbatches": microbatches,
            "stages_per_rank": size,
        }
        with contextlib.suppress(ConfigError):
            yield schedule_table(name, **sizes)


NUM_SIZES = {
    "gpipe": 72,
    "1f1b": 72,
    "looped_bfs": 144,
    "interleaved_1f1b": 124,
    "zero_bubble": 186,
    "zbv": 72,
    "dualpipev": 36,
    "pipedream_2bw": 57,
}
"""A schedule that is not here is checked in the sizes that it has."""


@pytest.mark.parametrize("name", schedules())
def test_every_size_is_complete_and_free_of_deadlock(name: str) -> None:
    tables = list(every_size(name))
    assert tables
    assert len(tables) == NUM_SIZES.get(name, len(tables))
    for table in tables:
        check_order(table)
        rows = with_communication(table)
        simulate_messages(rows, NOMINAL.seconds, sends="buffered")
        simulate_messages(rows, NOMINAL.seconds, sends="rendezvous")
        computed = [[text for text in row if "_" not in text] for row in rows]
        assert computed == [list(map(str, row)) for row in actions(table.order)]
        boundaries = sum(here != there for here, there in itertools.pairwise(table.rank_of_stage))
        sends = sum("SEND" in text for row in rows for text in row)
        assert sends == 2 * boundaries * table.num_microbatches


@pytest.mark.parametrize("name", NUM_SIZES)
def test_stages_lie_in_a_loop_or_in_a_v(name: str) -> None:
    table = schedule_table(name, num_ranks=4, num_microbatches=8)
    assert table.stages_per_rank == schedules()[name].default_stages_per_rank
    if name in ("zbv", "dualpipev"):
        assert [table.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    else:
        assert table.rank_of_stage == (0, 1, 2, 3) * table.stages_per_rank


def run_loop(schedule: Any, num_ranks: int, num_microbatches: int) -> list[list[str]]:
    """What torch's own loop computes on each rank, without anything to compute."""
    rows = []
    for rank in range(num_ranks):
        row: list[str] = []
        stage = SimpleNamespace(
            num_stages=num_ranks,
            stage_index=rank,
            is_last=rank == num_ranks - 1,
            forward_one_chunk=lambda at, *_, row=row, rank=rank, **__: row.append(f"{rank}F{at}"),
            backward_one_chunk=lambda at, row=row, rank=rank, **_: row.append(f"{rank}B{at}"),
            perform_reduce_grad=lambda _: None,
            **{
                f"get_{way}_{what}_ops": lambda _: []
                for way in ("fwd", "bwd")
                for what in ("recv", "send")
            },
        )
        # torch refuses fewer microbatches than stages, and its loop runs them all the same.
        made = schedule(stage, max(num_ranks, num_microbatches))
        made._n_microbatches = num_microbatches
        with patch.object(made, "_initialize_stage"):
            made._step_microbatches()
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("name", "schedule"), [("gpipe", of_torch.ScheduleGPipe), ("1f1b", of_torch.Schedule1F1B)]
)
def test_our_own_orders_are_those_that_torchs_loops_run(name: str, schedule: Any) -> None:
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            table = schedule_table(name, num_ranks=ranks, num_microbatches=microbatches)
            assert [list(row) for row in table.order] == run_loop(schedule, ranks, microbatches)


def digest(rows: Any) -> str:
    """Of a table as torch's files have it: a line for each rank, commas between steps."""
    text = "".join(",".join(each or "" for each in row) + "\n" for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


# The files of https://github.com/pytorch/pytorch, test/distributed/pipelining/artifacts, with Unix
# ends of lines.
GOLDEN_DUALPIPEV = "16ce4a29936e4c5ad774098add32489b4937942e3f5ab0108f17d2826b184529"
"""dualpipev_4rank_10mb.csv"""
GOLDEN_COMPUTE = "47447dbd4824fb9cf9b4f3e3a200acfdc0763f2a8ed2eb3d72161886dc10d372"
"""zb1p_2rank_2stagep_compute.csv"""
GOLDEN_COMMUNICATION = "99b371864a190caafd98bd49e0cd01d0c192e38a253e708041242ed221873d1e"
"""zb1p_2rank_2stagep_comms.csv"""


def test_torchs_golden_tables_are_what_we_get() -> None:
    dualpipev = schedule_table("dualpipev", num_ranks=4, num_microbatches=10)
    assert digest(dualpipev.order) == GOLDEN_DUALPIPEV
    zero_bubble = schedule_table("zero_bubble", num_ranks=2, num_microbatches=8, stages_per_rank=2)
    assert digest(zero_bubble.order) == GOLDEN_COMPUTE


def test_torchs_golden_table_with_communication_is_what_we_get() -> None:
    """It was made from the other one after each I with its W behind it became a B."""
    table = schedule_table("zero_bubble", num_ranks=2, num_microbatches=8, stages_per_rank=2)
    rows = [",".join(text for text in row if text) for row in table.order]
    merged = [re.sub(r"\b(\d+)I(\d+),\1W\2\b", r"\1B\2", row).split(",") for row in rows]
    order = tuple(map(tuple, merged))
    placed = with_communication(ScheduleTable("merged", 2, 4, 8, order, table.rank_of_stage))
    assert digest(placed) == GOLDEN_COMMUNICATION


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    table = schedule_table("zbv", num_ranks=2, num_microbatches=1)
    first, last = (" ".join(row) for row in with_communication(table))
    assert first == "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0"
    assert last == "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0"

"""From what ranks say of themselves follows where a standstill began."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C import _distributed_c10d

from boltmesh.telemetry.hang_detection.diagnose import GroupPosition, RankProgress, explain
from boltmesh.telemetry.hang_detection.inspect import own_progress
from boltmesh.telemetry.snapshot import PHASES

DATA: dict[str, Any] = {"name": "1", "axis": "data"}
TENSOR: dict[str, Any] = {"name": "2", "axis": "tensor"}


def group(
    which: dict[str, Any], ranks: tuple[int, ...], sequence: int, **changes: Any
) -> GroupPosition:
    members = [(ranks[0], len(ranks), ranks[1] - ranks[0])]
    known = {"operator": "allreduce", "is_done": True, "for_s": 5.0, **changes}
    return GroupPosition(**which, members=members, sequence=sequence, **known)


def waits(which: dict[str, Any], ranks: tuple[int, ...], sequence: int, **changes: Any) -> Any:
    return group(which, ranks, sequence, **{"is_done": False, **changes})


def standing(rank: int, *groups: GroupPosition, **changes: Any) -> RankProgress:
    known = {"phase": "forward", "global_step": 7, "place": f"train.py:{rank}", **changes}
    return RankProgress(rank=rank, groups=groups, **known)


def test_the_question_goes_on_to_the_group_in_which_it_began() -> None:
    # Ranks 0 and 1 share tensors, so do 2 and 3; 0 and 2, 1 and 3 share data. Rank 3 sleeps.
    ranks = {
        0: standing(0, waits(TENSOR, (0, 1), 5), group(DATA, (0, 2), 3)),
        1: standing(1, group(TENSOR, (0, 1), 4), waits(DATA, (1, 3), 4)),
        2: standing(2, waits(TENSOR, (2, 3), 9), group(DATA, (0, 2), 3)),
        3: standing(3, group(TENSOR, (2, 3), 8), group(DATA, (1, 3), 3)),
    }
    found = [explain(ranks, rank, 4) for rank in range(4)]
    for each in found[:3]:
        assert each is not None
        assert each.text.startswith("rank 3 never entered ")
        assert "Rank 3 is in forward after step 7, at train.py:3." in each.text
        assert not each.takes_long
    assert found[0] is not None
    assert "all_reduce #4 of data (ranks 1, 3), in which rank 1 waits." in found[0].text
    assert {each.key for each in found[:3] if each} == {found[0].key}
    assert found[3] is None


def test_whoever_of_a_circle_asks_says_the_same() -> None:
    ranks = {
        0: standing(0, waits(DATA, (0, 1), 9), group(TENSOR, (0, 1), 2)),
        1: standing(1, group(DATA, (0, 1), 8), waits(TENSOR, (0, 1), 3, operator="broadcast")),
    }
    found = explain(ranks, 0, 2)
    assert found == explain(ranks, 1, 2)
    assert found is not None
    assert "rank 1 never entered all_reduce #9 of data (ranks 0-1)" in found.text
    assert "Rank 1 waits for rank 0 in broadcast #3 of tensor (ranks 0-1)" in found.text
    assert "same calls in the same order" in found.text


def test_different_calls_under_one_number_are_named() -> None:
    ranks = {
        0: standing(0, waits(DATA, (0, 1, 2), 4)),
        1: standing(1, waits(DATA, (0, 1, 2), 4, operator="_allgather_base")),
        2: standing(2, waits(DATA, (0, 1, 2), 4)),
    }
    found = explain(ranks, 0, 3)
    assert found is not None
    assert "entered different calls as #4: ranks 0, 2 all_reduce, rank 1 all_gather" in found.text
    assert "at train.py:1" in found.text


def test_who_says_nothing_is_told_with_the_reason() -> None:
    here = {0: standing(0, waits(DATA, (0, 1), 4))}
    found = explain(here, 0, 2)
    assert found is not None
    assert "Rank 1 does not answer, and this host has no telemetry file of it." in found.text
    here[1] = standing(1, group(DATA, (0, 1), 3), silence="is stopped")
    found = explain(here, 0, 2)
    assert found is not None
    assert "Rank 1 is stopped, in forward after step 7." in found.text


def test_a_rank_that_was_stopped_in_the_collective_is_named() -> None:
    entered = waits(DATA, (0, 1), 4)
    ranks = {0: standing(0, entered), 1: standing(1, entered, silence="is stopped by a signal")}
    found = explain(ranks, 0, 2)
    assert found is not None
    assert found.text.startswith("all ranks entered all_reduce #4 of data (ranks 0-1), and it does")
    assert "Rank 1 is stopped by a signal, in forward after step 7." in found.text
    ranks[1] = standing(1, entered)
    found = explain(ranks, 0, 2)
    assert found is not None
    assert found.text.endswith("and it does not complete.")


def test_on_a_device_only_the_numbers_tell() -> None:
    # Completion is not known there: who is ahead waits, who is behind does not.
    ranks = {
        0: standing(0, group(DATA, (0, 1), 40, is_done=None)),
        1: standing(1, group(DATA, (0, 1), 38, is_done=None)),
    }
    found = explain(ranks, 0, 2)
    assert found is not None
    assert found.text.startswith("rank 1 never entered collective #39 of data (ranks 0-1)")
    assert explain(ranks, 1, 2) is None


def test_a_message_waits_for_its_sender_unless_the_code_is_elsewhere() -> None:
    receive = waits(DATA, (0, 1), 40, operator="recv", is_done=None, peer=1)
    sleeper = standing(1, group(DATA, (0, 1), 12, operator="send", is_done=None))
    ranks = {0: standing(0, receive), 1: standing(1, *sleeper.groups, is_in_library=False)}
    found = explain(ranks, 0, 2)
    assert found is not None
    assert found.text.startswith("rank 0 waits for rank 1 in recv #40 of data (ranks 0-1).")
    assert explain(ranks, 1, 2) is None


def test_what_takes_long_is_marked() -> None:
    ranks = {
        0: standing(0, waits(DATA, (0, 1), 4)),
        1: standing(1, group(DATA, (0, 1), 3), phase="checkpoint"),
    }
    found = explain(ranks, 0, 2)
    assert found is not None
    assert found.takes_long


@pytest.mark.parametrize(
    ("states", "is_done"),
    [(["completed", "completed"], True), (["completed", "started"], False), ([], None)],
)
def test_whether_a_call_on_gpus_is_done_is_known_from_nccls_newest_one(
    states: list[str], is_done: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [{"process_group": ["7", "data"], "state": each} for each in states]
    entries.append({"process_group": ["8", "tensor"], "state": "started"})
    dumped = json.dumps({"entries": entries}).encode()
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda *_: dumped, raising=False
    )
    ticket = (0, 0, 1, 1, 0, 0, 0, 12, 0, 0, 0, 1)  # not timed, the twelfth of its group
    file: Any = SimpleNamespace(
        newest=lambda: [(ticket, 0, False)],
        group_of=lambda _: ("7", "data", [(0, 2, 1)]),
        operator_of=lambda _: "allreduce",
    )
    clock: Any = SimpleNamespace(thread=threading.get_ident(), phase=PHASES.index("forward"))
    own = own_progress(file, clock, rank=0, settle=lambda: None, progress=lambda: (3, True))
    (found,) = own.groups
    assert (found.sequence, found.is_done) == (12, is_done)


def test_a_call_on_gpus_that_all_have_entered_is_said_not_to_complete() -> None:
    ranks = {rank: standing(rank, waits(DATA, (0, 1), 4)) for rank in range(2)}
    found = explain(ranks, 0, 2)
    assert found is not None
    assert "all ranks entered all_reduce #4 of data (ranks 0-1), and it does not" in found.text

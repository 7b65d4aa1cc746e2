"""What a rank is expected to move, where the stages of a pipeline state different things."""

import contextlib

import pytest

from boltmesh.telemetry.job import rank_file
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer.rank_file import RankFile
from tests.telemetry.test_reader import make_job


def _stated(operator: str, payload: float, calls: float | None = None) -> dict[str, object]:
    return {
        "axis": "data", "operator": operator, "payload_bytes": payload, "calls": calls, "why": "P"
    }  # fmt: skip


def _expected(
    *ranks: tuple[dict[str, int], list[dict[str, object]]],
) -> dict[str, ExpectedTraffic]:
    """What a job is read to expect, given the coordinates and the statements of its ranks."""
    path = make_job(world_size=len(ranks), mesh={"pipeline": 2, "data": len(ranks) // 2})
    with contextlib.ExitStack() as stack:
        for number, (coordinates, stated) in enumerate(ranks):
            file = RankFile(rank_file(path, number), rank=number, world_size=len(ranks))
            stack.callback(file.close)
            facts = {"host": "here", "device": "cpu", "coordinates": coordinates}
            file.write_facts(facts | {"expected": stated})
        reader = stack.enter_context(open_job(path))
        return {each.operator: each for each in reader.snapshot().expected}


def test_stages_count_once_each_however_many_ranks_state_it() -> None:
    first, second = [_stated("allreduce", 100.0, 1.0)], [_stated("allreduce", 300.0, 2.0)]
    found = _expected(
        ({"pipeline": 0}, first),
        ({"pipeline": 1}, second),
        ({"pipeline": 0}, first),
        ({"pipeline": 0}, first),
    )
    assert (found["allreduce"].payload_bytes, found["allreduce"].calls) == (200.0, 1.5)


def test_what_one_stage_alone_states_is_the_mean_of_that_stage() -> None:
    found = _expected(
        ({"pipeline": 0}, [_stated("allreduce", 100.0, 1.0), _stated("broadcast", 8.0)]),
        ({"pipeline": 1}, [_stated("allreduce", 300.0)]),
    )
    assert found["broadcast"].payload_bytes == pytest.approx(8.0)
    assert found["allreduce"].calls is None  # of one stage it is not known


def test_a_statement_that_cannot_be_read_leaves_the_others() -> None:
    found = _expected(
        ({"pipeline": 0}, [{"axis": 7}]), ({"pipeline": 1}, [_stated("allreduce", 300.0)])
    )
    assert found["allreduce"].payload_bytes == pytest.approx(300.0)

"""How layers are divided: told by the first rank of a host, read by whoever shows the job."""

import pytest

from boltmesh.telemetry import plan_files
from boltmesh.telemetry.plan_files import TENSOR_FILE, read_tensor_plan
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable
from boltmesh.telemetry.writer.recorder import Recorder
from tests.telemetry.test_reader import make_job, make_rank, snapshot
from tests.telemetry.test_recorder import CPU, make_info

UP = PlannedParameters(
    pattern="blocks.*.up.weight",
    count=4,
    shape=(512, 128),
    style="column of dim 0: 512x1",
    why="512 parts that nothing needs together",
    rank_bytes=2**19,
    whole_bytes=2**20,
    collectives="sum backward",
)
PLAN = TensorPlanTable(
    2, (UP,), blocks=(PlannedBlocks("blocks.0", 4, "local"),), notes=("the head stays whole",)
)


def tell(plan, *, local_rank=0):
    recorder = Recorder.open(
        make_info(), rank=local_rank, local_rank=local_rank, device=CPU, coordinates={}
    )
    recorder.tensor_plan(plan)
    recorder.close()
    return recorder.path


def test_a_plan_is_read_as_it_was_told_and_a_new_run_forgets_it():
    path = tell(PLAN)
    assert snapshot().tensor_plan == PLAN
    assert (PLAN.rank_bytes, PLAN.whole_bytes) == (2**19, 2**20)
    (path / "rank-0.bin").unlink()
    Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={}).close()
    assert snapshot().tensor_plan is None


def test_only_the_first_rank_of_a_host_tells_it():
    assert not (tell(PLAN, local_rank=1) / TENSOR_FILE).exists()


def test_what_a_terminal_would_obey_is_taken_out():
    tell(
        TensorPlanTable(
            2,
            (PlannedParameters("a\x1b[31m", 1, (2,), "row\n", "\x07", 4, 8, "sum\u202e"),),
            blocks=(PlannedBlocks("b\x1b[0m", 1, "local\r"),),
            notes=("\x1b]0;title\x07 stays",),
        )
    )
    found = snapshot().tensor_plan
    assert found.rows == (PlannedParameters("a", 1, (2,), "row", "", 4, 8, "sum"),)
    assert found.blocks == (PlannedBlocks("b", 1, "local"),)
    assert found.notes == ("stays",)


@pytest.mark.parametrize(
    "impossible",
    [{"count": -1}, {"rank_bytes": 1 << 62}, {"whole_bytes": -1}, {"shape": (2, -3)}],
)
def test_rows_that_no_model_has_are_left_out(impossible):
    fields = {name: getattr(UP, name) for name in UP.__struct_fields__} | impossible
    tell(TensorPlanTable(2, (PlannedParameters(**fields), UP)))
    assert snapshot().tensor_plan.rows == (UP,)


def test_an_axis_of_no_ranks_is_no_plan():
    tell(TensorPlanTable(0, (UP,)))
    assert snapshot().tensor_plan is None


def test_a_table_that_is_too_long_says_so(monkeypatch):
    monkeypatch.setattr(plan_files, "MAX_JSON_BYTES", 1000)
    path = tell(TensorPlanTable(4, (UP,) * 20))
    assert read_tensor_plan(path) == TensorPlanTable(
        4, (), notes=("the table is left out: its 20 kinds of parameters are too many",)
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 5000, b'{"size":"x"}', b"\xff\xfe"])
def test_a_damaged_plan_is_none(content):
    path = make_job()
    (path / TENSOR_FILE).write_bytes(content)
    (path / TENSOR_FILE).chmod(0o600)
    file = make_rank(path)
    assert snapshot().tensor_plan is None
    file.close()

"""The plan of the layers on the screen: what it says, how it sorts, and what stands for none."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.panels.plan_table import COLUMNS, draw_plan, shown_plan
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.view import TableView
from tests.tui.meshes import mesh_job
from tests.tui.samples import NOW, demo, job, rank, state
from tests.tui.screens import job_screen, open_app, screen_text

LOOK = Style(UNICODE)
PLAIN = Style(ASCII, has_headings=False)
SIZES = [(160, 45), (80, 24), (60, 15), (20, 5)]
LONG = "vision_tower.vision_model.encoder.layers.*.self_attn.q_proj.weight"


def planned(**changes: object) -> JobSnapshot:
    rows = (
        PlannedParameters(LONG, 12, (4096, 1024), "column of dim 0: 32x128",
                          "32 parts that nothing needs together", 2**20, 2**21, "sum backward"),
        PlannedParameters("head.weight", 1, (50, 8), "vocabulary of dim 0: 50x1",
                          "50 tokens, of which only sums are needed", 800, 1600, "a lookup"),
        PlannedParameters("norm.weight", 1, (8,), "whole", "layer_norm needs it whole", 32, 32, ""),
    )  # fmt: skip
    plan = TensorPlanTable(
        2,
        rows,
        blocks=(PlannedBlocks("blocks.0", 12, "local"), PlannedBlocks("odd", 1, "replicated")),
        notes=("odd is not run as local: its loss differs",),
    )
    fields = {"tensor_plan": plan, **changes}
    return msgspec.structs.replace(mesh_job({"data": 1, "tensor": 2}), **fields)


def drawn(snapshot: JobSnapshot, width: int = 150, height: int = 20, **view: object) -> list[str]:
    table = TableView(**view)  # type: ignore[arg-type]
    return [
        line.plain.rstrip() for line in draw_plan(state(snapshot), width, height, LOOK, table=table)
    ]


def test_a_row_says_what_is_divided_how_what_that_costs_and_why() -> None:
    lines = drawn(planned(), 200)
    assert "each of 2 ranks keeps 1.00 MiB of 2.00 MiB" in lines[0]
    (row,) = [line for line in lines if LONG in line]
    for words in ("column", "dim 0: 32x128", "12", "4096x1024", "1.00 MiB", "sum backward",
                  "32 parts that nothing"):  # fmt: skip
        assert words in row


def test_what_fell_back_and_how_blocks_run_stand_below() -> None:
    text = "\n".join(drawn(planned()))
    assert "on plain shards (local): 12 blocks like blocks.0" in text
    assert "whole on every rank (replicated): odd" in text
    assert "odd is not run as local: its loss differs" in text


def test_the_selected_row_is_told_in_full_however_narrow_it_is() -> None:
    text = " ".join(drawn(planned(), 60, 14, selected=0))
    for words in (LONG[:50], "column of dim 0: 32x128", "1.00 MiB of 2.00 MiB", "sum backward",
                  "because: 32 parts that nothing needs together"):  # fmt: skip
        assert words in text


def test_of_a_long_name_the_end_stays() -> None:
    (row,) = [line for line in drawn(planned(), 60) if "column" in line]
    assert row.startswith("…")
    assert "self_attn.q_proj.weight" in row


@pytest.mark.parametrize("column", COLUMNS)
def test_it_sorts_by_every_column(column: str) -> None:
    shown = state(planned())
    for is_descending in (False, True):
        table = TableView(sort=column, is_descending=is_descending)
        assert len(shown_plan(shown, table)) == 3
    sizes = [row.rank_bytes for row in shown_plan(shown, TableView(sort="per rank"))]
    assert sizes == sorted(sizes)


def test_it_is_filtered_by_words_and_columns() -> None:
    shown = state(planned())
    names = [row.pattern for row in shown_plan(shown, TableView(filter="style=replicated"))]
    assert names == ["norm.weight"]
    assert "nothing fits the filter" in "\n".join(drawn(planned(), filter="nothing like it"))


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (job(), "its tensor axis has one rank"),
        (planned(tensor_plan=None, global_step=0), "the plan is shown once it is proven"),
        (planned(tensor_plan=None), "the job has recorded no plan of it"),
        (planned(tensor_plan=TensorPlanTable(2, ())), "it names no parameter"),
    ],
)
def test_a_job_without_a_plan_says_why(snapshot: JobSnapshot, words: str) -> None:
    assert words in " ".join(drawn(snapshot, 100))


@pytest.mark.parametrize("look", [LOOK, PLAIN], ids=["headings", "plain"])
@pytest.mark.parametrize("selected", [None, 1])
def test_it_fits_every_place(look: Style, selected: int | None) -> None:
    for snapshot in (planned(), demo().job, job(), planned(tensor_plan=None)):
        for width, height in (
            (0, 0),
            (1, 1),
            (1, 9),
            (9, 1),
            (40, 3),
            (60, 8),
            (80, 20),
            (300, 50),
        ):
            table = TableView(selected=selected)
            lines = draw_plan(state(snapshot), width, height, look, table=table)
            assert len(lines) <= height
            assert all(line.width <= width for line in lines)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_page_shows_the_plan_and_what_its_axis_moves(size: tuple[int, int]) -> None:
    expected = (ExpectedTraffic("tensor", "allreduce", 1e6, 2, "two sums"),)
    async with open_app(Observation(NOW, planned(expected=expected)), size=size) as pilot:
        await pilot.press("9")
        text = screen_text(pilot.app)
        assert "each of 2 ranks keep" in text or size[0] >= 80
        if size[1] > 5:
            assert "head.weight" in text
            assert "1.00 MB  ≠ 2x" in text


async def test_rows_are_chosen_sorted_and_filtered_by_keys() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        await pilot.press("9", "j", "j")
        assert "because:" in screen_text(pilot.app)
        await pilot.press("s", "slash", *"vocab-parallel", "enter")
        text = screen_text(pilot.app)
        assert "parameter ↑" in text
        assert "tokens.weight" in text
        assert "blocks.*.up.weight" not in text
        await pilot.press("escape", "enter")
        assert job_screen(pilot).page.tab.name == "plan"


async def test_a_job_of_one_rank_has_a_page_that_says_so() -> None:
    lone = job(ranks=(rank(0),), mesh={"data": 1})
    async with open_app(Observation(NOW, lone), size=(80, 24)) as pilot:
        await pilot.press("9")
        text = screen_text(pilot.app)
        assert "its tensor axis has one rank" in text
        assert "boltmesh plan CONFIG --strategy tensor" in text

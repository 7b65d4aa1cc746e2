"""The load of experts: summed over ranks, drawn by layer, exported."""

import pytest

from boltmesh.telemetry.snapshot import ExpertLoad, GroupProgress
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.export.prometheus import prometheus_text
from boltmesh.tui.metrics.experts import layer_loads
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.panels.experts import draw_experts, split_names
from boltmesh.tui.panels.traffic import difference_words
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.view import TableView
from tests.tui.exposition import parse
from tests.tui.loads import HEALTHY, Load, worker
from tests.tui.samples import NOW, demo, job, rank, state, total
from tests.tui.screens import open_app, screen_text

FIRST = ExpertLoad("blocks.0.moe", (10, 10, 10, 10), (4, 4, 4, 4))
SKEWED = ExpertLoad("blocks.1.moe", (40, 0, 0, 0), (12, 2, 2, 0))
JOB = job(ranks=(rank(0, experts=(FIRST, SKEWED)), rank(1, experts=(FIRST,))))


def test_loads_are_sums_over_ranks_in_the_order_of_the_model() -> None:
    first, skewed = layer_loads(JOB)
    assert first.rows == (20, 20, 20, 20)
    assert (first.imbalance, first.num_idle) == (1.0, 0)
    assert (skewed.imbalance, skewed.least, skewed.num_idle) == (3.0, 0.0, 1)


def test_before_the_second_count_the_whole_run_is_shown() -> None:
    load = ExpertLoad("moe", (3, 1), (0, 0))
    assert layer_loads(job(ranks=(rank(0, experts=(load,)),)))[0].imbalance == 1.5


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (160, 45)])
async def test_the_screen_has_a_row_for_each_layer(size: tuple[int, int]) -> None:
    async with open_app(Observation(NOW, JOB), size=size) as pilot:
        await pilot.press("r")
        text = screen_text(pilot.app)
        assert "blocks.1" in text
        assert "3.00" in text
        await pilot.press("s", "s", "S")
        lines = screen_text(pilot.app).splitlines()
        places = [at for at, line in enumerate(lines) if line.strip().startswith("blocks.")]
        assert "blocks.1" in lines[places[0]]


async def test_many_experts_are_drawn_by_the_most_loaded() -> None:
    rows = tuple(1000 if number == 255 else 1 for number in range(256))
    seen = job(ranks=(rank(0, experts=(ExpertLoad("moe", rows, rows),)),))
    async with open_app(Observation(NOW, seen), size=(80, 24)) as pilot:
        await pilot.press("r")
        lines = screen_text(pilot.app).splitlines()
        line = next(each for each in lines if each.strip().startswith("moe "))
        assert "█" in line


async def test_a_job_without_experts_says_so() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press("r")
        assert "bolt_expert" in screen_text(pilot.app)


@pytest.mark.parametrize(
    ("fullest", "late", "found"),
    [(30, 0.06, {"experts"}), (30, 0.02, set()), (11, 0.06, {"uneven"})],
)
def test_ranks_that_wait_for_full_experts_are_a_finding(
    fullest: int, late: float, found: set[str]
) -> None:
    def load(number: int) -> Load:
        def phases(index: int) -> dict[str, float]:
            own = "forward" if index % 4 == number else "communication"
            return HEALTHY | {own: HEALTHY[own] + late}

        return phases

    group = GroupProgress("expert", "0", (0, 1), 1, None, None, None)
    rows = ExpertLoad("moe", (fullest, 10), (fullest, 10))
    ranks = tuple(worker(n, load(n), experts=(rows,), groups=(group,)) for n in range(4))
    findings = {each.kind: each for each in diagnose(state(job(ranks=ranks, global_step=24)))}
    assert set(findings) == found
    if "experts" in found:
        assert findings["experts"].evidence[0].endswith("1.50x the mean rows")
        # As much as is waited: less than the third that even rows would save of experts' work.
        assert findings["experts"].cost == pytest.approx(
            late * 3 / 4 / (sum(HEALTHY.values()) + late)
        )


def test_bytes_that_the_router_decides_on_are_no_finding() -> None:
    rows = total("expert", "alltoall_base", bytes_per_step=3000.0)
    mean = ExpectedTraffic("expert", "alltoall_base", 2000.0, None, "rows", is_mean=True)
    seen = job(ranks=(rank(0, collectives=(rows,)),), expected=(mean,))
    (row,) = traffic_rows(seen)
    assert (row.ratio, row.verdict, difference_words(row)) == (1.5, "varies", "1.5x")
    assert not diagnose(state(seen))


def test_rows_are_exported_by_layer_and_expert() -> None:
    found = parse(prometheus_text(Observation(NOW, JOB)))
    rows = found["boltmesh_expert_rows_total"]
    assert rows.value(module="blocks.0.moe", expert="3") == 20
    assert found["boltmesh_expert_imbalance_ratio"].value(module="blocks.1.moe") == 3


async def test_rows_that_experts_had_no_place_for_are_shown_and_exported() -> None:
    full = ExpertLoad("moe", (30, 10), (30, 10), dropped=5)
    seen = Observation(NOW, job(ranks=(rank(0, experts=(full,)), rank(1, experts=(full,)))))
    found = parse(prometheus_text(seen))
    assert found["boltmesh_expert_dropped_rows_total"].value(module="moe") == 10
    async with open_app(seen, size=(120, 40)) as pilot:
        await pilot.press("r")
        text = screen_text(pilot.app)
        assert "12.5% of rows dropped" in text
        (line,) = [each for each in text.splitlines() if each.strip().startswith("moe ")]
        assert "12.5%" in line


def test_names_are_told_by_what_differs_between_them() -> None:
    names = ["model.layers.0.mlp.experts", "model.layers.11.mlp.experts"]
    before, short, behind = split_names(names)
    assert (before, behind) == ("model.layers.", ".mlp.experts")
    assert list(short.values()) == ["layers.0", "layers.11"]
    assert split_names(["a.b", "a.b.c"])[1] == {"a.b": "b", "a.b.c": "b.c"}
    assert split_names(["a.b"]) == ("", {"a.b": "a.b"}, "")
    assert split_names([]) == ("", {}, "")


async def test_a_wide_screen_has_the_figure_of_each_expert() -> None:
    async with open_app(Observation(NOW, JOB), size=(160, 45)) as pilot:
        await pilot.press("r")
        text = screen_text(pilot.app)
        (line,) = [each for each in text.splitlines() if "blocks.1 " in each]
        assert line.split()[1:6] == ["█3.00", "░0.50", "░0.50", "·0.00", "3.00"]
        assert "rows by expert of blocks.*.moe" in text


async def test_nothing_is_cut_off_where_there_are_80_columns() -> None:
    loads = tuple(
        ExpertLoad(f"model.model.layers.{layer}.mlp.experts", (900_000,) * 16, (1,) * 16)
        for layer in range(12)
    )
    async with open_app(Observation(NOW, job(ranks=(rank(0, experts=loads),)))) as pilot:
        await pilot.press("r")
        text = screen_text(pilot.app)
        assert "…" not in text
        assert "no row is dropped" in text
        assert "layers.11  " + "▒" * 16 in text


async def test_the_shades_of_the_selected_row_keep_their_colours() -> None:
    lines = draw_experts(state(JOB), 100, 12, Style(UNICODE), table=TableView(selected=1))
    (line,) = [each for each in lines if each.plain.startswith("blocks.1")]
    assert {"selected heat5", "selected heat1"} <= {role for _, role in line.spans}

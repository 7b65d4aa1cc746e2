"""The page of the mesh on the screen, from eight ranks to a thousand."""

from functools import cache

import pytest

from boltmesh.tui.demo import mesh_of
from boltmesh.tui.metrics.heat import HEAT_FIGURES
from boltmesh.tui.pages.ranks import RANK
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.sources.live import Observation
from tests.tui.samples import demo, job, state
from tests.tui.screens import job_screen, open_app, screen_text

SIZES = [(160, 45), (120, 40), (80, 24), (60, 15)]


@cache
def _seen(world: int) -> Observation:
    return demo(mesh=mesh_of(world))


@pytest.mark.sample("8-(60, 15)", "64-(80, 24)")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("world", [8, 64, 1024])
async def test_map_places_and_axes_have_their_room(world: int, size: tuple[int, int]) -> None:
    async with open_app(_seen(world), size=size) as pilot:
        await pilot.press("8")
        names = [drawn.panel.name for drawn in job_screen(pilot).canvas.drawn]
        assert {"map", "places", "axes"} <= set(names)
        text = screen_text(pilot.app)
        for words in ("compute time", "data", "as expected", "worst rank"):
            assert words in text
        if size[0] >= 80:
            for axis, number in mesh_of(world).items():
                assert (
                    any(line.split()[:2] == [axis, f"{number:,}"] for line in text.splitlines())
                    or number == 1
                    or size[1] < 30
                )


@pytest.mark.sample("(60, 15)")
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_cursor_goes_to_a_rank_and_enter_shows_it(size: tuple[int, int]) -> None:
    async with open_app(_seen(8), size=size) as pilot:
        await pilot.press("8")
        screen = job_screen(pilot)
        assert screen.session.view.rank == 0
        await pilot.press("right", "j")
        assert screen.session.view.rank == 3
        await pilot.press("right", "k")  # the first part of the layers of the next stage
        assert screen.session.view.rank == 4
        assert "rank 4" in screen_text(pilot.app)
        await pilot.press("enter")
        assert screen.page is RANK
        assert "pipeline 1" in screen_text(pilot.app)
        await pilot.press("escape")
        assert screen.page is PAGES["mesh"]


async def test_enter_shows_the_first_rank_before_any_choice() -> None:
    async with open_app(_seen(8), size=(100, 30)) as pilot:
        await pilot.press("8", "enter")
        assert job_screen(pilot).page is RANK


async def test_every_figure_can_be_chosen_by_its_key() -> None:
    async with open_app(_seen(8), size=(120, 40)) as pilot:
        await pilot.press("8")
        for figure in (*HEAT_FIGURES[1:], HEAT_FIGURES[0]):
            await pilot.press("f")
            assert f"{figure} by place" in screen_text(pilot.app)
        await pilot.press("F")
        assert f"{HEAT_FIGURES[-1]} by place" in screen_text(pilot.app)


async def test_a_click_chooses_a_rank_and_two_show_it() -> None:
    async with open_app(_seen(64), size=(120, 40)) as pilot:
        await pilot.press("8")
        screen = job_screen(pilot)
        panel = next(d.panel for d in screen.canvas.drawn if d.panel.name == "map")
        place = (panel.region.x + panel.region.width // 2, panel.region.y + 4)
        for across in range(4):  # one of these cells is no gap
            await pilot.click(offset=(place[0] + across, place[1]))
        rank = screen.session.view.rank
        assert rank is not None
        for across in range(4):
            await pilot.click(offset=(place[0] + across, place[1]), times=2)
            if screen.page is RANK:
                break
        assert screen.page is RANK


@pytest.mark.sample("(80, 24)")
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_arrows_go_through_a_thousand_ranks(size: tuple[int, int]) -> None:
    async with open_app(_seen(1024), size=size) as pilot:
        await pilot.press("8", "right")
        seen = set()
        for key in ("right", "j", "right", "j", "left", "k"):
            await pilot.press(key)
            seen.add(job_screen(pilot).session.view.rank)
        assert len(seen) >= 3
        assert f"rank {job_screen(pilot).session.view.rank}" in screen_text(pilot.app)


@pytest.mark.parametrize("size", [(20, 5), (60, 15), (160, 45)], ids=str)
async def test_a_job_without_ranks_says_so(size: tuple[int, int]) -> None:
    shown = state(job(ranks=(), world_size=2))
    async with open_app(Observation(shown.time, shown.job), size=size) as pilot:
        await pilot.press("8", "right", "down", "enter")
        assert "no ranks yet" in screen_text(pilot.app)

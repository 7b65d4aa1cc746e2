"""A screen that watches a session: it looks once a second, and shows one page of the state."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from textual.message import Message
from typing_extensions import override

from boltmesh.tui.layout.frame import FrameOptions, frame_panels
from boltmesh.tui.layout.page import Page, Panel, Scene, Table, active_table
from boltmesh.tui.metrics.status import job_stalled_seconds
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.screens.base import PanelScreen, Prompt
from boltmesh.tui.session import Lost, Session
from boltmesh.tui.sources.live import Observation

MAX_SHARE = 1 / 8
"""Share of a core that the viewer may take: a job of very many ranks is looked at less often."""
UNFOCUSED_INTERVAL_S = 10.0
"""Interval while the terminal lacks the keyboard: it may be visible, and alerts have to ring."""
FIRST_LOOK_S = 0.3
"""How long the first paint waits for the first look."""


class LiveScreen(PanelScreen):
    """Owns a session, and closes it when it goes.

    Args:
        session: The session on the screen.
        page: The name of the page to begin with.
        interval_s: Time between two looks. None: no timer; a test requests each look.
    """

    @dataclass
    class Looked(Message):
        """The source was read, or could not be."""

        seen: Observation | Lost

        @override
        def can_replace(self, message: Message) -> bool:
            # A slow terminal skips outdated looks instead of falling behind.
            return isinstance(message, LiveScreen.Looked)

    def __init__(
        self, session: Session, *, page: str | None = None, interval_s: float | None = 1.0
    ) -> None:
        super().__init__()
        self.session = session
        self.page: Page = PAGES.get(page or "overview", PAGES["overview"])
        self.page_before = None if self.page.tab.is_listed else PAGES["overview"]
        """Where esc goes back to, from a rank or a page beside the tabs."""
        self._interval_s = interval_s
        self._last_look = float("-inf")
        self._cost_s = 0.0
        """CPU time of the last look, with the drawing."""
        self._begun_s: float | None = None

    @property
    def scene(self) -> Scene | None:
        """Input of the page's drawings, once something is known of the job."""
        state = self.session.state
        if state is None:
            return None
        return Scene(state=state, view=self.session.view, look=self.look, width=self.size.width)

    @property
    def table(self) -> Table | None:
        """The table that the keys work on."""
        return active_table(self.page, self.session.view)

    @override
    def panels(self) -> Sequence[Panel]:
        front = FrameOptions(
            page=self.page,
            note=self.note,
            has_jobs=self.dashboard.has_jobs,
            has_page_before=self.page_before is not None,
            has_prompt=bool(self.query(Prompt)),
        )
        width, height = self.size
        return frame_panels(self.session, front, width, height, self.look)

    async def on_mount(self) -> None:
        """Look at once, then every second."""
        # The first paint shows the job, unless that is far away and would keep the screen dark.
        first = asyncio.ensure_future(asyncio.to_thread(self.session.look))
        await asyncio.wait({first}, timeout=FIRST_LOOK_S)
        if first.done():
            self.session.take(first.result())
            self._choose_first_page()
        else:
            self.run_worker(self._await_look(first), group="look")
        if self._interval_s is not None:
            # The first look leaves out slow parts, so the second one does not wait.
            self.call_after_refresh(self.start_look)
            self.set_interval(self._interval_s, self._on_tick)

    def on_unmount(self) -> None:
        """Detach from the job."""
        self.session.close()

    def start_look(self) -> None:
        """Look in the background, unless a look is under way."""
        self._last_look = self.dashboard.clock()
        if not any(worker.group == "look" and worker.is_running for worker in self.workers):
            self._begun_s = time.process_time()
            self.run_worker(self.look_again(), group="look")

    async def look_again(self) -> None:
        """Read the source in a thread and post the observation; keys still work."""
        await self._await_look(asyncio.to_thread(self.session.look))

    def on_live_screen_looked(self, message: Looked) -> None:
        """Fold one look; a paused screen does not change."""
        is_first = self.session.state is None
        if self.session.take(message.seen):
            self.app.bell()
        if is_first:
            self._choose_first_page()
        self.paint()
        if self._begun_s is not None:  # the first look, which reads everything, is no measure
            self._cost_s = time.process_time() - self._begun_s
            self._begun_s = None

    def _choose_first_page(self) -> None:
        """Begin with the overview if the remembered page would hide an important state.

        The job has ended or is stalled, or the page has nothing to show.
        """
        state = self.session.state
        if state is None:
            return
        is_well = state.job.state == "running" and job_stalled_seconds(state) is None
        is_compared = state.other is not None
        if (not is_well and not is_compared) or self.page.empty_reason(state):
            self.page, self.page_before = PAGES["overview"], None
        self.place_cursor()

    def place_cursor(self) -> None:
        """Choose the first rank and the first row where nothing is chosen yet."""
        state, table = self.session.state, self.table
        if state is None:
            return
        if self.session.view.rank is None and state.job.ranks:
            self.session.choose(rank=state.job.ranks[0].rank)
        if table is not None and table.has_cursor and self.page.rank_map is None:
            view = self.session.view.table(table.name)
            if view.selected is None:
                self.session.look_at_table(table.name, selected=0)

    async def _await_look(self, look: Awaitable[Observation | Lost]) -> None:
        self.post_message(self.Looked(await look))

    def _on_tick(self) -> None:
        waited = self.dashboard.clock() - self._last_look
        if waited * MAX_SHARE >= self._cost_s and (
            self.dashboard.is_focused or waited >= UNFOCUSED_INTERVAL_S
        ):
            self.start_look()

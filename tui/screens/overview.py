"""The first screen of a job: what it achieves, where its time goes, how its ranks are."""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from typing_extensions import override

from boltmesh.errors import TelemetryError
from boltmesh.tui.drawing.chart import draw_chart
from boltmesh.tui.drawing.communication import draw_communication
from boltmesh.tui.drawing.events import draw_events
from boltmesh.tui.drawing.header import draw_header
from boltmesh.tui.drawing.keys import draw_keys
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.metrics import draw_metrics, newest_metrics
from boltmesh.tui.drawing.phases import draw_phases
from boltmesh.tui.drawing.ranks import draw_ranks
from boltmesh.tui.drawing.status import draw_status, status_height
from boltmesh.tui.drawing.throughput import draw_throughput
from boltmesh.tui.figures.events import event_rows
from boltmesh.tui.figures.phases import phase_split
from boltmesh.tui.figures.traffic import traffic_rows
from boltmesh.tui.layout import Contents, Region, plan_overview
from boltmesh.tui.screens.base import PanelScreen
from boltmesh.tui.source import Observation, Source
from boltmesh.tui.state import State, fold, fold_loss_of_source, metric_names
from boltmesh.tui.widgets.panel import Draw, Panel

SCROLL_PAGE = 10


class View(msgspec.Struct, frozen=True):
    """What the person at the keys has chosen."""

    metric: str | None = None
    first_rank: int = 0
    is_paused: bool = False


class OverviewScreen(PanelScreen):
    """Folds what its source sees once a second, and draws the result."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "toggle_pause", "pause"),
        Binding("m", "next_metric(1)", "metric"),
        Binding("M", "next_metric(-1)", "previous metric"),
        Binding("down,j", "scroll_ranks(1)", "ranks down"),
        Binding("up,k", "scroll_ranks(-1)", "ranks up"),
        Binding("pagedown", f"scroll_ranks({SCROLL_PAGE})", "ranks down"),
        Binding("pageup", f"scroll_ranks(-{SCROLL_PAGE})", "ranks up"),
        Binding("home", "first_rank", "first rank"),
        Binding("0,escape", "app.show_jobs", "jobs"),
    ]

    @dataclass
    class Seen(Message):
        """The source was read."""

        observation: Observation

        @override
        def can_replace(self, message: Message) -> bool:
            # A slow terminal skips what is out of date instead of falling behind.
            return isinstance(message, OverviewScreen.Seen)

    @dataclass
    class Lost(Message):
        """The source could not be read."""

        reason: str

    def __init__(self, source: Source, *, interval_s: float | None = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval_s = interval_s
        self._newest: State | None = None
        self._shown: State | None = None
        self.view = View()

    @property
    def state(self) -> State:
        """What is on the screen; while it is paused, not the newest."""
        if self._shown is None:
            self._newest = self._shown = fold(None, self._source.read())
        return self._shown

    @override
    def compose(self) -> ComposeResult:
        # The source is read before anything is drawn, so the first paint shows the job.
        panels: dict[str, Draw] = {
            "header": self._draw_header,
            "status": lambda width, height: draw_status(self.state, width, height, self.look),
            "chart": self._draw_chart,
            "phases": lambda width, height: draw_phases(self.state, width, height, self.look),
            "throughput": lambda width, height: draw_throughput(
                self.state, width, height, self.look
            ),
            "metrics": self._draw_metrics,
            "ranks": self._draw_ranks,
            "communication": lambda width, height: draw_communication(
                self.state, width, height, self.look
            ),
            "events": lambda width, height: draw_events(self.state, width, height, self.look),
            "keys": lambda width, height: [draw_keys(self._keys(), width)],
        }
        for name, draw in panels.items():
            yield Panel(draw, id=name)

    def on_mount(self) -> None:
        """Look again at once, for the first look leaves out what is slow, then every second."""
        self._arrange()
        if self._interval_s is not None:
            self.call_after_refresh(self._start_look)
            self.set_interval(self._interval_s, self._start_look)

    def on_resize(self) -> None:
        """Give every panel its new place."""
        self._arrange()

    def on_unmount(self) -> None:
        """Detach from the job."""
        self._source.close()

    async def look_again(self) -> None:
        """Read the source in a thread and post what it saw; keys work meanwhile."""
        try:
            observation = await asyncio.to_thread(self._source.read)
        except (TelemetryError, OSError) as error:
            self.post_message(self.Lost(str(error) or type(error).__name__))
        else:
            self.post_message(self.Seen(observation))

    def on_overview_screen_seen(self, message: Seen) -> None:
        """Fold one observation; a held screen keeps what it shows."""
        self._take(fold(self._newest, message.observation))

    def on_overview_screen_lost(self, message: Lost) -> None:
        """Keep the last data, and say that they are the last."""
        if self._newest is not None:
            self._take(fold_loss_of_source(self._newest, message.reason))

    def action_toggle_pause(self) -> None:
        """Hold the screen, or go on with the newest state."""
        self.view = msgspec.structs.replace(self.view, is_paused=not self.view.is_paused)
        if not self.view.is_paused:
            self._shown = self._newest
        self._arrange()

    def action_next_metric(self, by: int) -> None:
        """Show another metric in the chart."""
        names = metric_names(self.state)
        if names:
            place = names.index(self.view.metric) if self.view.metric in names else 0
            metric = names[(place + by) % len(names)]
            self.view = msgspec.structs.replace(self.view, metric=metric)
            self.paint()

    def action_scroll_ranks(self, by: int) -> None:
        """Move the window over the ranks; at its ends nothing happens."""
        panel = self.query_one("#ranks", Panel)
        hidden = len(self.state.job.ranks) - panel.size.height + 1 + self.look.has_headings
        first = min(max(0, self.view.first_rank + by), max(0, hidden))
        self.view = msgspec.structs.replace(self.view, first_rank=first)
        self.paint()

    def action_first_rank(self) -> None:
        """Scroll the ranks to their beginning."""
        self.view = msgspec.structs.replace(self.view, first_rank=0)
        self.paint()

    def _start_look(self) -> None:
        # Exclusive: where one look takes longer than the interval, the next waits its turn.
        if not any(worker.group == "look" and worker.is_running for worker in self.workers):
            self.run_worker(self.look_again(), group="look", exit_on_error=True)

    def _take(self, state: State) -> None:
        self._newest = state
        if not self.view.is_paused:
            self._shown = state
            self._arrange()

    def _arrange(self) -> None:
        """Put the panels where the plan wants them, and draw them."""
        width, height = self.size
        plan = plan_overview(width, height, self._contents(width))
        for panel in self.query(Panel):
            region = plan.get(panel.id)  # type: ignore[call-overload]
            panel.display = region is not None
            if region is not None:
                _place(panel, region)
        self.paint()

    def _contents(self, width: int) -> Contents:
        state = self.state
        split = phase_split(state.job)
        rates = (state.job.samples_per_second, state.job.tokens_per_second)
        return Contents(
            status_lines=status_height(state, width, self.look),
            units=max(1, sum(rate is not None for rate in rates)),
            phases=len(split.phases) if split is not None else 1,
            metrics=len(newest_metrics(state)),
            ranks=len(state.job.ranks),
            traffic=len(traffic_rows(state.job)) + (state.job.communication_note is not None),
            events=len(event_rows(state.job.events)),
        )

    def _keys(self) -> list[tuple[str, str]]:
        keys = [
            ("q", "detach"),
            ("?", "help"),
            ("space", "resume" if self.view.is_paused else "pause"),
            ("m", "metric"),
            ("t", "theme"),
        ]
        if self.dashboard.has_jobs:
            keys.append(("0", "jobs"))
        return keys

    def _metric(self) -> str | None:
        names = metric_names(self.state)
        if self.view.metric in names:
            return self.view.metric
        return names[0] if names else None

    def _draw_header(self, width: int, height: int) -> list[Line]:
        return draw_header(self.state, width, height, self.look, is_paused=self.view.is_paused)

    def _draw_chart(self, width: int, height: int) -> list[Line]:
        return draw_chart(self.state, width, height, self.look, metric=self._metric())

    def _draw_metrics(self, width: int, height: int) -> list[Line]:
        return draw_metrics(self.state, width, height, self.look, selected=self._metric())

    def _draw_ranks(self, width: int, height: int) -> list[Line]:
        return draw_ranks(self.state, width, height, self.look, first=self.view.first_rank)


def _place(panel: Panel, region: Region) -> None:
    panel.styles.offset = (region.x, region.y)
    panel.styles.width = region.width
    panel.styles.height = region.height

"""A job on the screen, without a screen."""

from collections.abc import Iterable

import pytest

from boltmesh.errors import TelemetryError
from boltmesh.tui.alerts.watch import Alert
from boltmesh.tui.session import MAX_ALERTS, WHOLE_JOB, Lost, Session
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State
from boltmesh.tui.view import TableView, View
from tests.tui.samples import NOW, FakeSource, job, losses


def _seen(number: int) -> Observation:
    return Observation(NOW + number, job(history=losses(float(number), first=number)))


def _alert(number: int, *, rank: int | None = 0, is_resolved: bool = False) -> Alert:
    return Alert(
        time=NOW + number,
        job="abc123",
        name="sample",
        kind="memory",
        message=f"number {number}",
        rank=rank,
        is_resolved=is_resolved,
    )


class FakeWatch:
    """Raises what it was given, once."""

    def __init__(self, *alerts: tuple[Alert, ...]) -> None:
        self._waiting = list(alerts)

    def update(self, state: State) -> tuple[Alert, ...]:
        return self._waiting.pop(0) if self._waiting else ()


class FakeHook:
    """Keeps what it is sent."""

    def __init__(self, *failures: Alert) -> None:
        self.sent: list[Alert] = []
        self._failures = failures

    def send(self, alerts: Iterable[Alert]) -> None:
        self.sent += alerts

    def failures(self) -> tuple[Alert, ...]:
        failures, self._failures = self._failures, ()
        return failures


def _look(session: Session) -> int:
    return session.take(session.look())


def _state(session: Session) -> State:
    assert session.state is not None
    return session.state


def test_nothing_is_known_before_the_first_look() -> None:
    session = Session(FakeSource(_seen(1)))
    states = [session.state]
    assert _look(session) == 0
    assert states == [None]
    assert _state(session).series["loss"].steps == (1,)


def test_a_held_session_shows_what_it_showed_and_misses_nothing() -> None:
    session = Session(FakeSource(*map(_seen, (1, 2, 3))))
    _look(session)
    held = _state(session)
    session.toggle_pause()
    _look(session)
    _look(session)
    assert session.state is held
    session.toggle_pause()
    assert _state(session).series["loss"].steps == (1, 2, 3)


def test_a_source_that_goes_away_leaves_the_last_data_and_comes_back() -> None:
    source = FakeSource(_seen(1), _seen(2))
    session = Session(source)
    _look(session)
    source.lost = "connection closed"
    _look(session)
    assert _state(session).lost == "connection closed"
    assert _state(session).series["loss"].steps == (1,)
    source.lost = None
    _look(session)
    assert _state(session).lost is None
    assert _state(session).series["loss"].steps == (1, 2)


def test_a_source_that_is_not_there_yet_says_what_is_waited_for() -> None:
    source = FakeSource(_seen(1))
    session = Session(source)
    source.lost = "connecting to node7"
    _look(session)
    assert (session.state, session.waiting_for) == (None, "connecting to node7")
    source.lost = None
    _look(session)
    assert session.waiting_for is None
    assert _state(session).job.id == "abc123"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TelemetryError("job.json is gone"), "job.json is gone"),
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
        (ValueError(), "ValueError"),
    ],
)
def test_whatever_a_look_raises_is_an_answer(error: Exception, reason: str) -> None:
    source = FakeSource(_seen(1))

    def fail() -> Observation:
        raise error

    source.read = fail
    assert Session(source).look() == Lost(reason)


def test_alerts_stand_among_the_events_and_stay_there() -> None:
    watch = FakeWatch((_alert(1, rank=3), _alert(2, rank=None)), (), (_alert(3, is_resolved=True),))
    session = Session(FakeSource(_seen(1)), watch=watch)
    assert _look(session) == 2
    events = _state(session).job.events
    assert [(event.rank, event.kind, event.message) for event in events] == [
        (3, "warning", "alert: number 1"),
        (WHOLE_JOB, "warning", "alert: number 2"),
    ]
    assert _look(session) == 0
    assert _state(session).job.events == events
    # The end of a condition is told, and wakes nobody.
    assert _look(session) == 0
    assert _state(session).job.events[-1].message == "alert is over: number 3"


def test_no_number_of_alerts_fills_the_memory() -> None:
    alerts = tuple(_alert(number) for number in range(MAX_ALERTS + 50))
    session = Session(FakeSource(_seen(1)), watch=FakeWatch(alerts))
    _look(session)
    events = _state(session).job.events
    assert len(events) == MAX_ALERTS
    assert events[-1].message == f"alert: number {MAX_ALERTS + 49}"


def test_the_hook_is_sent_every_alert_and_its_failures_are_told() -> None:
    raised, over = _alert(1), _alert(2, is_resolved=True)
    hook = FakeHook(_alert(3))
    session = Session(FakeSource(_seen(1)), watch=FakeWatch((raised, over)), hook=hook)
    _look(session)
    assert hook.sent == [raised, over]
    assert _state(session).job.events[-1].message == "alert: number 3"


class FakeRecording(FakeSource):
    """A source that can be moved in."""

    def __init__(self, *observations: Observation) -> None:
        super().__init__(*observations)
        self.is_playing = True
        self.speed = 1.0
        self.position = NOW

    def span(self) -> tuple[float, float]:
        return NOW, NOW + 60

    def play(self) -> None:
        self.is_playing = True

    def pause(self) -> None:
        self.is_playing = False

    def seek(self, time: float) -> None:
        self.position = time

    def step(self, by: int) -> None:
        self.position += by


def test_a_recording_is_stopped_and_played_instead_of_held() -> None:
    source = FakeRecording(_seen(1))
    session = Session(source)
    assert session.recording is source
    session.toggle_pause()
    assert not source.is_playing
    assert not session.view.is_paused
    session.toggle_pause()
    assert source.is_playing


def test_alerts_of_a_recording_ring_no_bell_and_go_when_it_is_rewound() -> None:
    rewound = Observation(NOW + 5, job(), is_rewound=True)
    source = FakeRecording(_seen(9), rewound)
    watch = FakeWatch((_alert(4), _alert(9)))
    session = Session(source, watch=watch)
    assert _look(session) == 0
    assert len(_state(session).job.events) == 2
    _look(session)
    assert [event.message for event in _state(session).job.events] == ["alert: number 4"]


def test_choices_of_one_table_leave_the_others_alone() -> None:
    session = Session(FakeSource(_seen(1)), view=View(tables={"events": TableView(filter="x")}))
    session.look_at_table("ranks", selected=3)
    session.look_at_table("ranks", sort="loss")
    assert session.view.table("ranks") == TableView(selected=3, sort="loss")
    assert session.view.table("events") == TableView(filter="x")


def test_closing_twice_closes_the_source_once() -> None:
    source = FakeSource(_seen(1))
    closed: list[bool] = []
    source.close = lambda: closed.append(True)
    session = Session(source)
    session.close()
    session.close()
    assert closed == [True]

"""Page 7: events, and the ranks missing from a collective that does not advance."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import (
    Page,
    Panel,
    Scene,
    Table,
    place,
    table_draw,
    with_trends,
)
from boltmesh.tui.layout.region import VERY_WIDE, Item, Region, stack
from boltmesh.tui.panels import events, sequences
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.render.tabs import Tab

SEQUENCES = Table(
    name="sequences",
    columns=sequences.COLUMNS,
    draw=sequences.draw_sequences,
    rows=sequences.shown_groups,
)
EVENTS = Table(
    name="events",
    columns=events.COLUMNS,
    draw=events.draw_event_table,
    rows=events.shown_events,
    rank_of=lambda row: _first_rank(row.ranks),
)


def _first_rank(ranks: Sequence[int]) -> int | None:
    """Return the lowest of the ranks; an event of the job as a whole has none."""
    return min((rank for rank in ranks if rank >= 0), default=None)


class EventsPage(Page):
    """The groups' sequence numbers above or at the left, the events below or at the right."""

    tab = Tab("events", "Events", key="7", short_title="Evt")
    help = PageHelp(
        about="events and hangs: what happened, and who is missing in a collective",
        terms=(
            ("sequence", "counts the collectives that a rank has entered in a group;"),
            ("", "a rank that is behind the others is the one they wait for"),
        ),
    )
    tables = (EVENTS, SEQUENCES)
    keys = (("enter", "its rank"), ("o", "other table"))

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The sequences have at most half of the screen."""
        state, view = scene.state, scene.view
        draw = table_draw(SEQUENCES, scene)
        rows = len(EVENTS.rows(state, view.table(EVENTS.name)))
        names = ("step_s", "tokens_per_s")
        if scene.width >= VERY_WIDE:
            left, right = body.split(45)
            needed = max(len(draw(left.width, body.height)), scene.title + 1 + rows)
            body, trends = with_trends(scene, body, needed, names)
            left, right = body.split(45)
            plan = {"sequences": left, "events": right}
        else:
            groups = len(SEQUENCES.rows(state, view.table(SEQUENCES.name)))
            needed = len(draw(body.width, body.height)) + scene.title + 1 + rows
            body, trends = with_trends(scene, body, needed, names)
            least = min(scene.title + 3, body.height // 2)
            half = max(least, body.height // 2)
            plan = stack(
                body,
                (
                    Item("sequences", least, scene.title + 2 + groups, 2),
                    Item(
                        "events", scene.title + 2, min(scene.title + 1 + rows, half), 1, grows=True
                    ),
                ),
            )
        draws = {
            "sequences": draw,
            "events": table_draw(EVENTS, scene),
        }
        return [*place(plan, draws), *trends]


PAGE: Final[Page] = EventsPage()

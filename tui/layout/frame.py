"""A page within its frame: header, tabs, the time of a replay, and the line of keys."""

from collections.abc import Sequence

import msgspec

from boltmesh.tui.layout.page import JOBS, Draw, Keys, Page, Panel, Scene, active_table
from boltmesh.tui.layout.region import Region, plan_frame
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.panels.header import draw_header, draw_headline, draw_timeline
from boltmesh.tui.render.line import Line, fit
from boltmesh.tui.render.style import Style, heading, sentence
from boltmesh.tui.render.tabs import Tab, draw_keys, draw_tabs, fits
from boltmesh.tui.session import Recording, Session


class FrameOptions(msgspec.Struct, frozen=True):
    """Options that only the screen knows."""

    page: Page
    note: str = ""
    has_jobs: bool = False
    """Whether there is a list of jobs to go to."""
    has_page_before: bool = False
    """Whether esc goes back to another page."""
    has_prompt: bool = False
    """Whether the filter is being typed, on the line of the keys."""


def frame_panels(
    session: Session, front: FrameOptions, width: int, height: int, look: Style
) -> list[Panel]:
    """Return all panels of the screen of a job."""
    state, recording = session.state, session.recording
    if state is None:
        return _waiting(session, width, height)
    frame = plan_frame(width, height, has_time=recording is not None)
    scene = Scene(state=state, view=session.view, look=look, width=width)
    empty = [name for name, page in PAGES.items() if page.empty_reason(state)]
    draws: dict[str, Draw] = {
        "header": lambda width, height: draw_header(
            state, width, height, look, is_paused=session.view.is_paused
        ),
        "headline": lambda width, _: [draw_headline(state, width, look)],
        "tabs": lambda width, _: [
            draw_tabs(
                shown_tabs(front.page, width, has_jobs=front.has_jobs),
                front.page.tab.name,
                width,
                look,
                empty=empty,
            )
        ],
        "keys": lambda width, _: [_bottom(session, front, width, look)],
    }
    if recording is not None:
        draws["time"] = _time(recording, look)
    panels = [
        Panel(name, region, draws[name])
        for name, region in frame.panels.items()
        if not (name == "keys" and front.has_prompt)
    ]
    if frame.body.width > 0 and frame.body.height > 0:
        reason = front.page.empty_reason(state)
        panels += (
            [Panel("empty", frame.body, _empty(front.page.tab.title, reason, look))]
            if reason
            else front.page.panels(scene, frame.body)
        )
    return panels


def frame_tabs(*, has_jobs: bool) -> list[Tab]:
    """Return the tabs of all screens, with that of the list of jobs where there is one."""
    return [*PAGES.tabs, JOBS] if has_jobs else [*PAGES.tabs]


def shown_tabs(page: Page, width: int, *, has_jobs: bool) -> list[Tab]:
    """Return the tabs on the screen of a page: all that fit, or digits and the page itself."""
    tabs = frame_tabs(has_jobs=has_jobs)
    others = [each.tab for each in PAGES.values() if each.tab not in tabs]
    if fits([*tabs, *others], width):
        return [*tabs, *others]
    return tabs if page.tab in tabs else [*tabs, page.tab]


def page_keys(session: Session, page: Page) -> Keys:
    """Return the keys that work on a page, those that work everywhere last."""
    keys: list[tuple[str, str]] = [("q", "detach"), ("?", "help")]
    recording = session.recording
    if recording is not None:
        keys += [
            ("space", "pause" if recording.is_playing else "play"),
            ("[ ]", "10 s"),
            (", .", "one frame"),
        ]
    is_empty = session.state is not None and bool(page.empty_reason(session.state))
    keys += () if is_empty else page.keys
    table = active_table(page, session.view)
    if not is_empty and table is not None:
        keys += [("/", "filter"), ("s S", "sort")]
    if recording is None:
        keys.append(("space", "resume" if session.view.is_paused else "pause"))
    keys += [("g", "go to"), (":", "commands"), ("t", "theme")]
    return keys


def _bottom(session: Session, front: FrameOptions, width: int, look: Style) -> Line:
    if front.note:
        return Line(fit(front.note, width, ellipsis=look.glyphs.ellipsis), "warn")
    table = active_table(front.page, session.view)
    chosen = "" if table is None else session.view.table(table.name).filter
    if not chosen:
        return draw_keys(page_keys(session, front.page), width)
    line = Line("/ ", "accent").add(chosen, "strong").add("   ")
    escape = "back" if front.has_page_before else "all rows"
    return line.join(draw_keys((("esc", escape), ("/", "change")), width - line.width))


def _empty(title: str, reason: Sequence[str], look: Style) -> Draw:
    def draw(width: int, height: int) -> list[Line]:
        lines = [heading(title.lower(), width, look)] if look.has_headings else []
        for text in reason:
            lines += sentence(text, width, look, role="muted")
        return lines[:height]

    return draw


def _time(recording: Recording, look: Style) -> Draw:
    def draw(width: int, _: int) -> list[Line]:
        return [
            draw_timeline(
                recording.span(),
                recording.position,
                width,
                look,
                is_playing=recording.is_playing,
                speed=recording.speed,
            )
        ]

    return draw


def _waiting(session: Session, width: int, height: int) -> list[Panel]:
    """Before the first look nothing is known, not even the job's name."""
    reason = session.waiting_for or "reading the job"
    lines = (
        Line(reason, "muted"),
        Line(),
        draw_keys((("q", "leave"), ("0", "jobs")), width),
    )
    return [
        Panel(
            "waiting",
            Region(0, 0, width, height),
            lambda width, height: [line.crop(width) for line in lines][:height],
        )
    ]

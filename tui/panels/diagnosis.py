"""Findings in words: the worst one with its evidence and advice, the others in short.

Empty if there is no finding and the status is unremarkable. The status is shown if the job has
ended, can no longer be read, or has not begun.
"""

from collections.abc import Iterable

from rich.cells import cell_len

from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import Finding, Kind
from boltmesh.tui.metrics.status import Status, status
from boltmesh.tui.render.line import Line, Role, fit
from boltmesh.tui.render.style import Style, in_pieces
from boltmesh.tui.state import State

MAX_LINES = 3
UNCUT = 10_000
"""More lines than any text has."""


def _wrap_status(found: Status, width: int, look: Style, *, most: int = MAX_LINES) -> list[Line]:
    """The status in words, wrapped, with a sign before it."""
    glyphs = look.glyphs
    sign = {
        "muted": glyphs.absent,
        "good": glyphs.finished,
        "warn": "!",
        "bad": glyphs.failed,
    }[found.level]
    room = max(1, width - 2)
    rows = [""]
    words = Line(found.text).plain.split()
    for word in words if most < UNCUT else in_pieces(words, room):
        joined = f"{rows[-1]} {word}".strip()
        if Line(joined).width <= room:
            rows[-1] = joined
        else:
            rows.append(word)
    rows = [row for row in rows if row]
    if len(rows) > most:
        # The mark needs a cell of its own at the end of the last line that is kept.
        rows = [*rows[: most - 1], f"{rows[most - 1]} {rows[most]}"]
    lines = []
    for place, row in enumerate(rows):
        mark = look.sign(sign if place == 0 else " ")
        text = fit(row, room, ellipsis=glyphs.ellipsis)
        lines.append(Line(mark + text, found.level).crop(width))
    return lines


MAX_FINDINGS = 3
"""Further findings are most often consequences of these."""

LINES_OF_THE_WORST = 4
NARROW = 100
"""In fewer columns the worst finding has one line more."""
MORE_LINES_OF_AN_END = 2
"""The end of a run or its wait, and the checkpoint to resume from, are not cut."""

_TOLD_BY_STATUS: frozenset[Kind] = frozenset({"crashed", "loss", "stalled"})


def draw_diagnosis(state: State, width: int, height: int, look: Style) -> list[Line]:
    """The findings, the most severe first; no line if there are none.

    ``diagnosis_text`` has them uncut.
    """
    findings = diagnose(state)
    lines = _status_lines(state, findings, width, look)[: max(0, height)]
    room = height - len(lines)
    if room < 1:
        return lines
    shown: list[Line] = []
    for place, finding in enumerate(findings[:MAX_FINDINGS]):
        left = room - len(shown)
        if left < 1:
            break
        most = min(left, _lines_of_worst(finding, width) if place == 0 else 1)
        drawn = _draw_finding(finding, width, most, look)
        if place == 0 and len(drawn) == left and len(findings) > 1:
            drawn = _draw_finding(finding, width, most, look, num_hidden=len(findings) - 1)
        shown += drawn
    return lines + shown


def _lines_of_worst(finding: Finding, width: int) -> int:
    is_end = finding.severity == "bad" or finding.kind == "stalled"
    return LINES_OF_THE_WORST + (width < NARROW) + MORE_LINES_OF_AN_END * is_end


def diagnosis_text(state: State, width: int, look: Style) -> list[Line]:
    """Every finding in full, for text that has no height."""
    findings = diagnose(state)
    lines = []
    found = status(state)
    if found is not None and _status_lines(state, findings, width, look):
        lines += _wrap_status(found, width, look, most=UNCUT)
    for finding in findings:
        lines += _draw_finding(finding, width, UNCUT, look)
    return lines


def diagnosis_lines(state: State, width: int, look: Style) -> int:
    """How many lines the diagnosis needs."""
    most = MAX_FINDINGS * LINES_OF_THE_WORST + MORE_LINES_OF_AN_END
    return len(draw_diagnosis(state, width, most, look))


def _status_lines(
    state: State, findings: tuple[Finding, ...], width: int, look: Style
) -> list[Line]:
    found = status(state)
    is_told = any(finding.kind in _TOLD_BY_STATUS for finding in findings)
    if found is None or (is_told and state.lost is None):
        return []
    return _wrap_status(found, width, look)


def _draw_finding(
    finding: Finding, width: int, most: int, look: Style, *, num_hidden: int = 0
) -> list[Line]:
    """The headline and the evidence, then the advice on a line of its own."""
    mark = look.sign(look.glyphs.failed if finding.severity == "bad" else "!")
    words: list[tuple[str, Role]] = [(word, finding.severity) for word in _words(finding.headline)]
    if num_hidden:
        more = f"(+{num_hidden} more finding{'s' * (num_hidden > 1)})"
        words += [(word, "muted") for word in _words(more)]
    if finding.evidence:
        facts = f" {look.glyphs.dot} ".join(finding.evidence)
        words += [(word, "muted") for word in _words(f"[{facts}]")]
    cure: list[tuple[str, Role]] = [("try:", "strong")]
    cure += [(word, "text") for word in _words(finding.advice)]
    room = max(1, width - cell_len(mark))
    ellipsis = look.glyphs.ellipsis
    if most == UNCUT:
        words = [(part, role) for word, role in words for part in in_pieces([word], room)]
        cure = [(part, role) for word, role in cure for part in in_pieces([word], room)]
    if most == 1:
        rows = _wrap([*words, *cure], room, 1, ellipsis)
    else:
        # The headline first, then the advice; the evidence gets the remaining lines.
        num_headline = len(_wrap(words[: len(_words(finding.headline))], room, most - 1, ellipsis))
        advice = _wrap(cure, room, most - num_headline, ellipsis)
        rows = _wrap(words, room, most - len(advice), ellipsis) + advice
    return [
        Line(mark if place == 0 else " " * cell_len(mark), finding.severity).join(row).crop(width)
        for place, row in enumerate(rows)
    ]


def _words(text: str) -> list[str]:
    return Line(text).plain.split()


def _wrap(words: Iterable[tuple[str, Role]], width: int, most: int, ellipsis: str) -> list[Line]:
    """Fill at most ``most`` lines; longer text is cut, with a mark."""
    lines = [Line()]
    for word, role in words:
        line = lines[-1]
        gap = 1 if line.width else 0
        if line.width + gap + cell_len(word) <= width:
            line.add(" " * gap + word, role)
            continue
        if len(lines) < most and line.width:
            lines.append(Line(fit(word, width, ellipsis=ellipsis), role))
            continue
        line.add(fit(" " * gap + word, width - line.width, ellipsis=ellipsis), role)
        if not line.plain.endswith(ellipsis):
            line.crop(max(0, width - cell_len(ellipsis))).add(ellipsis, role)
        break
    return [line.crop(width) for line in lines if line.width]

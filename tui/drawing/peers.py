"""Who sends how much to whom, as a matrix: rows send, columns receive."""

from boltmesh.tui import units
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.words import sentence
from boltmesh.tui.figures.peers import PeerMatrix, peer_matrix
from boltmesh.tui.state import State

GAP = 2
CELL_WIDTH = 7
"""``12.3 MB`` and shorter: figures of three digits and a unit."""

_LABEL_WIDTH = 8
_SHADE_WIDTH = 2


def draw_peers(state: State, width: int, height: int, look: Look) -> list[Line]:
    """The matrix with a figure and a shade in each cell; nothing where nobody talks to one other.

    Where there are too many ranks for that, the stages of the pipeline stand for them.
    """
    top = int(look.has_headings)
    # A line for the title and one for the receivers; the rest is one line a sender.
    max_rows = min((width - _LABEL_WIDTH) // (_SHADE_WIDTH + CELL_WIDTH + GAP), height - top - 2)
    matrix = peer_matrix(state.job, max_rows=max_rows)
    if matrix is None or len(matrix.labels) < 2:
        whole = peer_matrix(state.job, max_rows=1)
        return [] if whole is None else _in_words(whole, width, height, look)
    lines = _matrix(matrix, width, look)
    title = "point to point, bytes per step from row to column"
    if not look.has_headings:
        return [Line(title, "muted").crop(width), *lines][:height]
    about = Line(units.traffic(matrix.total_bytes), "strong")
    about.add(f" in all, among {_unit_words(matrix)}", "muted")
    return [heading(title, width, look), about.crop(width), *lines][:height]


def _in_words(matrix: PeerMatrix, width: int, height: int, look: Look) -> list[Line]:
    """One sentence, where not even one cell fits."""
    text = f"point to point: {units.traffic(matrix.total_bytes)} per step"
    return sentence(text, width, look, role="muted", max_lines=height)


def _unit_words(matrix: PeerMatrix) -> str:
    count = len(matrix.labels)
    return {
        "rank": f"{count} ranks",
        "ranks": f"{count} runs of ranks, added up",
        "stage": f"{count} pipeline stages, their ranks added up",
        "stages": f"{count} runs of pipeline stages, their ranks added up",
    }[matrix.unit]


def _matrix(matrix: PeerMatrix, width: int, look: Look) -> list[Line]:
    size = max(CELL_WIDTH, *(len(units.traffic(cell)) for cell in matrix.cells.values()))
    word = "rank" if matrix.unit in {"rank", "ranks"} else "stage"
    labels = [f"{word} {label}" for label in matrix.labels]
    label_width = max(map(len, labels))
    header = Line(" " * label_width, "muted")
    for label in labels:
        header.add(" " * GAP).add(label.rjust(_SHADE_WIDTH + size), "muted")
    lines = [header.crop(width)]
    for sender, label in enumerate(labels):
        line = Line(label.ljust(label_width), "muted")
        for receiver in range(len(labels)):
            line.add(" " * GAP).join(_cell(matrix, sender, receiver, size, look))
        lines.append(line.crop(width))
    return lines


def _cell(matrix: PeerMatrix, sender: int, receiver: int, size: int, look: Look) -> Line:
    """A shade by the share of the busiest pair, and the figure; a dot where nothing is sent."""
    if (sender, receiver) not in matrix.cells:
        return Line(look.glyphs.dot.rjust(_SHADE_WIDTH + size), "faint")
    sent = matrix.cells[sender, receiver]
    if sent is None:
        return Line("counting".rjust(_SHADE_WIDTH + size), "muted")
    levels = look.glyphs.levels
    share = sent / matrix.most_bytes if matrix.most_bytes else 0.0
    shade = levels[round(share * (len(levels) - 1))]
    return Line(shade, "chart").add(units.traffic(sent).rjust(size + _SHADE_WIDTH - 1))

"""The help page: keys, and what the figures mean."""

from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, heading

KEYS = (
    ("q", "detach; the job goes on"),
    ("space", "hold the screen still; nothing is lost meanwhile"),
    ("m M", "next, previous metric in the chart"),
    ("j k", "scroll the ranks; also the arrows, page up and down, home"),
    ("0 esc", "the other jobs on this host"),
    ("t", "next theme: night, day, terminal, mono"),
    ("?", "this page"),
)

FIGURES = (
    ("step time", "mean of the last 20 steps over all ranks; communication is"),
    ("", "only the part that no computation hides"),
    ("util", "GPU: share of time in which any kernel ran, by NVML"),
    ("", "CPU: of the rank's process, where 100% is one core"),
    ("memory", "GPU: used by all processes on it; CPU: resident"),
    ("payload", "bytes that the operators were given in one optimizer step,"),
    ("", "the mean over the ranks"),
    ("wire", "bytes on the wire while they ran, for a ring algorithm"),
    ("expected", "what the strategy says that a step moves; a difference is"),
    ("", "marked from the third step on"),
    ("-", "not known, which is never the same as zero"),
)


def draw_help(width: int, height: int, look: Look, *, first: int = 0) -> list[Line]:
    """The page from its line ``first`` on."""
    return help_lines(width, look)[first:][:height]


def help_lines(width: int, look: Look) -> list[Line]:
    """The whole page."""
    lines = [heading("keys", width, look)]
    lines += [Line(key.ljust(12), "accent").add(text).crop(width) for key, text in KEYS]
    lines += [Line(), heading("figures", width, look)]
    lines += [Line(word.ljust(12), "strong").add(text).crop(width) for word, text in FIGURES]
    return lines

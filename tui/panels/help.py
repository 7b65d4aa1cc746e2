"""The help page: what is on the screen that the reader comes from, its keys, all other keys."""

from collections.abc import Mapping

from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Style, heading

Entries = tuple[tuple[str, str], ...]
"""A word and what it means; an empty word goes on with the line above."""

ABOUT: Mapping[str, str] = {
    "overview": "overview: what the job achieves, where its time goes, what holds it back",
    "ranks": "ranks: a line for each process of the job",
    "communication": "communication: what the ranks send to each other, beside what they should",
    "pipeline": "pipeline: when the stages work and when they wait",
    "devices": "devices: GPUs and processes, as the host that shows this sees them",
    "memory": "memory: what it is used for, beside what was predicted",
    "events": "events and hangs: what happened, and who is missing in a collective",
    "mesh": "mesh: every rank in one figure, laid out by pipeline, data and tensor",
    "plan": "plan: how layers are divided over the tensor axis, and why",
    "jobs": "jobs: yours on this host, running and ended",
}

KEYS_OF: Mapping[str, Entries] = {
    "overview": (
        ("m M", "next, previous metric in the chart"),
        ("y", "logarithmic axis of the chart, and back"),
        ("f F", "next, previous figure of the ranks"),
        ("hjkl", "choose a rank; enter shows it in full"),
    ),
    "ranks": (("enter", "the selected rank in full; there j k go through the ranks"),),
    "devices": (("tab", "the keys work on the other table"),),
    "mesh": (
        ("f F", "next, previous figure of the ranks"),
        ("hjkl", "choose a rank, also the arrows; enter shows it in full"),
    ),
    "plan": (("j k", "choose a row, which is then told in full"),),
    "jobs": (("enter", "attach to the job"),),
}

KEYS: Entries = (
    ("1 - 9", "the screens; h l and left right go to the one beside"),
    ("0", "the jobs on this host"),
    ("q", "detach; the job goes on"),
    ("esc", "back: from a rank, a filter, a screen"),
    ("j k", "choose a row; also the arrows, page up and down, home, end"),
    ("enter", "the rank that the row is about, in full"),
    ("/", "only the rows with these words; enter keeps it, esc ends it;"),
    ("", "column=text, column>number and column<number look at one column"),
    ("s S", "sort by the next column, sort the other way round"),
    ("space", "hold the screen still; nothing is lost meanwhile"),
    (": ctrl+p", "all commands by name"),
    ("t", "next theme: night, day, terminal, mono"),
    ("?", "this page"),
    ("mouse", "click a tab, a title to sort, a row or a rank to choose it, twice"),
    ("", "to see it in full; --no-mouse leaves the mouse to the terminal"),
)

REPLAY_KEYS: Entries = (
    ("space", "stop, play"),
    ("[ ]", "10 seconds back, on"),
    (", .", "one look back, on"),
    ("- +", "slower, faster"),
)

_STEP_TIME: Entries = (
    ("step time", "mean of the last 20 steps over all ranks; communication is"),
    ("", "only the part that no computation hides"),
)
_DEVICES: Entries = (
    ("util", "GPU: share of time in which any kernel ran, by NVML"),
    ("", "CPU: of the rank's process, where 100% is one core"),
    ("memory", "GPU: used by all processes on it; CPU: resident"),
)
_TRAFFIC: Entries = (
    ("payload", "bytes that the operators were given in one optimizer step,"),
    ("", "the mean over the ranks"),
    ("wire", "bytes on the wire while they ran, for a ring algorithm"),
    ("expected", "what the strategy says that a step moves; a difference is"),
    ("", "marked from the third step on"),
)

FIGURES_OF: Mapping[str, Entries] = {
    "overview": (
        *_STEP_TIME,
        ("MFU", "model FLOPs a second, as a share of what the devices can do"),
        *_TRAFFIC,
    ),
    "ranks": (*_STEP_TIME[:1], *_DEVICES),
    "communication": _TRAFFIC,
    "pipeline": (
        ("bubble", "share of the stages' common time in which a stage is idle"),
        ("structural", "what the schedule costs even with equal stages"),
        ("imbalance", "what unequal stages add to it"),
        ("excess", "what is left: communication, host, noise"),
    ),
    "devices": _DEVICES,
    "memory": (
        ("predicted", "what the strategy said before training"),
        ("cache", "held for the next tensors, and unused"),
        ("other", "the rest of what the process holds"),
        ("offload", "what goes between the device, the host and the disk:"),
        ("", "median of the ranks; busy is the rank where it takes longest"),
    ),
    "mesh": (
        ("own time", "of a step without waiting: the late rank has the longest"),
        ("bubble", "idle share of the newest step of a rank's pipeline"),
        ("bytes/s", "payload of all operators, over the time of a step"),
        ("by place", "mean of the ranks at one place of an axis, beside that of all"),
        ("measured", "bytes of one step on one axis, the mean over the ranks"),
        ("expected", "what the strategy says that a step moves"),
    ),
    "plan": (
        ("style", "column and row: of a product outputs, inputs; vocabulary: tokens;"),
        ("", "whole: every rank has all of it"),
        ("parts", "of the divided dimension, as count x size: 3x24x128 are three"),
        ("", "times 24 parts of 128, and each rank has some of the 24"),
        ("per rank", "bytes that one rank keeps, of all parameters of the row together"),
        ("each step", "what they make the ranks of the axis sum or gather"),
        *_TRAFFIC,
    ),
    "events": (
        ("sequence", "counts the collectives that a rank has entered in a group;"),
        ("", "a rank that is behind the others is the one they wait for"),
    ),
}

NOT_KNOWN: Entries = (("-", "not known, which is never the same as zero"),)
_WORD_WIDTH = 12


def draw_help(about: str, width: int, height: int, look: Style, *, first: int = 0) -> list[Line]:
    """The page from its line ``first`` on."""
    return help_lines(about, width, look)[first:][:height]


def help_lines(about: str, width: int, look: Style) -> list[Line]:
    """The whole page, about one screen."""
    lines = [heading(ABOUT.get(about, about), width, look)]
    lines += _entries(KEYS_OF.get(about, ()), "accent", width)
    lines += _entries((*FIGURES_OF.get(about, ()), *NOT_KNOWN), "strong", width)
    lines += [Line(), heading("keys on every screen", width, look)]
    lines += _entries(KEYS, "accent", width)
    lines += [Line(), heading("keys of a replay", width, look)]
    lines += _entries(REPLAY_KEYS, "accent", width)
    return lines


def _entries(entries: Entries, role: Role, width: int) -> list[Line]:
    return [Line(word.ljust(_WORD_WIDTH), role).add(text).crop(width) for word, text in entries]

"""Where the code of a thread stands, in the words of a traceback."""

import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from traceback import FrameSummary
from types import FrameType
from typing import Final, NamedTuple

MAX_FRAMES: Final = 8
MAX_LINE: Final = 100

_OWN: Final = "boltmesh"
_EXAMPLES: Final = "boltmesh.examples"
_COUNTING: Final = os.path.join("boltmesh", "telemetry", "recording")


class Place(NamedTuple):
    """Where a thread is."""

    text: str
    """``train.py:31 in training_step: time.sleep(600)``, and in which library, where it is."""
    stack: tuple[str, ...]
    is_in_library: bool


def place_of(thread: int) -> Place | None:
    """Return where a thread of this process stands; None where there is no such thread."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, and the only way
    if frame is None:
        return None
    innermost_first = [(each, line) for each, line in traceback.walk_stack(frame)]
    are_users = [_is_users(each) for each, _ in innermost_first]
    summary = traceback.StackSummary.extract(iter(innermost_first), lookup_lines=True)
    return describe(summary, are_users)


def describe(frames: Sequence[FrameSummary], are_users: Sequence[bool]) -> Place:
    """Say where frames are, the innermost first, of which some are of the user's own code."""
    users = [frame for frame, is_users in zip(frames, are_users, strict=True) if is_users]
    # Collectives pass through what counts them, which is of no interest.
    innermost = next((each for each in frames if _COUNTING not in each.filename), frames[0])
    is_in_library = not are_users[0]
    if not users:
        return Place(_tell(innermost), (_tell(innermost),), is_in_library)
    text = _tell(users[0])
    if is_in_library:
        text += f" (inside {_file(innermost.filename)}:{innermost.lineno} in {innermost.name})"
    stack = tuple(_tell(frame) for frame in reversed(users[:MAX_FRAMES]))
    return Place(text, stack, is_in_library)


def _tell(frame: FrameSummary) -> str:
    line = (frame.line or "").strip()
    line = line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."
    place = f"{_file(frame.filename)}:{frame.lineno} in {frame.name}"
    return f"{place}: {line}" if line else place


def _file(name: str) -> str:
    """Return a path as short as it can be found by: of a library from its package on."""
    for folder in _LIBRARIES:
        if name.startswith(folder):
            return name[len(folder) :]
    return os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name


def _is_users(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] == _OWN and not module.startswith(_EXAMPLES):
        return False
    name = frame.f_code.co_filename
    return not name.startswith(("<", *_LIBRARIES))


def _library_folders() -> tuple[str, ...]:
    """Return where the standard library and what is installed lies, the longest path first."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {os.path.realpath(each) for each in folders}
    return tuple(sorted((each + os.sep for each in folders), key=len, reverse=True))


_LIBRARIES: Final = _library_folders()

"""What a command says, and how it ends."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator

from boltmesh.errors import BoltMeshError
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.sanitize import clean

OK = 0
INTERRUPTED = 130

DEFAULT_WIDTH = 100
"""Of a summary that goes to a file or a pipe, unless COLUMNS says otherwise."""


@contextlib.contextmanager
def as_exit_code() -> Iterator[Callable[[], int]]:
    """Turn what a viewer may raise into one line on stderr and an exit code."""
    code = OK
    try:
        yield lambda: code
    except BoltMeshError as error:
        narrate(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has seen enough, as `head` does. Python would complain once more
        # when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal_look(*, ascii_only: bool) -> Style:
    """Headings and signs are for the eye; in a summary words say the same."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    is_ascii = ascii_only or not encoding.startswith("utf") or os.environ.get("TERM") == "linux"
    return Style(ASCII if is_ascii else UNICODE, has_headings=False, has_signs=False)


def width() -> int:
    """Return how wide a summary may be."""
    return max(20, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def print_line(text: str) -> None:
    """Write a line of data."""
    write(text + "\n")


def write(text: str) -> None:
    """Write data as they are, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def narrate(text: str) -> None:
    """Say a line that is no data."""
    sys.stderr.write(f"boltmesh: {clean(text)}\n")

"""Output of a command, and its exit code."""

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
"""Columns of a summary that goes to a file or a pipe, unless COLUMNS says otherwise."""


@contextlib.contextmanager
def as_exit_code() -> Iterator[Callable[[], int]]:
    """Turn the errors of a viewer into one line on stderr and an exit code."""
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
    has_unicode = encoding.startswith("utf") and not _is_c_locale()
    is_ascii = ascii_only or not has_unicode or os.environ.get("TERM") == "linux"
    return Style(ASCII if is_ascii else UNICODE, has_headings=False, has_signs=False)


def _is_c_locale() -> bool:
    """Say whether the user has set the C locale, in which Python still uses UTF-8.

    Source: https://peps.python.org/pep-0538/, https://peps.python.org/pep-0540/.
    """
    names = os.environ
    if names.get("PYTHONUTF8") == "1" or names.get("PYTHONIOENCODING"):
        return False
    # Python itself sets LC_CTYPE to C.UTF-8 where it was not set.
    own = names.get("LC_CTYPE", "").replace("C.UTF-8", "")
    return (names.get("LC_ALL") or own or names.get("LANG")) in {"C", "POSIX"}


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
    """Print a line that is no data, on stderr."""
    sys.stderr.write(f"boltmesh: {clean(text)}\n")

"""Lets a test that measures time have the machine to itself while pytest-xdist runs others.

Each process of one run passes a turnstile before each test and then holds the room: shared, or
alone for a test marked so. Who waits for an empty room stands in the turnstile, so that nobody
new comes in meanwhile. Locks end with their process, whatever it dies of.
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def taking_turns(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the room of a run of pytest, whose processes share that folder."""
    with ExitStack() as stack:
        turnstile, room = (
            stack.enter_context((folder / name).open("w")) for name in ("turnstile", "room")
        )
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield

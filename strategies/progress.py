"""Lines about phases before the first step that take longer than two seconds."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from boltmesh.lightning_import import logger

AFTER_S = 2.0


@contextmanager
def long_phase(text: str, *, is_shown: bool) -> Iterator[None]:
    """Log what a phase does if it takes longer than two seconds, and how long it took.

    Args:
        text: What the phase does, such as "verifies the tensor plan".
        is_shown: Whether this rank logs; one of a job does.
    """
    if not is_shown:
        yield
        return
    log, started = logger(), time.monotonic()
    timer = threading.Timer(AFTER_S, log.info, [f"boltmesh: {text} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        seconds = time.monotonic() - started
        if seconds > AFTER_S:
            log.info("boltmesh: %s: %.1f s", text, seconds)

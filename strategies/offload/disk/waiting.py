"""What both stores share: a lock to wait at, and the first error, which every call then raises."""

import threading
from collections.abc import Callable


class Waiting:
    """Base of a store whose transfers end on other threads than those that use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait, with the lock held, for other threads to make something so, or to fail."""
        self._raise_error()
        while not is_so():
            self._changed.wait()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

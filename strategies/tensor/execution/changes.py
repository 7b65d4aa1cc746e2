"""What a plan puts on a model's modules, and how it comes off again.

Wrappers stand on instances, in the place of a method; classes, parameters and names stay as they
are. A wrapper around ``forward``, and no hook, changes what a module takes, gives and reads: it
also runs where activation checkpointing repeats a block, and is left where the block raises.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn import Module

Around = Callable[..., Any]
"""Called with the method that it wraps, and with the arguments of the call."""

_MISSING = object()


class Changes:
    """A list of changes to modules, taken back in the reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Module, str, Any]] = []

    def wrap(self, module: Module, around: Around, method: str = "forward") -> None:
        """Call ``around(method, *args, **kwargs)`` where ``method(*args, **kwargs)`` is called.

        A copy of the module calls the copy's method: ``around`` is to hold the module only in ways
        that ``copy.deepcopy`` follows.
        """
        self.set(module, method, partial(around, getattr(module, method)))

    def set(self, module: Module, name: str, value: object) -> None:
        """Give an instance an attribute that is neither parameter, buffer nor module."""
        self._before.append((module, name, vars(module).get(name, _MISSING)))
        vars(module)[name] = value

    def undo(self) -> None:
        """Put everything back. What others put on modules since then has to be off."""
        while self._before:
            module, name, before = self._before.pop()
            if before is _MISSING:
                del vars(module)[name]
            else:
                vars(module)[name] = before

"""Keeps parts of a model from being taken for the model, where other ranks have the rest."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import CheckpointError

_ADVICE = (
    "Use Trainer.save_checkpoint or ModelCheckpoint, by which each rank writes what it has; "
    "'boltmesh export' makes a plain file of that."
)


ABSENT = (
    "would hold NaN for {count} parameters ({first!r}, ...) that other ranks of the pipeline have"
)
PARTS = "would hold this rank's part of {count} parameters ({first!r}, ...) for the whole"


class StateGuard:
    """Makes ``state_dict()`` and pickling of a model raise, but where a strategy asks.

    Loading is not concerned: every rank takes what it holds.

    Args:
        module: The whole model.
        absent: Names of parameters that this rank does not have whole.
        holds: What a state would be, of so many parameters: words that ``{count}`` and ``{first}``
            are put into, the name of one of them.
    """

    def __init__(self, module: Module, absent: Collection[str], *, holds: str = ABSENT) -> None:
        self._is_open = False
        self.holds = holds
        self._handles = [
            each.register_state_dict_pre_hook(_Hook(self, absent, name))
            for name, each in module.named_modules()
            if any(one.startswith(f"{name}." if name else "") for one in absent)
        ]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within, parts may be asked for, by who knows that they are."""
        was_open, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = was_open

    @property
    def is_open(self) -> bool:
        """Whether parts may be asked for."""
        return self._is_open

    def remove(self) -> None:
        """Leave the model as it was."""
        for each in self._handles:
            each.remove()


class _Hook:
    """What torch calls before ``state_dict``; no copy of a module is rid of it, and no file has."""

    def __init__(self, guard: StateGuard, absent: Collection[str], name: str) -> None:
        self._guard = guard
        self._absent = absent
        self._name = name

    def __call__(self, module: Module, prefix: str, keep_vars: bool) -> None:
        if not self._guard.is_open:
            self._refuse(f"state_dict() of {type(module).__name__}")

    def _refuse(self, what: str) -> NoReturn:
        start = f"{self._name}." if self._name else ""
        names = [each for each in self._absent if each.startswith(start)]
        holds = self._guard.holds.format(count=len(names), first=names[0])
        raise CheckpointError(f"{what} {holds}. {_ADVICE}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self._refuse("A pickle of this module")

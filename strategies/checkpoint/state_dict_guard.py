"""Makes ``state_dict()`` raise on a model if other ranks hold parts of it."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import CheckpointError
from boltmesh.strategies.patch import patched

_ADVICE = (
    "Use Trainer.save_checkpoint or ModelCheckpoint, by which each rank writes what it has; "
    "'boltmesh export' makes a plain file of that."
)


ABSENT = (
    "would hold NaN for {count} parameters ({first!r}, ...) that other ranks of the pipeline have"
)
PARTS = "would hold this rank's part of {count} parameters ({first!r}, ...) for the whole"


class StateGuard:
    """Makes ``state_dict()`` and pickling of a model raise, except within ``opened``.

    Loading is not affected: every rank loads its part.

    Args:
        module: The LightningModule.
        absent: Names of parameters that this rank does not hold in full.
        holds: Description of such a state for messages, formatted with ``{count}`` parameters and
            the name of the ``{first}`` of them.
    """

    def __init__(self, module: Module, absent: Collection[str], *, holds: str = ABSENT) -> None:
        self.is_open = False
        """Whether ``state_dict()`` returns parts now."""
        self.holds = holds
        self._handles = [
            each.register_state_dict_pre_hook(_Hook(self, absent, name))
            for name, each in module.named_modules()
            if any(one.startswith(f"{name}." if name else "") for one in absent)
        ]

    def opened(self) -> AbstractContextManager[None]:
        """Context in which ``state_dict()`` returns parts, for callers that handle them."""
        return patched(self, is_open=True)

    def remove(self) -> None:
        """Remove the guard from the model."""
        for each in self._handles:
            each.remove()


class _Hook:
    """The hook before ``state_dict``; copies of the module keep it, and pickling it raises."""

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

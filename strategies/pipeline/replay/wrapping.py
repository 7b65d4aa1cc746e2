"""Takes the place of units' forward for as long as one run of the step lasts."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module

Forward = Callable[..., Any]
MISSING = object()


class ReplacedForwards:
    """Within it, ``forwards[name]`` is called instead of the forward of each unit.

    Hooks run as ever. They stand on the instances and are taken back at the end, so copies,
    checkpoints and recomputation in the backward pass meet the modules as they are. It may be
    entered again and again, for every microbatch, but not within itself.

    Args:
        units: By name.
        forwards: By names of units; called with what the unit is called with.
    """

    def __init__(self, units: Mapping[str, Module], forwards: Mapping[str, Forward]) -> None:
        self._units = units
        self._places = [(name, vars(units[name]), each) for name, each in forwards.items()]
        self._before: dict[str, Any] = {}

    def own(self, name: str) -> Forward:
        """Return the forward that a unit has by itself; to be called within."""
        before: Any = self._before[name]
        if before is not MISSING:
            return before  # type: ignore[no-any-return]
        unit = self._units[name]
        attributes = vars(unit)
        replaced = attributes.pop("forward")
        try:
            return unit.forward
        finally:
            attributes["forward"] = replaced

    def __enter__(self) -> None:
        before = self._before
        for name, attributes, forward in self._places:
            before[name] = attributes.get("forward", MISSING)
            attributes["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for name, attributes, _forward in self._places:
            before = self._before.pop(name)
            if before is MISSING:
                del attributes["forward"]
            else:
                attributes["forward"] = before

"""Finds single values in the code between units, by the number of the event that makes them."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.errors import DivergenceError
from boltmesh.strategies.pipeline.replay.places import line_of_step
from boltmesh.strategies.pipeline.replay.reads import is_event, name_of
from boltmesh.strategies.pipeline.replay.stage_plan import Handling, StagePlan


class GlueReplay(TorchFunctionMode):
    """Counts functions of torch between units, and hands results of some of them to a stage.

    Every function is compared with the one that the probe saw there. Active up to the last value
    that has to be found, and never inside a unit.
    """

    def __init__(self, plan: StagePlan, handle: Callable[[Any, Handling], Any]) -> None:
        super().__init__()
        self.plan = plan
        self.handle = handle
        self.position = 0
        self.is_on = False

    def start(self) -> None:
        """Watch from here on."""
        self.is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Watch nothing more, until ``start``."""
        if self.is_on:
            self.is_on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def pass_unit(self, event: int) -> None:
        """Note that a unit is called.

        Raises:
            DivergenceError: When the probe saw something else before it.
        """
        if self.position <= self.plan.last_watched and self.position != event:
            raise DivergenceError(
                explain(self.plan, self.position, f"it calls {self.plan.events[event].name!r}")
            )
        self.position = event + 1

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        event = self.position
        if event > self.plan.last_watched or not is_event(result):
            return result
        name, expected = name_of(func), self.plan.events[event]
        if expected.is_unit or expected.name != name:
            raise DivergenceError(explain(self.plan, event, f"it calls {name} ({line_of_step()})"))
        self.position = event + 1
        handling = self.plan.handling.get(event)
        return result if handling is None else self.handle(result, handling)


def explain(plan: StagePlan, event: int, what: str) -> str:
    """Return a message for a step that does not do what the probe saw."""
    events = plan.events
    expected = f"{events[event].name} ({events[event].place})" if event < len(events) else "its end"
    return (
        f"the step does other things than for an earlier batch of the same shapes: {what}, where "
        f"{expected} was expected. Let it depend on the batch and on train or eval mode alone, or "
        f"decide inside a layer."
    )

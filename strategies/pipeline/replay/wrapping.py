"""Takes the place of units' forward for as long as one run of the step lasts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

Forward = Callable[..., Any]
MISSING = object()


@contextmanager
def forwards_replaced(
    units: Mapping[str, Module], forwards: Mapping[str, Forward]
) -> Iterator[None]:
    """Call ``forwards[name]`` instead of the forward of each unit; hooks run as ever.

    They stand on the instances and are taken back at the end, so copies, checkpoints and
    recomputation in the backward pass meet the modules as they are.
    """
    replaced = [(vars(units[name]), forward) for name, forward in forwards.items()]
    earlier = [attributes.get("forward", MISSING) for attributes, _ in replaced]
    for attributes, forward in replaced:
        attributes["forward"] = forward
    try:
        yield
    finally:
        for (attributes, _), before in zip(replaced, earlier, strict=True):
            if before is MISSING:
                del attributes["forward"]
            else:
                attributes["forward"] = before

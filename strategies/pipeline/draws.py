"""Gives a batch the random numbers that its parts drew."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.building.operators import is_random
from boltmesh.strategies.torch_compat import DispatchMode, schema_of

_PERMUTATION, _DROPOUT = "aten::randperm", "aten::native_dropout"

Draw = Callable[[int, str, Tensor], Tensor | None]
"""Takes which draw it is, the operator's name and what it made; returns what to use instead."""


class SharedDraws:
    """Lets parts of a batch draw, and the batch then draw what they drew, in their rows.

    A step that draws noise or a permutation for each row computes the same losses of rows with
    other rows beside them, which a seed alone does not give. Numbers that belong to no row are
    drawn by the first part and by nobody else.
    """

    def __init__(self) -> None:
        self._drawn: list[list[Tensor]] = []

    @contextmanager
    def of_part(self) -> Iterator[None]:
        """Within, a part draws."""
        before = self._drawn[0] if self._drawn else []
        own: list[Tensor] = []

        def draw(number: int, _: str, made: Tensor) -> Tensor | None:
            known = before[number] if number < len(before) else made
            used = known if known.shape == made.shape else made
            own.append(used.detach().clone())
            return used

        with _Drawing(draw):
            yield
        self._drawn.append(own)

    @contextmanager
    def of_whole(self) -> Iterator[None]:
        """Within, all parts together draw."""

        def draw(number: int, name: str, made: Tensor) -> Tensor | None:
            parts = [each[number] for each in self._drawn if number < len(each)]
            return _join(parts, name, made) if len(parts) == len(self._drawn) else None

        with _Drawing(draw):
            yield


def _join(parts: Sequence[Tensor], name: str, made: Tensor) -> Tensor | None:
    """Return what the whole draws; None where that cannot be told."""
    if all(each.shape == made.shape for each in parts):
        return parts[0]
    if name == _PERMUTATION:  # rows of a part change places among themselves
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0).tolist()
        parts = [each + start for each, start in zip(parts, starts, strict=False)]
    for dim in range(made.ndim):
        rest = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in parts}
        wanted = (*made.shape[:dim], *made.shape[dim + 1 :])
        if rest == {wanted} and sum(each.shape[dim] for each in parts) == made.shape[dim]:
            return torch.cat(list(parts), dim)
    return None


class _Drawing(DispatchMode):  # type: ignore[no-untyped-call]
    """Puts others in the place of random numbers."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self._count = 0

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_random(func):
            return result
        name = schema_of(func).name
        made = result[1] if name == _DROPOUT else result
        if not isinstance(made, Tensor):
            return result
        drawn = self._draw(self._count, name, made)
        self._count += 1
        if drawn is None or drawn is made:
            return result
        if name == _DROPOUT:
            given, rate = args[0], args[1]
            return given * drawn / (1 - rate), drawn
        # In place, or a new tensor: either way it is this one.
        return made.copy_(drawn)

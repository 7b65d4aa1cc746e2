"""Made-up values for the end of a step, of which rows can be taken out.

Gives a batch the random numbers that its parts drew.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.deferred_initialization.recording import is_random
from boltmesh.strategies.pipeline.loss.reduction import BatchLossError
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.torch_compat.tensors import DispatchMode, schema_of

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


SEED = 20_240_229
"""Of made-up values: any will do, and the same one on every run."""


@dataclass(frozen=True)
class LiveValue:
    """A value of a few rows."""

    tensor: Tensor
    dim: int | None
    """Along which it holds rows, the same number of elements for each; None where it has none."""
    needs_grad: bool
    depends_on_batch: bool
    """Whether a layer may have made it of the batch's data."""


def made_up(
    specs: Sequence[tuple[ValueSpec, bool]],
    smaller: Sequence[tuple[ValueSpec, bool]],
    rows: tuple[int, int],
    *,
    device: torch.device,
    is_double: bool,
    is_between_0_and_1: bool,
) -> list[LiveValue]:
    """Return random values, of which each row is of another size.

    Args:
        specs: What is needed for all rows.
        smaller: What is needed for some of them.
        rows: How many these are, all and some.
        device: Where they are made.
        is_double: Whether in fp64 instead of their own type.
        is_between_0_and_1: Whether they have to be probabilities, or positive.

    Raises:
        BatchLossError: When it cannot be told where a value has its rows.
    """
    if len(specs) != len(smaller):
        raise BatchLossError(
            f"training_step uses {len(specs)} values of its layers for {rows[0]} rows and "
            f"{len(smaller)} for {rows[1]}, so its loss cannot be put together from microbatches."
        )
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for (spec, depends), (less, _) in zip(specs, smaller, strict=True):
        dim = _dim_of_rows(spec, less, rows)
        if spec.dtype.is_floating_point:
            tensor = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
            if dim is not None:
                per_row = spec.shape[dim] // rows[0]
                sizes = torch.linspace(0.5, 2.5, rows[0]).repeat_interleave(per_row)
                tensor *= sizes.reshape(-1, *[1] * (len(spec.shape) - dim - 1))
            if is_between_0_and_1:
                tensor = tensor.sigmoid()
            tensor = tensor.to(device, torch.float64 if is_double else spec.dtype)
        else:
            tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        made.append(LiveValue(tensor, dim, spec.needs_grad, depends))
    return made


def _dim_of_rows(spec: ValueSpec, less: ValueSpec, rows: tuple[int, int]) -> int | None:
    if spec.shape == less.shape:
        return None
    pairs = list(zip(spec.shape, less.shape, strict=False))
    for dim, (size, smaller) in enumerate(pairs):
        others = pairs[:dim] + pairs[dim + 1 :]
        is_rows = size != smaller and size * rows[1] == smaller * rows[0] and size % rows[0] == 0
        # Others may be narrower where rows are padded to the longest.
        if is_rows and all(one <= other for other, one in others):
            return dim
    raise BatchLossError(
        f"{spec.origin} has the shape {list(spec.shape)} for {rows[0]} rows and "
        f"{list(less.shape)} for {rows[1]}, so it cannot be told how training_step's loss is put "
        f"together from microbatches."
    )


def taken(
    values: Sequence[LiveValue],
    specs: Sequence[tuple[ValueSpec, bool]],
    start: int,
    count: int,
    rows: int,
) -> list[Tensor]:
    """Return leaves with the values of some rows.

    Args:
        values: Of all rows.
        specs: What is needed for some.
        start: The first of them.
        count: How many.
        rows: How many all are.
    """
    return [
        narrowed(value.tensor, value.dim, spec.shape, start, count, rows)
        .clone()
        .requires_grad_(value.needs_grad and value.tensor.is_floating_point())
        for value, (spec, _) in zip(values, specs, strict=True)
    ]


def narrowed(
    tensor: Tensor, dim: int | None, shape: Sequence[int], start: int, count: int, rows: int
) -> Tensor:
    """Return the view of some rows."""
    if dim is None:
        return tensor
    per_row = tensor.shape[dim] // rows
    view = tensor.narrow(dim, start * per_row, count * per_row)
    for other, size in enumerate(shape):
        view = view.narrow(other, 0, min(size, view.shape[other]))
    return view


def sharpened(values: Sequence[LiveValue], gradients: Sequence[Tensor | None]) -> list[LiveValue]:
    """Return values that lead to right predictions in about half of the places.

    Random values predict nothing right where there are many classes, and an accuracy of zero looks
    like anything. Going down the loss's gradient helps whatever the prediction is.
    """
    generator = torch.Generator().manual_seed(SEED + 1)
    made = []
    for value, gradient in zip(values, gradients, strict=True):
        tensor = value.tensor
        if gradient is not None and value.dim is not None:
            chosen = torch.rand((*tensor.shape[:-1], 1), generator=generator) < 0.5
            largest = gradient.abs().amax(-1, keepdim=True)
            step = gradient / torch.where(largest == 0, 1, largest)
            tensor = tensor - 8 * step * chosen.to(tensor.device)
        made.append(LiveValue(tensor, value.dim, value.needs_grad, value.depends_on_batch))
    return made

"""Functions that only change where elements stand: each rank applies them to its part.

Where the divided dimension goes is read off a tensor without data on which the same function runs:
its stride there is that of no other dimension.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.tensor.execution.rulebook import NO_RULE, rule_for
from boltmesh.strategies.tensor.execution.vocabulary_tensor import (
    VocabularyTensor,
    unwrap,
    wrap,
)


@rule_for(
    "T adjoint chunk flatten mT movedim moveaxis narrow permute select split split_with_sizes",
    "squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unsqueeze",
)
def rearrange(func: Callable[..., Any], divided: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function that names dimensions, but no sizes, unless they are of others."""
    if not isinstance(divided, VocabularyTensor):
        return NO_RULE
    shown = func(_outline(divided), *args, **kwargs)
    outlines = [shown] if isinstance(shown, Tensor) else list(shown)
    dims = [_divided_dim(outline, divided) for outline in outlines]
    if None in dims:
        return NO_RULE
    result = func(unwrap(divided), *args, **kwargs)
    parts = [result] if isinstance(result, Tensor) else list(result)
    if [list(part.shape) for part in parts] != [
        _part_shape(outline, dim, divided) for outline, dim in zip(outlines, dims, strict=True)
    ]:
        return NO_RULE
    wrapped = [
        wrap(part, divided.vocabulary, dim or 0) for part, dim in zip(parts, dims, strict=True)
    ]
    return wrapped[0] if isinstance(result, Tensor) else type(result)(wrapped)


@rule_for("__iter__")
def iterate(func: Callable[..., Any], divided: VocabularyTensor) -> Any:
    """Go along the first dimension."""
    return iter(divided.unbind(0))


@rule_for("expand expand_as reshape reshape_as view view_as")
def resize(func: Callable[..., Any], divided: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function that is given the sizes of the whole; the part gets its own."""
    if not isinstance(divided, VocabularyTensor) or _has_dtype((*args, *kwargs.values())):
        return NO_RULE
    if func.__name__.endswith("_as"):
        args, kwargs = (tuple((args or tuple(kwargs.values()))[0].shape),), {}
    method = func.__name__.removesuffix("_as")
    # torch.reshape and the methods take the same, but for the name of the sizes.
    sizes = args or tuple(kwargs.values())
    try:
        outline = getattr(_outline(divided), method)(*sizes)
    except RuntimeError:  # joins the divided dimension with others, or does not fit at all
        return NO_RULE
    dim = _divided_dim(outline, divided)
    if dim is None:
        return NO_RULE
    part = getattr(unwrap(divided), method)(_part_shape(outline, dim, divided))
    return wrap(part, divided.vocabulary, dim)


@rule_for("cat concat concatenate stack")
def join(func: Callable[..., Any], tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """Put divided tensors one after the other, along another dimension than the divided one."""
    divided = [each for each in tensors if isinstance(each, VocabularyTensor)]
    first = divided[0]
    dims = first.dim() + (func.__name__ == "stack")
    along = dim % dims
    if (
        kwargs
        or len(divided) != len(tensors)
        or (func.__name__ != "stack" and along == first.divided_dim)
    ):
        return NO_RULE
    if any(
        each.divided_dim != first.divided_dim
        or each.dim() != first.dim()
        or not each.vocabulary.is_divided_like(first.vocabulary)
        for each in divided
    ):
        return NO_RULE
    moved = func.__name__ == "stack" and along <= first.divided_dim
    joined = func([unwrap(each) for each in divided], along)
    return wrap(joined, first.vocabulary, first.divided_dim + moved)


def view_dim(
    func: Callable[..., Any], divided: VocabularyTensor, *args: Any
) -> tuple[int, list[int]] | None:
    """Return where a view's divided dimension is, and its part's shape; None if it has none."""
    outline = func(_outline(divided), *args)
    dim = _divided_dim(outline, divided)
    return None if dim is None else (dim, _part_shape(outline, dim, divided))


def _outline(divided: VocabularyTensor) -> Tensor:
    """A tensor without data whose divided dimension has a stride of its own.

    The others are laid out as if it were not there, so they can be joined with each other and
    never with it.
    """
    shape = list(divided.shape)
    others = [size for dim, size in enumerate(shape) if dim != divided.divided_dim]
    strides = [prod(others[place + 1 :]) for place in range(len(others))]
    strides.insert(divided.divided_dim, _own_stride(divided))
    return torch.empty_strided(shape, strides, device="meta")


def _own_stride(divided: VocabularyTensor) -> int:
    return 2 * prod(max(size, 1) for size in divided.shape) + 1


def _divided_dim(outline: Tensor, divided: VocabularyTensor) -> int | None:
    """Where all tokens are, in their order; None where they are not."""
    for dim, (size, stride) in enumerate(zip(outline.shape, outline.stride(), strict=True)):
        if stride == _own_stride(divided) and size == divided.vocabulary.size:
            return dim
    return None


def _part_shape(outline: Tensor, dim: int | None, divided: VocabularyTensor) -> list[int]:
    shape = list(outline.shape)
    if dim is not None:
        shape[dim] = divided.vocabulary.length
    return shape


def _has_dtype(values: Sequence[Any]) -> bool:
    return any(isinstance(each, torch.dtype) for each in values)

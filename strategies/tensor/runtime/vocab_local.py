"""Rules for torch functions on divided logits that need no communication.

- Elementwise functions: each rank applies them to its own tokens. Operands that are not divided
  meet only a part of the logits on each rank: if one is learned, such as a temperature, its
  gradient is partial and is summed over the ranks.
- Functions that only rearrange elements. The new place of the divided dim is read off a meta tensor
  on which the same function runs: the stride of the divided dim differs from all others.
- Indexing: positions are selected on each rank, if all tokens of them are kept.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.tensor.runtime.collectives import reduce_gradient
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
    VocabularyTensor,
    rule_for,
    unwrap,
    wrap,
)
from boltmesh.strategies.torch_compat.tensors import tree_leaves, tree_map_only

_FUNCTIONS = (
    "abs add addcdiv addcmul ceil clamp clamp_max clamp_min clip copysign cos div divide eq erf",
    "exp exp2 expm1 floor fmax fmin ge gelu greater greater_equal gt isfinite isinf isnan",
    "isneginf isposinf le leaky_relu lerp less less_equal log log10 log1p log2 logaddexp",
    "logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum",
    "minimum mul multiply nan_to_num ne neg negative not_equal pow reciprocal relu remainder",
    "round rsqrt rsub sgn sigmoid sign silu sin softplus sqrt square sub subtract tanh",
    "tanhshrink true_divide trunc where xlogy",
)

_OPERATORS = (
    "__abs__ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__",
    "__truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __pow__ __rpow__ __ipow__",
    "__neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__",
)

_IN_PLACE = (
    *(f"{name}_" for line in _FUNCTIONS for name in line.split()),
    "zero_ fill_ copy_",
)

_OF_ONE = (
    "clone contiguous detach data float double half bfloat16 bool int long cpu cuda",
    "zeros_like ones_like full_like empty_like alias positive",
)


@rule_for(*_FUNCTIONS, *_OPERATORS, *_IN_PLACE, *_OF_ONE)
def elementwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an elementwise function on parts with the same tokens."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    divided = [each for each in tensors if isinstance(each, VocabularyTensor)]
    first = divided[0]
    # Broadcasting aligns last dimensions, so the divided one is counted from there.
    from_end = first.dim() - first.divided_dim
    if not all(
        each.dim() - each.divided_dim == from_end
        and each.vocabulary.is_divided_like(first.vocabulary)
        for each in divided
    ):
        return NO_RULE

    def part(value: Tensor) -> Tensor:
        if isinstance(value, VocabularyTensor):
            return unwrap(value)
        if value.dim() >= from_end and value.shape[-from_end] == first.vocabulary.size:
            return first.vocabulary.take(value, value.dim() - from_end)
        return reduce_gradient(value, first.vocabulary.group) if value.requires_grad else value

    args, kwargs = tree_map_only(Tensor, part, (args, kwargs))
    result = func(*args, **kwargs)
    return wrap(result, first.vocabulary, result.dim() - from_end)


@rule_for("to type type_as")
def casts(func: Callable[..., Any], divided: Any, *args: Any, **kwargs: Any) -> Any:
    """Change dtype or device; another tensor among the arguments only specifies these."""
    args, kwargs = tree_map_only(VocabularyTensor, lambda each: each.local, (args, kwargs))
    if not isinstance(divided, VocabularyTensor):
        return func(divided, *args, **kwargs)
    result = func(unwrap(divided), *args, **kwargs)
    if not isinstance(result, Tensor):
        return result
    return wrap(result, divided.vocabulary, divided.divided_dim)


@rule_for("new_empty new_full new_ones new_tensor new_zeros record_stream is_contiguous")
def run_on_part(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function on a part if the result does not depend on the divided size."""
    args, kwargs = tree_map_only(VocabularyTensor, lambda each: each.local, (args, kwargs))
    return func(*args, **kwargs)


@rule_for(
    "T adjoint chunk flatten mT movedim moveaxis narrow permute select split split_with_sizes",
    "squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unsqueeze",
)
def rearrange(func: Callable[..., Any], divided: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function whose arguments name dims, but no size of the divided dim."""
    if not isinstance(divided, VocabularyTensor):
        return NO_RULE
    shown = func(_outline(divided), *args, **kwargs)
    outlines = [shown] if isinstance(shown, Tensor) else list(shown)
    dims = [dim for each in outlines if (dim := _divided_dim(each, divided)) is not None]
    if len(dims) < len(outlines):
        return NO_RULE
    result = func(unwrap(divided), *args, **kwargs)
    parts = [result] if isinstance(result, Tensor) else list(result)
    if [list(part.shape) for part in parts] != [
        _part_shape(outline, dim, divided) for outline, dim in zip(outlines, dims, strict=True)
    ]:
        return NO_RULE
    wrapped = [wrap(part, divided.vocabulary, dim) for part, dim in zip(parts, dims, strict=True)]
    return wrapped[0] if isinstance(result, Tensor) else type(result)(wrapped)


@rule_for("__iter__")
def iterate(func: Callable[..., Any], divided: VocabularyTensor) -> Any:
    """Iterate over the first dim."""
    return iter(divided.unbind(0))


@rule_for("expand expand_as reshape reshape_as view view_as")
def resize(func: Callable[..., Any], divided: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function that is given sizes of the whole; the part gets its own."""
    has_dtype = any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values()))
    if not isinstance(divided, VocabularyTensor) or has_dtype:
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
    """Concatenate or stack divided tensors along another dim than the divided one."""
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


def _outline(divided: VocabularyTensor) -> Tensor:
    """Return a meta tensor whose divided dim has a unique stride.

    The others are laid out as if it did not exist, so they can be joined with each other and never
    with it.
    """
    shape = list(divided.shape)
    others = [size for dim, size in enumerate(shape) if dim != divided.divided_dim]
    strides = [prod(others[place + 1 :]) for place in range(len(others))]
    strides.insert(divided.divided_dim, _own_stride(divided))
    return torch.empty_strided(shape, strides, device="meta")


def _own_stride(divided: VocabularyTensor) -> int:
    return 2 * prod(max(size, 1) for size in divided.shape) + 1


def _divided_dim(outline: Tensor, divided: VocabularyTensor) -> int | None:
    """Return the dim with all tokens in order; None if there is none."""
    for dim, (size, stride) in enumerate(zip(outline.shape, outline.stride(), strict=True)):
        if stride == _own_stride(divided) and size == divided.vocabulary.size:
            return dim
    return None


def _part_shape(outline: Tensor, dim: int, divided: VocabularyTensor) -> list[int]:
    shape = list(outline.shape)
    shape[dim] = divided.vocabulary.length
    return shape


_EVERYTHING = slice(None)


@rule_for("__getitem__")
def get_item(func: Callable[..., Any], divided: Any, index: Any) -> Any:
    """Select positions."""
    found = _indexed(divided, index) if isinstance(divided, VocabularyTensor) else None
    if found is None:
        return NO_RULE
    items, dim = found
    return wrap(unwrap(divided)[items], divided.vocabulary, dim)


@rule_for("__setitem__")
def set_item(func: Callable[..., Any], divided: Any, index: Any, value: Any) -> Any:
    """Write a number to all tokens of some positions."""
    if not isinstance(divided, VocabularyTensor) or isinstance(value, Tensor):
        return NO_RULE
    found = _indexed(divided, index)
    if found is None:
        return NO_RULE
    part = unwrap(divided)
    part[found[0]] = value
    return wrap(part, divided.vocabulary, divided.divided_dim)


@rule_for("index_select")
def index_select(
    func: Callable[..., Any], divided: Any, dim: int, index: Tensor, **kwargs: Any
) -> Any:
    """Select positions of another dim than the divided one."""
    if not isinstance(divided, VocabularyTensor) or dim % divided.dim() == divided.divided_dim:
        return NO_RULE
    part = func(unwrap(divided), dim, index)
    return wrap(part, divided.vocabulary, divided.divided_dim)


def _indexed(divided: VocabularyTensor, index: Any) -> tuple[tuple[Any, ...], int] | None:
    """Return the items of an index, and the divided dim after it; None if it is not supported."""
    items = _expanded(divided, index)
    if items is None:
        return None
    if any(isinstance(each, Tensor) for each in items):
        dim = _dim_behind_tensors(divided, items)
    else:
        dim = _divided_dim(_outline(divided)[tuple(items)], divided)
    return None if dim is None else (tuple(items), dim)


def _expanded(divided: VocabularyTensor, index: Any) -> list[Any] | None:
    """Return an index with its ellipsis expanded; None for kinds that need the whole tensor."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(
        each is None
        or each is Ellipsis
        or isinstance(each, slice)
        or (isinstance(each, int) and not isinstance(each, bool))
        or (isinstance(each, Tensor) and not isinstance(each, VocabularyTensor))
        for each in items
    ):
        return None
    missing = divided.dim() - sum(_consumed(each) for each in items)
    places = [place for place, each in enumerate(items) if each is Ellipsis]
    if len(places) > 1 or missing < 0:
        return None
    place = places[0] if places else len(items)
    return [*items[:place], *[_EVERYTHING] * missing, *items[place + 1 :]]


def _consumed(item: Any) -> int:
    """Return the number of dims that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in {torch.bool, torch.uint8}


def _dim_behind_tensors(divided: VocabularyTensor, items: list[Any]) -> int | None:
    """Return the divided dim after indexing with adjacent tensors; None if it is not supported.

    Their dims take the place of the first tensor; if not adjacent, they would move to the front.
    """
    tensors = [each for each in items if isinstance(each, Tensor)]
    if any(each.dim() == 0 for each in tensors):
        return None
    chosen = max(1 if _is_mask(each) else each.dim() for each in tensors)
    seen, made, found = 0, 0, None
    has_begun, has_ended = False, False
    for item in items:
        if isinstance(item, Tensor):
            if has_ended:
                return None
            made += 0 if has_begun else chosen
            has_begun = True
        elif not isinstance(item, int):
            has_ended = has_begun
            if item is not None and seen == divided.divided_dim:
                if item != _EVERYTHING:
                    return None
                found = made
            made += 1
        seen += _consumed(item)
    return found

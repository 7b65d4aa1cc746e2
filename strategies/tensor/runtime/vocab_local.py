"""Functions of torch on logits of which each rank has some tokens, without communication.

- Functions that treat every element alone: each rank applies them to the tokens it has. What is not
  divided meets only a part of the logits on each rank: if it is learned, such as a temperature, its
  gradient is partial and is summed over the ranks.
- Functions that only change where elements stand. Where the divided dimension goes is read off a
  tensor without data on which the same function runs: its stride there is that of no other
  dimension.
- Square brackets: positions are chosen on each rank, if all their tokens are kept.
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
    holds_divided,
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
    """Run a function on parts that belong to the same tokens."""
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
    """Change the type or device; another tensor among the arguments only says of what."""
    args, kwargs = tree_map_only(VocabularyTensor, lambda each: each.local, (args, kwargs))
    if not isinstance(divided, VocabularyTensor):
        return func(divided, *args, **kwargs)
    result = func(unwrap(divided), *args, **kwargs)
    if not isinstance(result, Tensor):
        return result
    return wrap(result, divided.vocabulary, divided.divided_dim)


@rule_for("new_empty new_full new_ones new_tensor new_zeros record_stream is_contiguous")
def run_on_part(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask a part what it knows as well as the whole: type, device, layout."""
    args, kwargs = tree_map_only(VocabularyTensor, lambda each: each.local, (args, kwargs))
    return func(*args, **kwargs)


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


_EVERYTHING = slice(None)


@rule_for("__getitem__")
def get_item(func: Callable[..., Any], divided: Any, index: Any) -> Any:
    """Choose positions."""
    if not isinstance(divided, VocabularyTensor) or holds_divided(index):
        return NO_RULE
    items = _expanded(divided, index)
    if items is None:
        return NO_RULE
    if any(isinstance(each, Tensor) for each in items):
        dim = _dim_behind_tensors(divided, items)
        if dim is None:
            return NO_RULE
    else:
        found = view_dim(lambda outline: outline[tuple(items)], divided)
        if found is None:
            return NO_RULE
        dim = found[0]
    return wrap(unwrap(divided)[tuple(items)], divided.vocabulary, dim)


@rule_for("__setitem__")
def set_item(func: Callable[..., Any], divided: Any, index: Any, value: Any) -> Any:
    """Write a number to all tokens of some positions."""
    if not isinstance(divided, VocabularyTensor) or isinstance(value, Tensor):
        return NO_RULE
    items = None if holds_divided(index) else _expanded(divided, index)
    if items is None:
        return NO_RULE
    if any(isinstance(each, Tensor) for each in items):
        dim = _dim_behind_tensors(divided, items)
    else:
        dim = (view_dim(lambda outline: outline[tuple(items)], divided) or (None,))[0]
    if dim is None:
        return NO_RULE
    part = unwrap(divided)
    part[tuple(items)] = value
    return wrap(part, divided.vocabulary, divided.divided_dim)


@rule_for("index_select")
def index_select(
    func: Callable[..., Any], divided: Any, dim: int, index: Tensor, **kwargs: Any
) -> Any:
    """Choose positions of another dimension than the divided one."""
    if not isinstance(divided, VocabularyTensor) or dim % divided.dim() == divided.divided_dim:
        return NO_RULE
    part = func(unwrap(divided), dim, index)
    return wrap(part, divided.vocabulary, divided.divided_dim)


def _expanded(divided: VocabularyTensor, index: Any) -> list[Any] | None:
    """An index with its ellipsis spelled out; None for kinds that are left to torch."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(
        each is None
        or each is Ellipsis
        or isinstance(each, slice)
        or (isinstance(each, int) and not isinstance(each, bool))
        or isinstance(each, Tensor)
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
    """How many dimensions an item of an index stands for."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in {torch.bool, torch.uint8}


def _dim_behind_tensors(divided: VocabularyTensor, items: list[Any]) -> int | None:
    """Where the divided dimension is after tensors that stand next to each other chose positions.

    Their dimensions take the place of the first; apart from each other they would go to the front.
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

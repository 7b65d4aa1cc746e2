"""Functions that treat every element alone: each rank applies them to the tokens it has.

What is not divided meets only a part of the logits on each rank: if it is learned, such as a
temperature, its gradient is partial and is summed over the ranks.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from boltmesh.strategies.tensor.execution.collectives import reduce_gradient
from boltmesh.strategies.tensor.execution.rulebook import NO_RULE, rule_for
from boltmesh.strategies.tensor.execution.vocabulary_tensor import (
    VocabularyTensor,
    unwrap,
    wrap,
)
from boltmesh.strategies.torch_compat import tree_leaves, tree_map_only

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
def asks_the_part(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask a part what it knows as well as the whole: type, device, layout."""
    args, kwargs = tree_map_only(VocabularyTensor, lambda each: each.local, (args, kwargs))
    return func(*args, **kwargs)

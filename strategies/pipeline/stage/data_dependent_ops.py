"""Lists the functions of torch that read values of tensors in Python, and gives their results.

A trace has no data of layers' outputs. If the step reads such a value, it gets a guess, once all
zeros or False and once all ones or True; facts that both runs agree on are used.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from boltmesh.strategies.pytree import tensors_in
from boltmesh.strategies.torch_compat.tensors import is_fake

SCALARS = frozenset({"item", "__bool__", "__complex__", "__float__", "__index__", "__int__"})
ARRAYS = frozenset({"__array__", "numpy", "tolist"})
VERDICTS = frozenset({"__contains__", "allclose", "equal", "is_nonzero"})
READS = SCALARS | ARRAYS | VERDICTS
"""Functions that return data to Python."""

SELECTIONS = frozenset({"__getitem__", "argwhere", "masked_select", "nonzero", "unique", "where"})
"""Functions whose result may have as many elements as a tensor has true ones."""

SIZES_ALONE = frozenset({"arange", "eye", "ones", "tril_indices", "triu_indices", "zeros"})
"""Functions that make the same tensor in each call if all arguments are sizes."""

DERIVATIVES = frozenset({"backward", "grad"})
"""Functions that differentiate."""

GRADIENT_HOOKS = frozenset({"register_hook", "retain_grad"})
"""Functions that register a hook on the gradient of a tensor."""

RANDOM = re.compile(
    r"rand|.*dropout|bernoulli|(log_)?normal_?$|multinomial|uniform_|exponential_|poisson|rrelu"
    r"|geometric_|cauchy_|scaled_dot_product_attention"
)
"""Functions that may draw random numbers; a false positive costs little."""


def draws(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function of torch draws random numbers with these arguments."""
    if not RANDOM.match(name):
        return False
    given = dict(enumerate(args))
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", given.get(4, 0.0)))
    if "dropout" in name:
        trains = kwargs.get("training", kwargs.get("train", given.get(2, True)))
        return bool(trains and kwargs.get("p", given.get(1, 0.5)))
    return True


def is_event(result: Any) -> bool:
    """Whether a function of torch with this result made or changed a tensor."""
    return result is None or isinstance(result, Tensor) or bool(tensors_in(result))


def answer_of(result: Any) -> Hashable:
    """Return the value of a read in a form that can be compared."""
    return repr(result.tolist() if hasattr(result, "tolist") else result)


def guess(name: str, args: tuple[Any, ...], *, answer: bool) -> Any:
    """Return a possible result of a function that reads a tensor without data.

    Args:
        name: One of :data:`READS`.
        args: Its arguments; the first tensor, of any shape, determines shape and dtype.
        answer: Which of the two guesses.
    """
    if name in VERDICTS or name == "__bool__":
        return answer
    like = tensors_in(args)[0]
    shape = () if name in SCALARS else tuple(like.shape)
    made = torch.full(shape, answer, device="cpu").to(like.dtype)
    if name in SCALARS:
        value = made.item()
        kind = {"__index__": int, "__int__": int, "__float__": float}.get(name)
        return value if kind is None else kind(value)
    return made.tolist() if name == "tolist" else made.float().numpy()


def select(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, answer: bool) -> Any:
    """Return the result of a selection of no elements, or of all, as a tensor without data.

    Args:
        name: One of :data:`SELECTIONS`.
        args: Its positional arguments; the first is the tensor, of shape ``(*)``.
        kwargs: Its keyword arguments.
        answer: Whether all elements are selected, else none.
    """
    source: Tensor = args[0]
    if name in {"argwhere", "nonzero", "where"}:
        count = source.numel() if answer else 0
        indices = source.new_empty((count, source.ndim), dtype=torch.int64)
        return indices.unbind(1) if name == "where" or kwargs.get("as_tuple") else indices
    if name == "masked_select":
        mask = args[1] if len(args) > 1 else kwargs["mask"]
        flat = (source * torch.ones_like(mask, dtype=source.dtype)).reshape(-1)
        return flat if answer else flat[:0]
    if name == "__getitem__":
        return source[_positions(args[1], answer=answer)]
    return _unique(*args, answer=answer, **kwargs)


def _unique(
    source: Tensor,
    sorted: bool = True,  # noqa: A002 - as torch names it
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
    *,
    answer: bool,
) -> Any:
    """Return ``torch.unique`` of elements, or slices along ``dim``, that all differ, or of none."""
    along = source.reshape(-1) if dim is None else source
    count = along.shape[dim or 0] if answer else 0
    inverse = source if dim is None else along.movedim(dim, 0).flatten(1)[:, :1].reshape(-1)
    found = [
        along.narrow(dim or 0, 0, count),
        *([inverse.to(torch.int64)] if return_inverse else []),
        *([source.new_empty(count, dtype=torch.int64)] if return_counts else []),
    ]
    return found[0] if len(found) == 1 else tuple(found)


def scores_of_ctc(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return a result of ``ctc_loss`` without data, which does not depend on the lengths.

    Args:
        args: Its positional arguments; ``log_probs`` has the shape ``(S, B, V)`` or ``(S, V)``.
        kwargs: Its keyword arguments.

    Returns:
        Shape ``(B,)`` or ``()``; ``()`` with a reduction.
    """
    given = dict(zip(("log_probs", "", "", "", "", "reduction"), args, strict=False)) | dict(kwargs)
    scores: Tensor = given["log_probs"]
    return scores.sum((0, -1)) if given.get("reduction") == "none" else scores.sum()


def counts_of_bins(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a result of ``bincount`` without data; None if it does not say how many bins it has.

    It has more than ``minlength``, ``(minlength,)``, where a number is larger: metrics state the
    number of their classes.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    given = dict(zip(("input", "weights", "minlength"), args, strict=False)) | dict(kwargs)
    source, weights = given["input"], given.get("weights")
    length = given.get("minlength", 0)
    if not length:
        return None
    made: Tensor = source.new_zeros(length, dtype=torch.int64 if weights is None else weights.dtype)
    return made


def _positions(index: Any, *, answer: bool) -> Any:
    """Replace masks without data in an index by positions that they might select."""
    parts = []
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, Tensor) and each.dtype in {torch.bool, torch.uint8}:
            count = each.numel() if answer else 0
            parts += [each.new_empty((count,), dtype=torch.int64) for _ in range(each.ndim)]
        else:
            parts.append(each)
    return tuple(parts)


def has_mask(index: Any) -> bool:
    """Whether an index has a mask, so that the size of the result depends on data."""
    return any(each.dtype in {torch.bool, torch.uint8} for each in tensors_in(index))


def resolve_masks(args: tuple[Any, ...], has_data: Callable[[Tensor], bool]) -> tuple[Any, ...]:
    """Replace masks that have data in an index by the positions that they select.

    The shape of the result is then known, also if the indexed tensor has no data.
    """

    def positions(index: Any) -> tuple[Any, ...]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and has_data(index):
            return index.nonzero(as_tuple=True)
        return (index,)

    index = args[1]
    flat = index if isinstance(index, tuple) else (index,)
    return (args[0], tuple(part for each in flat for part in positions(each)), *args[2:])


def is_expert_product(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call is a grouped product of rows with a matrix for each group, as of experts.

    On fake tensors torch supports it for bf16 on CUDA only; kernels of the CPU support others.
    """
    shapes = tensors_in(args[:2])
    return name in {"grouped_mm", "_grouped_mm"} and [each.ndim for each in shapes] == [2, 3]


def expert_product(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the result of such a call without data, which does not depend on the groups.

    Args:
        args: Rows ``(N, E)`` and matrices ``(X, E, width)``.
        kwargs: Keyword arguments; ``out_dtype`` is the dtype of the result.

    Returns:
        Shape ``(N, width)``.
    """
    rows, matrices = args[:2]
    made: Tensor = rows @ matrices[0]
    kind = kwargs.get("out_dtype")
    return made if kind is None else made.to(kind)


def is_packing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call packs sequences without data by lengths with data."""
    return name == "_pack_padded_sequence" and is_fake(args[0]) and not is_fake(args[1])


def packed(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the result of such a call.

    Args:
        args: Sequences ``(B, S, *)`` or ``(S, B, *)``, lengths ``(B,)``, and whether B is first.

    Returns:
        Elements ``(sum of lengths, *)`` without data, and the batch size of each position up to
        the longest length.
    """
    source, lengths, batch_first = args
    sizes = pack_padded_sequence(torch.zeros(*source.shape[:2], 1), lengths, batch_first)[1]
    return source.flatten(0, 1)[: int(lengths.sum())], sizes


def sees_one_value(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a call is a batch norm with one value per channel, which torch refuses."""
    if function is not functional.batch_norm:
        return False
    given: Tensor = args[0]
    trains = kwargs.get("training", args[5] if len(args) > 5 else False)
    return bool(trains) and given.ndim > 1 and given.numel() == given.shape[1]


def norm_of_one_value(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """Return the result of such a call, of shape ``(1, *)``, as if torch did not refuse it."""
    rows = torch.cat([args[0], args[0]])
    made: Tensor = function(rows, *args[1:], **kwargs)
    return made[:1]

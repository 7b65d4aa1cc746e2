"""Knows which functions of torch tell Python what is in a tensor, and what to say instead.

A probe has no data for what layers compute. Where the step looks at such a value all the same, it
is told a guess, once all zeros or False and once all ones or True, and what both agree on is true.
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
"""Functions whose result is data, as Python sees it."""

SELECTIONS = frozenset({"__getitem__", "argwhere", "masked_select", "nonzero", "unique", "where"})
"""Functions whose result may have as many elements as some tensor has that are true."""

SIZES_ALONE = frozenset({"arange", "eye", "ones", "tril_indices", "triu_indices", "zeros"})
"""Functions that make the same tensor each time when they are called with sizes alone."""

DERIVATIVES = frozenset({"backward", "grad"})
"""Functions that go back through what was computed."""

GRADIENT_HOOKS = frozenset({"register_hook", "retain_grad"})
"""Functions that put something on the gradient of a tensor."""

RANDOM = re.compile(
    r"rand|.*dropout|bernoulli|(log_)?normal_?$|multinomial|uniform_|exponential_|poisson|rrelu"
    r"|geometric_|cauchy_|scaled_dot_product_attention"
)
"""Functions that may draw random numbers; one too many costs little."""


def draws(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function of torch draws random numbers, as it was called."""
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
    """Return what was read, so that two readings can be compared."""
    return repr(result.tolist() if hasattr(result, "tolist") else result)


def guess(name: str, args: tuple[Any, ...], *, answer: bool) -> Any:
    """Return what a reading function of that name could have told.

    Args:
        name: One of :data:`READS`.
        args: What it was called with; some tensor of it has no data.
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
    """Return what a selection of nothing, or of everything, would give; without data.

    Raises:
        NotImplementedError: For a function whose result cannot be guessed this way.
    """
    source: Tensor = args[0]
    if name in {"argwhere", "nonzero", "where"}:
        count = source.numel() if answer else 0
        found = source.new_empty((count, source.ndim), dtype=torch.int64)
        return found.unbind(1) if name == "where" or kwargs.get("as_tuple") else found
    if name == "masked_select":
        mask = args[1] if len(args) > 1 else kwargs["mask"]
        flat = (source * torch.ones_like(mask, dtype=source.dtype)).reshape(-1)
        return flat if answer else flat[:0]
    if name == "__getitem__":
        return source[_positions(args[1], answer=answer)]
    raise NotImplementedError(name)


def scores_of_ctc(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what ``ctc_loss`` would give, whatever the lengths are; without data."""
    given = dict(zip(("log_probs", "", "", "", "", "reduction"), args, strict=False)) | dict(kwargs)
    scores: Tensor = given["log_probs"]
    return scores.sum((0, -1)) if given.get("reduction") == "none" else scores.sum()


def _positions(index: Any, *, answer: bool) -> Any:
    """Replace masks without data in an index by the positions that they might pick."""
    parts = []
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, Tensor) and each.dtype in {torch.bool, torch.uint8}:
            count = each.numel() if answer else 0
            parts += [each.new_empty((count,), dtype=torch.int64) for _ in range(each.ndim)]
        else:
            parts.append(each)
    return tuple(parts)


def has_mask(index: Any) -> bool:
    """Whether an index picks as many elements as some mask has that are true."""
    return any(each.dtype in {torch.bool, torch.uint8} for each in tensors_in(index))


def resolve_masks(args: tuple[Any, ...], has_data: Callable[[Tensor], bool]) -> tuple[Any, ...]:
    """Replace masks that have data in an index by the positions that they pick.

    The result's shape is known then, also where what is indexed has no data.
    """

    def positions(index: Any) -> tuple[Any, ...]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and has_data(index):
            return index.nonzero(as_tuple=True)
        return (index,)

    index = args[1]
    flat = index if isinstance(index, tuple) else (index,)
    return (args[0], tuple(part for each in flat for part in positions(each)), *args[2:])


def is_expert_product(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call multiplies groups of rows with a matrix for each group, as experts do.

    Without data torch takes bf16 on CUDA alone; kernels of the CPU take other types.
    """
    shapes = tensors_in(args[:2])
    return name in {"grouped_mm", "_grouped_mm"} and [each.ndim for each in shapes] == [2, 3]


def expert_product(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what such a call would give, whatever rows each group has; without data."""
    rows, matrices = args[:2]
    made: Tensor = rows @ matrices[0]
    kind = kwargs.get("out_dtype")
    return made if kind is None else made.to(kind)


def is_packing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call packs rows without data by lengths that have some."""
    return name == "_pack_padded_sequence" and is_fake(args[0]) and not is_fake(args[1])


def packed(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return what such a call would give: elements without data, and how many of each step."""
    source, lengths, batch_first = args
    sizes = pack_padded_sequence(torch.zeros(*source.shape[:2], 1), lengths, batch_first)[1]
    return source.flatten(0, 1)[: int(lengths.sum())], sizes


def sees_one_value(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a call takes moments of one value for each channel, which torch refuses."""
    if function is not functional.batch_norm:
        return False
    given: Tensor = args[0]
    trains = kwargs.get("training", args[5] if len(args) > 5 else False)
    return bool(trains) and given.ndim > 1 and given.numel() == given.shape[1]


def norm_of_one_value(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """Return what such a call would give if it was not refused; without data."""
    rows = torch.cat([args[0], args[0]])
    made: Tensor = function(rows, *args[1:], **kwargs)
    return made[:1]

"""Rules for functions whose arguments are sizes or positions, or that sum over the sequence.

A rule is called with the function and its arguments, and returns ``NotImplemented`` if the answer
of ``ask`` is to be used. First come views, slices, joins and padding. Sums and losses are local
sums, at least in fp32 like the accumulation in torch's kernels, and one all-reduce. A convolution
fetches the neighbours that its kernel covers.
"""

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from boltmesh.strategies.context.exchange import fetch, total
from boltmesh.strategies.context.positions import Positions, common, joined, of_one, places
from boltmesh.strategies.context.seq_shard import (
    ContextState,
    SeqShard,
    by_channels,
    make_all_whole,
    make_cut,
    make_whole,
    moved_to,
    part_of,
)
from boltmesh.strategies.torch_compat.tensors import subclasses_unasked

CutRule: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

CUT_RULES: dict[str, CutRule] = {}
"""Rules by the ``__name__`` of the function."""


def cut_rule(*names: str) -> Callable[[CutRule], CutRule]:
    """Decorator that registers a rule for functions of these names."""

    def put(function: CutRule) -> CutRule:
        for name in names:
            assert name not in CUT_RULES, name
            CUT_RULES[name] = function
        return function

    return put


def named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name, given the names of the positional ones."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _place_in(value: SeqShard, shape: torch.Size) -> tuple[int, int, int] | None:
    """Return dim, outer and inner of the sequence in a view; None if the view divides it."""
    num_outer = prod(value.shape[: value.seq_dim]) * value.num_outer
    length = value.positions.length
    done = 1
    for dim, size in enumerate(shape):
        after = done * size
        if (
            num_outer % done == 0
            and after % max(num_outer * length, 1) == 0
            and after >= num_outer * length
        ):
            return dim, num_outer // done, after // (num_outer * length)
        done = after
    return None


@cut_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as",
          "ravel", "squeeze")  # fmt: skip
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stays cut if the view has the whole sequence in one dim."""
    value = args[0]
    if not isinstance(value, SeqShard):
        return NotImplemented
    if torch.dtype in map(type, (*args, *kwargs.values())):
        return NotImplemented
    shape, place = _shape_and_place(func, value, args, kwargs)
    if not shape.numel():
        return NotImplemented
    if place is None:
        why = f"{func.__name__}, which divides the sequence,"
        return func(make_whole(value, why), *args[1:], **kwargs)
    dim, num_outer, num_inner = place
    sizes = list(shape)
    sizes[dim] = num_outer * value.positions.count(value.state.rank) * num_inner
    strict = func.__name__ in {"view", "view_as"}
    local = value.local.view(sizes) if strict else value.local.reshape(sizes)
    return value.like(local, dim=dim, num_outer=num_outer, num_inner=num_inner)


_Seen: TypeAlias = tuple[torch.Size, tuple[int, int, int] | None]

_shapes: dict[Any, _Seen] = {}
"""Shapes of views and the dims of their sequences, by the arguments of the calls."""


def _shape_and_place(
    func: Any, value: SeqShard, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Seen:
    """Return the shape of a view of the whole, and the result of ``_place_in`` for it."""
    key: Any = None
    sizes = args[1:]
    if not kwargs and {int}.issuperset(map(type, sizes)):
        local = value.local
        key = (func, local.shape, value.seq_dim, value.num_outer, value.num_inner,
               value.positions.length, sizes)  # fmt: skip
        known = _shapes.get(key)
        if known is not None:
            return known
    with subclasses_unasked():
        given = [_meta(arg) if isinstance(arg, Tensor) else arg for arg in args]
        shape = func(*given, **kwargs).shape
    seen = shape, _place_in(value, shape)
    if key is not None:
        if len(_shapes) >= _MOST_SHAPES:  # sequences of ever new lengths
            _shapes.clear()
        _shapes[key] = seen
    return seen


_MOST_SHAPES = 20_000


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, device="meta")


@cut_rule("type_as", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
def of_the_kind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Uses only dtype and device of the tensor."""
    if func.__name__ == "type_as":
        return args[0].to(dtype=args[1].dtype, device=args[1].device)
    return func(args[0].local.new_empty(0), *args[1:], **kwargs)


@cut_rule("expand", "expand_as", "broadcast_to")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeats other dims; the division of the sequence does not change."""
    value = args[0]
    if not isinstance(value, SeqShard):
        return NotImplemented
    sizes = kwargs.get("size", args[1:])
    sizes = sizes[0] if sizes and not isinstance(sizes[0], int) else sizes
    sizes = list(sizes.shape if isinstance(sizes, Tensor) else sizes)
    dim = value.seq_dim + len(sizes) - value.ndim
    if sizes[dim] not in (-1, value.shape[value.seq_dim]):
        return NotImplemented  # a sequence of one position, which is repeated
    sizes[dim] = -1
    return value.like(value.local.expand(sizes), dim=dim)


@cut_rule("__getitem__")
def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For a slice every rank keeps its positions of it; one position is sent to all ranks."""
    value, index = args
    if not isinstance(value, SeqShard):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(entry, (Tensor, list, bool)) for entry in index):
        if any(isinstance(entry, bool) for entry in index):
            return func(make_whole(value, "indexing by a boolean"), index)
        whole = make_whole(value, "indexing by tensors")
        return func(whole, make_all_whole(index, "an index"))
    index = tuple(
        entry if isinstance(entry, slice) or entry is None or entry is Ellipsis else int(entry)
        for entry in index
    )
    return _sliced(value, _full(index, value.ndim))


def _full(index: tuple[Any, ...], ndim: int) -> list[Any]:
    """Return an index with an entry for each dim."""
    count = sum(entry is not None and entry is not Ellipsis for entry in index)
    full: list[Any] = []
    for entry in index:
        full += [slice(None)] * (ndim - count) if entry is Ellipsis else [entry]
    missing = ndim - sum(entry is not None for entry in full)
    return full + [slice(None)] * missing


def _sliced(value: SeqShard, index: list[Any]) -> Any:
    dim = out = 0
    for entry in index:
        if entry is None:
            out += 1
        elif dim == value.seq_dim:
            break
        else:
            dim, out = dim + 1, out + (not isinstance(entry, int))
    place = [at for at, entry in enumerate(index) if entry is not None][value.seq_dim]
    asked = index[place]
    if asked == slice(None):
        return value.like(value.local[tuple(index)], dim=out)
    if not value.is_simple or (isinstance(asked, slice) and asked.step not in (None, 1)):
        return make_whole(value, "indexing with a stride or of a flattened dim")[tuple(index)]
    state, length = value.state, value.positions.length
    if isinstance(asked, int):
        if not -length <= asked < length:
            raise IndexError(f"index {asked} is out of bounds for a sequence of {length}")
        if value.was_asked:  # a recurrence: position by position
            index[place] = asked
            return by_channels(value)[tuple(index)]
        value.was_asked = True
        wants = [((asked % length, asked % length + 1),)] * state.group.size
        row = fetch(value.local, value.seq_dim, value.positions, wants, state.group, "select")
        index[place] = 0
        return row[tuple(index)]
    start, stop, _ = asked.indices(length)
    positions = value.positions.narrowed(start, max(stop, start))
    own = value.positions.parts[state.rank]
    kept = places(common(own, ((start, max(stop, start)),)), own)
    first, last = (kept[0][0], kept[-1][1]) if kept else (0, 0)
    index[place] = slice(first, last)
    return value.like(value.local[tuple(index)], dim=out, positions=positions)


@cut_rule("narrow")
def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Like indexing with a slice."""
    given = named(("input", "dim", "start", "length"), args, kwargs)
    value, dim, start = given["input"], given["dim"], int(given["start"])
    if not isinstance(value, SeqShard):
        return NotImplemented
    start = start % value.shape[dim] if start < 0 else start
    index: list[Any] = [slice(None)] * value.ndim
    index[dim] = slice(start, start + int(given["length"]))
    return value[tuple(index)]


@cut_rule("select")
def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Like indexing with an integer."""
    given = named(("input", "dim", "index"), args, kwargs)
    if not isinstance(given["input"], SeqShard):
        return NotImplemented
    index: list[Any] = [slice(None)] * given["input"].ndim
    index[given["dim"]] = int(given["index"])
    return given["input"][tuple(index)]


@cut_rule("split", "chunk", "tensor_split", "unbind")
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Splits local tensors along other dims; takes slices along the sequence."""
    value = args[0]
    if not isinstance(value, SeqShard):
        return NotImplemented
    is_unbind = func.__name__ == "unbind"
    at = 1 if is_unbind else 2
    dim = kwargs.get("dim", args[at] if len(args) > at else 0) % value.ndim
    if dim != value.seq_dim:
        moved = value.seq_dim - (is_unbind and dim < value.seq_dim)
        return tuple(value.like(part, dim=moved) for part in func(value.local, *args[1:], **kwargs))
    if is_unbind:
        whole = make_whole(value, "unbind along the sequence")
        return func(whole, *args[1:], **kwargs)
    with subclasses_unasked():
        shapes = func(_meta(value), *args[1:], **kwargs)
    pieces, start = [], 0
    for piece in shapes:
        pieces.append(value.narrow(dim, start, piece.shape[dim]))
        start += piece.shape[dim]
    return tuple(pieces)


@cut_rule("cat", "concat", "concatenate")
def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Joins along the sequence: every rank keeps its positions; the first rank gets a prefix."""
    given = named(("tensors", "dim"), args, kwargs)
    pieces, dim = list(given["tensors"]), given.get("dim", 0)
    first = next((piece for piece in pieces if isinstance(piece, SeqShard)), None)
    if first is None or given.get("out") is not None:
        return NotImplemented
    ndim = first.local.ndim
    dim %= ndim
    if dim != first.seq_dim:
        local = [piece.local for piece in pieces if isinstance(piece, SeqShard)
                 and _is_cut_as(piece, first)]  # fmt: skip
        if len(local) == len(pieces):
            return first.like(torch.cat(local, dim))
    pieces = [piece for piece in pieces if piece.ndim == ndim]  # torch allows empty vectors
    if dim != first.seq_dim:
        # A piece of no length adds nothing, and has no element by which to see its sequence.
        some = [piece for piece in pieces if piece.shape[dim] or piece.dtype != first.dtype]
        return torch.cat(some, dim) if 0 < len(some) < len(pieces) else NotImplemented
    if any(
        isinstance(piece, SeqShard) and (piece.seq_dim != dim or not piece.is_simple)
        for piece in pieces
    ):
        return NotImplemented
    state = first.state
    divisions: list[Positions] = []
    local = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, SeqShard):
            divisions.append(piece.positions)
            local.append(piece.local)
            continue
        owner = 0 if place == 0 else state.group.size - 1
        division = of_one(piece.shape[dim], state.group.size, owner)
        divisions.append(division)
        local.append(part_of(piece, dim, division, state))
    positions = joined(divisions)
    return make_cut(torch.cat(local, dim), dim, positions, state)


def _is_cut_as(one: SeqShard, other: SeqShard) -> bool:
    return one is other or (
        one.seq_dim == other.seq_dim
        and one.num_outer == other.num_outer
        and one.num_inner == other.num_inner
        and one.positions.parts == other.positions.parts
    )


@cut_rule("pad")
def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along the sequence, adds constants at the ends or removes positions."""
    given = named(("input", "pad", "mode", "value"), args, kwargs)
    value, sizes = given["input"], [int(size) for size in given["pad"]]
    if not isinstance(value, SeqShard) or given.get("mode", "constant") != "constant":
        return NotImplemented
    at = 2 * (value.ndim - 1 - value.seq_dim)
    if not value.is_simple:
        return NotImplemented if any(sizes[at : at + 2]) else _padded(value, sizes, given)
    sizes += [0] * (at + 2 - len(sizes))
    front, back = sizes[at : at + 2]
    sizes[at : at + 2] = [0, 0]
    out = _padded(value, sizes, given) if any(sizes) else value
    dim = out.seq_dim
    if front < 0 or back < 0:
        start = max(-front, 0)
        less = start + max(-back, 0)
        out = cast("SeqShard", out.narrow(dim, start, out.shape[dim] - less))
    fill = given.get("value") or 0
    pieces: list[Tensor] = [out]
    for count, place in ((front, 0), (back, 1)):
        if count > 0:
            shape = list(out.shape)
            shape[dim] = count
            made = torch.full(shape, fill, dtype=value.dtype, device=value.device)
            pieces.insert(place * len(pieces), made)
    return torch.cat(pieces, dim) if len(pieces) > 1 else out


def _padded(value: SeqShard, sizes: list[int], given: dict[str, Any]) -> SeqShard:
    return value.like(functional.pad(value.local, sizes, value=given.get("value")))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize:
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


@cut_rule("sum", "mean")
def add_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sum or mean over dims that include the sequence: a local sum and an all-reduce."""
    given = named(("input", "dim", "keepdim"), args, kwargs)
    value, dims = given["input"], given.get("dim", given.get("axis"))
    if not isinstance(value, SeqShard) or given.get("out") is not None:
        return NotImplemented
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = range(value.ndim)
    dims = sorted(dim % value.ndim for dim in ([dims] if isinstance(dims, int) else dims))
    if value.seq_dim not in dims:
        return NotImplemented
    is_mean = func.__name__ == "mean"
    asked = given.get("dtype")
    dtype = asked or value.dtype
    if is_mean and not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented  # torch's own error
    part = value.local.sum(dims, keepdim=bool(given.get("keepdim", False)),
                           dtype=_sum_dtype(dtype))  # fmt: skip
    count = prod(value.shape[dim] for dim in dims)
    whole = total(part, value.state.group, count)
    if is_mean:
        whole = whole / count
    is_number = dtype.is_floating_point or dtype.is_complex
    return whole.to(dtype if is_number or asked else torch.int64)


def _own(value: SeqShard, target: Tensor, dim: int) -> Tensor:
    """Return this rank's positions of a target, or of weights of its elements."""
    if isinstance(target, SeqShard):
        return moved_to(target, value.positions).local
    return part_of(target, dim, value.positions, value.state, value.num_outer, value.num_inner)


def _summed(values: Tensor, *others: Tensor, state: ContextState, num_summed: int) -> Tensor:
    """Return the sums of each tensor over all ranks, ``(tensors,)``, by one all-reduce."""
    dtype = _sum_dtype(values.dtype)
    sums = [summand.sum(dtype=dtype) for summand in (values, *others)]
    return total(torch.stack(sums), state.group, num_summed)


@cut_rule("cross_entropy", "nll_loss")
def classify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses over classes: local sums of losses and of weights, and one all-reduce of both."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
             "label_smoothing")  # fmt: skip
    given = named(names, args, kwargs)
    value, target = given.pop("input"), given.pop("target")
    how = given.pop("reduction", "mean")
    legacy = given.pop("size_average", None), given.pop("reduce", None)
    if not isinstance(value, SeqShard) or legacy != (None, None):
        return NotImplemented
    weight = given.get("weight")
    smoothing = given.get("label_smoothing", 0.0)
    class_dim = 1 if value.ndim > 1 else 0
    if value.seq_dim == class_dim or isinstance(weight, SeqShard):
        return NotImplemented
    is_index = not target.is_floating_point()
    if (smoothing and weight is not None) or (not is_index and weight is not None):
        return NotImplemented  # the count is not that of the targets' weights alone
    target_dim = value.seq_dim - (is_index and value.seq_dim > 1)
    if isinstance(target, SeqShard) and (target.seq_dim, target.num_outer, target.num_inner) != (
        target_dim, value.num_outer, value.num_inner,
    ):  # fmt: skip
        return NotImplemented
    own = _own(value, target, target_dim)
    losses = func(value.local, own, reduction="none", **given)
    if how == "none":
        return value.like(losses, dim=value.seq_dim - (value.seq_dim > 1))
    if is_index:
        counted = own != given.get("ignore_index", -100)
        counts = counted if weight is None else weight[own.masked_fill(~counted, 0)] * counted
    else:
        counts = torch.ones_like(losses)
    counts = counts if weight is None else counts.to(losses.dtype)
    num_losses = value.numel() // value.shape[class_dim]
    both = _summed(losses, counts, state=value.state, num_summed=num_losses)
    loss = both[0] if how == "sum" else both[0] / both[1].detach()
    return loss.to(losses.dtype)


_ELEMENTS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
             "binary_cross_entropy_with_logits", "kl_div")  # fmt: skip


@cut_rule(*_ELEMENTS)
def by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses by element: a local sum and an all-reduce, divided by the number of elements."""
    given = named(("input", "target"), args[:2], kwargs)
    value, target = given.pop("input"), given.pop("target")
    how = given.pop("reduction", "mean")
    legacy = given.pop("size_average", None), given.pop("reduce", None)
    others = [option for option in given.values() if isinstance(option, Tensor)]
    if (
        not isinstance(value, SeqShard)
        or len(args) > 2
        or legacy != (None, None)
        or others
        or target.shape != value.shape
        or (
            isinstance(target, SeqShard)
            and (target.seq_dim, target.num_outer, target.num_inner)
            != (value.seq_dim, value.num_outer, value.num_inner)
        )
    ):
        return NotImplemented
    losses = func(value.local, _own(value, target, value.seq_dim), reduction="none", **given)
    if how == "none":
        return value.like(losses)
    whole = _summed(losses, state=value.state, num_summed=value.numel())[0]
    if how != "sum":
        whole = whole / (value.shape[0] if how == "batchmean" else value.numel())
    return whole.to(losses.dtype)


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) else value


@cut_rule("conv1d")
def conv1d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetches neighbours, if the stride is 1 and each rank has one range of positions."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = named(names, args, kwargs)
    value, weight = given.pop("input"), given.pop("weight")
    stride, padding = _one(given.pop("stride", 1)), _one(given.pop("padding", 0))
    dilation = _one(given.pop("dilation", 1))
    if (
        not isinstance(value, SeqShard)
        or value.ndim != 3
        or value.seq_dim != 2
        or not value.is_simple
        or isinstance(weight, SeqShard)
        or stride != 1
        or not isinstance(padding, int)
    ):
        return NotImplemented
    reach = dilation * (weight.shape[-1] - 1)
    if value.positions.length + 2 * padding <= reach:
        return NotImplemented
    padded = cast("SeqShard", functional.pad(value, (padding, padding))) if padding else value
    positions = padded.positions.narrowed(0, padded.positions.length - reach)
    if any(len(intervals) > 1 for intervals in positions.parts):
        return NotImplemented
    wants = [((own[0][0], own[0][1] + reach),) if own else () for own in positions.parts]
    state = value.state
    seen = fetch(padded.local, 2, padded.positions, wants, state.group, "halo")
    if positions.count(state.rank):
        made = func(seen, weight, dilation=dilation, **given)
    else:  # its edges of the graph stay, for other ranks wait for its backward pass
        used = [tensor for tensor in (seen, weight, given.get("bias")) if tensor is not None]
        made = seen.new_zeros(seen.shape[0], weight.shape[0], 0) + 0 * sum(e.sum() for e in used)
    return value.like(made, positions=positions)

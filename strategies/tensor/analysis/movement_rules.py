"""Rules for operators that only move elements: views, lookups, cuts and joins.

Views regroup the dims of a tensor. Lookups take or put elements by integer index. Others cut
tensors along a dim, or join them.
"""

import torch
from torch import Tensor

from boltmesh.strategies.tensor.analysis.symbolic_dims import Dim, narrow, new_dim, regroup
from boltmesh.strategies.tensor.analysis.trace import Lookup, OperatorCall, rule


@rule(
    "_pin_memory", "_to_copy", "alias", "clone", "contiguous", "detach", "detach_", "lift",
    "lift_fresh", "lift_fresh_copy", "to",
)  # fmt: skip
def copy(call: OperatorCall) -> None:
    """Return the same elements."""
    call.give_view(*call.dims(call.first))


@rule("empty_like", "full_like", "new_empty_like", "ones_like", "zeros_like")
def like(call: OperatorCall) -> None:
    """Return another tensor with the same dims."""
    call.give(*call.dims(call.first))


@rule("_reshape_alias", "_unsafe_view", "reshape", "view", "view_copy")
def view(call: OperatorCall) -> None:
    """Return the same elements in other dims."""
    if "dtype" in call.arguments and call.first.shape != call.output.shape:
        call.forget()
        return
    dims = regroup(call.dims(call.first), call.output.shape, call.trace.reason(call.name))
    call.names_sizes(dims)
    call.give_view(*dims)


@rule("permute", "t", "transpose")
def transpose(call: OperatorCall) -> None:
    """Return the same dims in another order."""
    dims = list(call.dims(call.first))
    if call.name == "t":
        dims.reverse()
    elif call.name == "transpose":
        one, other = call.arguments["dim0"], call.arguments["dim1"]
        dims[one], dims[other] = dims[other], dims[one]
    else:
        dims = [dims[each] for each in call.arguments["dims"]]
    call.give_view(*dims)


@rule("unsqueeze")
def unsqueeze(call: OperatorCall) -> None:
    """Insert a dim of one element."""
    dims = list(call.dims(call.first))
    dims.insert(call.arguments["dim"] % call.output.ndim, ())
    call.give_view(*dims)


@rule("squeeze")
def squeeze(call: OperatorCall) -> None:
    """Remove dims of one element: all, or the named ones."""
    ndim, asked = call.first.ndim, call.arguments.get("dim")
    chosen = range(ndim) if asked is None else asked if isinstance(asked, list) else [asked]
    dropped = {each % ndim for each in chosen if call.first.shape[each] == 1} if ndim else set()
    dims = [dim for place, dim in enumerate(call.dims(call.first)) if place not in dropped]
    call.give_view(*dims)


@rule("broadcast_to", "expand", "expand_copy")
def expand(call: OperatorCall) -> None:
    """Repeat the tensor along new axes."""
    dims = [new_dim(each) for each in call.output.shape]
    first = call.output.ndim - call.first.ndim
    for place, dim in enumerate(call.dims(call.first), start=first):
        if call.first.shape[place - first] == call.output.shape[place]:
            dims[place] = dim
    call.names_sizes(dims)
    call.give_view(*dims)


@rule("repeat")
def repeat(call: OperatorCall) -> None:
    """Repeat whole dims: each gets a new outer axis."""
    first = call.output.ndim - call.first.ndim
    dims = [new_dim(each) for each in call.arguments["repeats"]]
    for place, dim in enumerate(call.dims(call.first), start=first):
        dims[place] = (*dims[place], *dim)
    call.names_sizes(dims)
    call.give(*dims)


@rule("view_as_complex")
def view_as_complex(call: OperatorCall) -> None:
    """View pairs of numbers as one complex number."""
    *dims, pair = call.dims(call.first)
    call.whole(pair)
    call.give(*dims)


@rule("view_as_real")
def view_as_real(call: OperatorCall) -> None:
    """View complex numbers as pairs."""
    call.give(*call.dims(call.first), call.new_whole(2))


@rule("embedding")
def embedding(call: OperatorCall) -> None:
    """Look up rows of a table; the row axis is no axis of the output."""
    table, indices = call.inputs[:2]
    dims = call.dims(table)
    parameter = call.trace.parameter(table)
    if parameter is None:
        call.whole(dims[0])
    else:
        call.trace.lookups.append(Lookup(parameter, call.trace.module))
    call.give(*call.dims(indices), *dims[1:])


@rule("index", "_unsafe_index")
def index(call: OperatorCall) -> None:
    """Index dims by tensors, one for each indexed dim."""
    given: list[Tensor | None] = call.arguments["indices"]
    dims = call.dims(call.first)
    places = [place for place, each in enumerate(given) if each is not None]
    tensors = [each for each in given if each is not None]
    call.whole(*(dims[each] for each in places))
    adjacent = places == list(range(places[0], places[0] + len(places)))
    if any(each.dtype in {torch.bool, torch.uint8} for each in tensors) or not adjacent:
        # A mask merges several dims into one; later dims do not change.
        covered = max(places) + max(each.ndim for each in tensors)
        call.whole(*dims[:covered])
        kept = call.output.ndim - (len(dims) - covered)
        if not adjacent or places[0] != 0 or kept < 0:
            call.forget()
            return
        front = [call.new_whole(size) for size in call.output.shape[:kept]]
        call.give(*front, *dims[covered:])
        return
    count = call.output.ndim - (len(dims) - len(places))
    looked: tuple[Dim, ...] = tuple(
        new_dim(size) for size in call.output.shape[places[0] : places[0] + count]
    )
    if len(tensors) == 1:
        looked = call.dims(tensors[0])
    # A row of a parameter, such as the matrices of one expert, is still the parameter.
    parameter = call.trace.parameter(call.first) if places == [0] else None
    call.give(*dims[: places[0]], *looked, *dims[places[-1] + 1 :], parameter=parameter)


@rule("index_select")
def index_select(call: OperatorCall) -> None:
    """Index one dim by a vector."""
    dims = list(call.dims(call.first))
    place = call.arguments["dim"] % len(dims)
    call.whole(dims[place])
    dims[place] = call.new_whole(call.output.shape[place])
    call.give(*dims)


@rule("gather", "take_along_dim")
def gather(call: OperatorCall) -> None:
    """Index one dim per element; the other dims correspond."""
    place = call.arguments["dim"] % call.first.ndim
    given = call.dims(call.arguments["index"])
    for at, (one, other) in enumerate(zip(call.dims(call.first), given, strict=True)):
        if at == place or call.first.shape[at] != call.arguments["index"].shape[at]:
            call.whole(one, other)
        else:
            call.same(one, other)
    call.give(*given)


@rule(
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
)  # fmt: skip
def put_along(call: OperatorCall) -> None:
    """Write elements at indices along one dim; the other dims correspond."""
    place = call.arguments["dim"] % max(call.first.ndim, 1)
    _put(call, {place}, [each for each in call.inputs[1:] if each.ndim == call.first.ndim])


@rule("_index_put_impl_", "index_put", "index_put_")
def index_put(call: OperatorCall) -> None:
    """Write elements at indices of the first dims."""
    indices = call.arguments["indices"]
    values: Tensor = call.arguments["values"]
    count = sum(max(each.ndim, 1) if each.dtype == torch.bool else 1 for each in indices
                if each is not None)  # fmt: skip
    if None in indices[:count]:
        call.forget()
        return
    behind = call.dims(call.first)[count:]
    front = values.ndim - len(behind)
    call.same_from_last(values.shape, behind, call.dims(values))
    call.whole(*call.dims(call.first)[:count], *call.dims(values)[: max(front, 0)])
    _put(call, set(range(count)), [])


def _put(call: OperatorCall, places: set[int], sources: list[Tensor]) -> None:
    dims = call.dims(call.first)
    call.whole(*(dims[each] for each in sorted(places) if each < len(dims)))
    for source in sources:
        for place, (one, other) in enumerate(zip(dims, call.dims(source), strict=True)):
            if place in places or source.shape[place] != call.first.shape[place]:
                call.whole(one, other)
            else:
                call.same(one, other)
    for each in (call.first, call.output):
        call.give(*dims, output=each)


@rule("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d")
def pad(call: OperatorCall) -> None:
    """Pad the ends of the last dims."""
    dims = list(call.dims(call.first))
    added = call.arguments.get("pad") or call.arguments.get("padding") or ()
    for back in range(1, len(added) // 2 + 1):
        call.whole(dims[-back])
        dims[-back] = call.new_whole(call.output.shape[-back])
    call.give(*dims)


@rule(
    "bincount", "bucketize", "histc", "is_nonzero", "masked_select", "nonzero", "one_hot",
    "searchsorted", "unique", "unique2", "_unique2", "unique_consecutive", "unique_dim",
)  # fmt: skip
def count(call: OperatorCall) -> None:
    """Compute values that depend on all elements."""
    call.forget()


@rule(
    "chunk", "split", "split_with_sizes", "split_with_sizes_copy", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes",
)  # fmt: skip
def split(call: OperatorCall) -> None:
    """Split a dim into sections."""
    dims = list(call.dims(call.first))
    place = call.arguments["dim"] % call.first.ndim
    call.names_sizes(dims)
    start = 0
    for output in call.outputs:
        size = output.shape[place]
        section = narrow(dims[place], start, size, call.trace.reason(call.name))
        call.give_view(*dims[:place], section, *dims[place + 1 :], output=output)
        start += size


@rule("slice")
def cut(call: OperatorCall) -> None:
    """Cut one section out of a dim; with a step, the dim must be whole."""
    dims = list(call.dims(call.first))
    place = call.arguments["dim"] % call.first.ndim
    whole, size = call.first.shape[place], call.output.shape[place]
    if (call.arguments.get("step") or 1) != 1:
        call.whole(dims[place])
        dims[place] = call.new_whole(size)
    else:
        start = call.arguments.get("start") or 0
        start = min(max(start + whole, 0) if start < 0 else start, whole)
        dims[place] = narrow(dims[place], start, size, call.trace.reason(call.name))
        if size != whole:
            call.names_sizes(dims)
    call.give_view(*dims)


@rule("select", "unbind")
def select(call: OperatorCall) -> None:
    """Select one index of a dim, or unbind all."""
    dims = list(call.dims(call.first))
    call.whole(dims.pop(call.arguments.get("dim", 0) % call.first.ndim))
    for each in call.outputs:
        call.give_view(*dims, output=each)


@rule("cat", "stack")
def join(call: OperatorCall) -> None:
    """Concatenate tensors along a dim, or stack them along a new one."""
    parts = [each for each in call.inputs if each.numel()] or [call.first]
    place = call.arguments.get("dim", 0) % call.output.ndim
    if len(parts) == 1 and call.name == "cat":
        call.give(*call.dims(parts[0]))
        return
    dims = list(call.dims(parts[0]))
    for each in parts[1:]:
        for at, (one, other) in enumerate(zip(dims, call.dims(each), strict=True)):
            if call.name == "stack" or at != place:
                call.same(one, other)
    if call.name == "stack":
        dims.insert(place, ())
    else:
        call.whole(*(call.dims(each)[place] for each in parts))
    dims[place] = call.new_whole(call.output.shape[place])
    for each in parts:
        call.uses(each)
    call.give(*dims)


@rule("glu")
def glu(call: OperatorCall) -> None:
    """Multiply one half by the sigmoid of the other."""
    dims = list(call.dims(call.first))
    place = call.arguments["dim"] % call.first.ndim
    half = call.output.shape[place]
    one, other = (
        narrow(dims[place], start, half, call.trace.reason(call.name)) for start in (0, half)
    )
    call.same(one, other)
    dims[place] = one
    call.names_sizes(dims)
    call.give(*dims)

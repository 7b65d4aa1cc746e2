"""Operators that only name the dimensions of a tensor otherwise."""

from boltmesh.strategies.tensor.analysis.op_rules.rule import OperatorCall, rule
from boltmesh.strategies.tensor.analysis.symbolic_dims import new_dim, regroup


@rule(
    "_pin_memory", "_to_copy", "alias", "clone", "contiguous", "detach", "detach_", "lift",
    "lift_fresh", "lift_fresh_copy", "to",
)  # fmt: skip
def copy(call: OperatorCall) -> None:
    """The same elements."""
    call.give(*call.dims(call.first), parameter=call.trace.parameter(call.first))


@rule("empty_like", "full_like", "new_empty_like", "ones_like", "zeros_like")
def like(call: OperatorCall) -> None:
    """Another tensor of the same dimensions."""
    call.give(*call.dims(call.first))


@rule("_reshape_alias", "_unsafe_view", "reshape", "view", "view_copy")
def view(call: OperatorCall) -> None:
    """The same elements in other dimensions."""
    if "dtype" in call.arguments and call.first.shape != call.output.shape:
        call.forget()
        return
    dims = regroup(call.dims(call.first), call.output.shape, call.trace.reason(call.name))
    call.names_sizes(dims)
    call.give(*dims, parameter=call.trace.parameter(call.first))


@rule("permute", "t", "transpose")
def transpose(call: OperatorCall) -> None:
    """The same dimensions in another order."""
    dims = list(call.dims(call.first))
    if call.name == "t":
        dims.reverse()
    elif call.name == "transpose":
        one, other = call.arguments["dim0"], call.arguments["dim1"]
        dims[one], dims[other] = dims[other], dims[one]
    else:
        dims = [dims[each] for each in call.arguments["dims"]]
    call.give(*dims, parameter=call.trace.parameter(call.first))


@rule("unsqueeze")
def unsqueeze(call: OperatorCall) -> None:
    """One more dimension of one element."""
    dims = list(call.dims(call.first))
    dims.insert(call.arguments["dim"] % call.output.ndim, ())
    call.give(*dims, parameter=call.trace.parameter(call.first))


@rule("squeeze")
def squeeze(call: OperatorCall) -> None:
    """Without dimensions of one element: all of them, or those that are named."""
    ndim, asked = call.first.ndim, call.arguments.get("dim")
    chosen = range(ndim) if asked is None else asked if isinstance(asked, list) else [asked]
    dropped = {each % ndim for each in chosen if call.first.shape[each] == 1} if ndim else set()
    dims = [dim for place, dim in enumerate(call.dims(call.first)) if place not in dropped]
    call.give(*dims, parameter=call.trace.parameter(call.first))


@rule("broadcast_to", "expand", "expand_copy")
def expand(call: OperatorCall) -> None:
    """The same elements for every element of new axes."""
    dims = [new_dim(each) for each in call.output.shape]
    first = call.output.ndim - call.first.ndim
    for place, dim in enumerate(call.dims(call.first), start=first):
        if call.first.shape[place - first] == call.output.shape[place]:
            dims[place] = dim
    call.names_sizes(dims)
    call.give(*dims, parameter=call.trace.parameter(call.first))


@rule("repeat")
def repeat(call: OperatorCall) -> None:
    """The whole dimension again and again: a new axis outside of it."""
    first = call.output.ndim - call.first.ndim
    dims = [new_dim(each) for each in call.arguments["repeats"]]
    for place, dim in enumerate(call.dims(call.first), start=first):
        dims[place] = (*dims[place], *dim)
    call.names_sizes(dims)
    call.give(*dims)


@rule("view_as_complex")
def view_as_complex(call: OperatorCall) -> None:
    """Pairs of numbers become one."""
    *dims, pair = call.dims(call.first)
    call.whole(pair)
    call.give(*dims)


@rule("view_as_real")
def view_as_real(call: OperatorCall) -> None:
    """Numbers become pairs."""
    pair = new_dim(2)
    call.whole(pair)
    call.give(*call.dims(call.first), pair)

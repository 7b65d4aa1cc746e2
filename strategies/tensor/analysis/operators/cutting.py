"""Operators that cut tensors apart along a dimension, or join them."""

from boltmesh.strategies.tensor.analysis.atoms import narrow, new_dim
from boltmesh.strategies.tensor.analysis.operators.rule import Call, rule
from boltmesh.strategies.tensor.analysis.records import Use


@rule(
    "chunk", "split", "split_with_sizes", "split_with_sizes_copy", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes",
)  # fmt: skip
def split(call: Call) -> None:
    """Sections, one after the other."""
    dims = list(call.dims(call.first))
    place = call.arguments["dim"] % call.first.ndim
    call.names_sizes(dims)
    start = 0
    for output in call.outputs:
        size = output.shape[place]
        section = narrow(dims[place], start, size, call.trace.reason(call.name))
        call.give(
            *dims[:place],
            section,
            *dims[place + 1 :],
            output=output,
            parameter=call.trace.parameter(call.first),
        )
        start += size


@rule("slice")
def cut(call: Call) -> None:
    """One section; with a stride, elements of which each neighbour is missing."""
    dims = list(call.dims(call.first))
    place = call.arguments["dim"] % call.first.ndim
    whole, size = call.first.shape[place], call.output.shape[place]
    if (call.arguments.get("step") or 1) != 1:
        call.whole(dims[place])
        dims[place] = new_dim(size)
        call.whole(dims[place])
    else:
        start = call.arguments.get("start") or 0
        start = min(max(start + whole, 0) if start < 0 else start, whole)
        dims[place] = narrow(dims[place], start, size, call.trace.reason(call.name))
        if size != whole:
            call.names_sizes(dims)
    call.give(*dims, parameter=call.trace.parameter(call.first))


@rule("select", "unbind")
def select(call: Call) -> None:
    """One element of a dimension, or each."""
    dims = list(call.dims(call.first))
    call.whole(dims.pop(call.arguments.get("dim", 0) % call.first.ndim))
    for each in call.outputs:
        call.give(*dims, output=each, parameter=call.trace.parameter(call.first))


@rule("cat", "stack")
def join(call: Call) -> None:
    """Several tensors, one after the other along a dimension; ``stack`` makes it."""
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
    dims[place] = new_dim(call.output.shape[place])
    call.whole(dims[place])
    for each in parts:
        parameter = call.trace.parameter(each)
        if parameter is not None:
            call.trace.uses.append(Use(parameter, tuple(dims), call.trace.module))
    call.give(*dims)


@rule("glu")
def glu(call: Call) -> None:
    """One half times the sigmoid of the other."""
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

"""Operators that combine tensors element by element, random masks among them."""

from boltmesh.strategies.tensor.analysis.atoms import Dim, new_dim
from boltmesh.strategies.tensor.analysis.operators.rule import Call, rule
from boltmesh.strategies.tensor.analysis.records import Use


@rule(
    "_conj", "_conj_physical", "addcdiv", "addcmul", "complex", "copy", "copy_", "fill", "fill_",
    "floor_divide", "imag", "lerp", "log_sigmoid_forward", "masked_fill", "masked_fill_", "polar",
    "real", "resolve_conj", "resolve_neg", "where", "zero", "zero_",
)  # fmt: skip
def pointwise(call: Call) -> None:
    """Dimensions of the same place, from the last one back, are the same; one element goes on."""
    shape = call.output.shape
    dims: list[Dim | None] = [None] * len(shape)
    taken = [each for each in call.inputs if each.ndim]
    for each in taken:
        first = len(shape) - each.ndim
        for place, dim in enumerate(call.dims(each), start=first):
            if each.shape[place - first] != shape[place]:
                continue
            known = dims[place]
            if known is None:
                dims[place] = dim
            elif shape[place] != 1:
                call.same(known, dim)
    given = tuple(
        new_dim(size) if dim is None else dim for size, dim in zip(shape, dims, strict=True)
    )
    for each in taken:
        parameter = call.trace.parameter(each)
        if parameter is not None:
            call.trace.uses.append(Use(parameter, given, call.trace.module))
    alone = len(taken) == 1 and taken[0].shape == shape
    call.give(*given, parameter=call.trace.parameter(taken[0]) if alone else None)
    if call.name.endswith("_"):  # what is written to may not be what comes back
        call.give(*given, output=call.first)


RANDOM = (
    "_fused_dropout", "bernoulli", "bernoulli_", "exponential_", "geometric_", "native_dropout",
    "normal_", "rand_like", "randint_like", "randn_like", "random_", "uniform_",
)  # fmt: skip
"""Operators that draw a number for each element of a tensor."""


@rule(*RANDOM)
def draw(call: Call) -> None:
    """Random numbers for each element."""
    dims = call.dims(call.first)
    call.draws(dims)
    for each in call.outputs:
        call.give(*dims, output=each)

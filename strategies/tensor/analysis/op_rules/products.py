"""Matrix products and convolutions: one axis is summed over, the others go on.

Fused attention: heads go on, what a head is made of and the keys it looks at do not.
"""

from torch import Tensor

from boltmesh.strategies.tensor.analysis.op_rules.rule import OperatorCall, rule
from boltmesh.strategies.tensor.analysis.symbolic_dims import Dim, new_dim
from boltmesh.strategies.tensor.analysis.trace import Product, Use


def contract(call: OperatorCall, one: Tensor, other: Tensor, dims: tuple[Dim, Dim]) -> None:
    """Say that a dimension of each of two tensors is summed over.

    Only a product with a parameter may be divided there, as row-parallel: the sum over ranks is
    taken where its module ends.
    """
    call.same(*dims)
    first, second = call.trace.parameter(one), call.trace.parameter(other)
    parameter = first or second
    if parameter is None or (first and second):
        call.whole(*dims)
    else:
        call.trace.products.append(Product(parameter, dims[0], call.trace.module))


def _add(call: OperatorCall, added: Tensor | None, dims: tuple[Dim, ...]) -> None:
    """Say that a bias or another addend has the dimensions of a product, from the last one back."""
    if added is None:
        return
    parameter = call.trace.parameter(added)
    if parameter is not None:
        call.trace.uses.append(Use(parameter, dims, call.trace.module, True))
    for size, mine, theirs in zip(
        reversed(added.shape), reversed(dims), reversed(call.dims(added)), strict=False
    ):
        if size > 1:
            call.same(mine, theirs)


@rule("mm", "addmm", "bmm", "baddbmm")
def matrix_product(call: OperatorCall) -> None:
    """``[batch,] rows x inner`` times ``[batch,] inner x columns``, and an addend."""
    *added, one, other = call.inputs
    left, right = call.dims(one), call.dims(other)
    if len(left) == 3:
        call.same(left[0], right[0])
    contract(call, one, other, (left[-1], right[-2]))
    dims = (*left[:-1], right[-1])
    _add(call, added[0] if added else None, dims)
    call.give(*dims)


@rule("linear")
def linear(call: OperatorCall) -> None:
    """Where torch does not take it apart into a transposition and a product."""
    one, other = call.inputs[:2]
    left, right = call.dims(one), call.dims(other)
    contract(call, one, other, (left[-1], right[1]))
    dims = (*left[:-1], right[0])
    _add(call, call.tensor("bias"), dims)
    call.give(*dims)


@rule("mv", "dot", "vdot")
def vector_product(call: OperatorCall) -> None:
    """A matrix or a vector times a vector."""
    one, other = call.inputs[:2]
    left, right = call.dims(one), call.dims(other)
    call.same(left[-1], right[-1])
    call.whole(left[-1])
    call.give(*left[:-1])


@rule("linalg_solve_triangular")
def solve(call: OperatorCall) -> None:
    """Systems of equations, each for itself."""
    left, right = (call.dims(each) for each in call.inputs[:2])
    for one, other in zip(left[:-2], right[:-2], strict=True):
        call.same(one, other)
    call.whole(*left[-2:], *right[-2:])
    call.give(*right)


@rule("_grouped_mm")
def grouped_product(call: OperatorCall) -> None:
    """Rows of several experts, each times the matrix of its own."""
    one, other = call.inputs[:2]
    left, right = call.dims(one), call.dims(other)
    contract(call, one, other, (left[-1], right[-2]))
    for dims in (left, right):
        if len(dims) == 3:
            call.whole(dims[0])
    call.give(*left[: call.output.ndim - 1], right[-1])


@rule("convolution", "_convolution")
def convolution(call: OperatorCall) -> None:
    """Sums over channels and neighbours; channels of several groups are left whole."""
    data, weight, bias = call.tensor("input"), call.tensor("weight"), call.tensor("bias")
    assert data is not None
    assert weight is not None
    batch, channels, *places = call.dims(data)
    out, into, *kernel = call.dims(weight)
    if call.arguments["transposed"]:
        out, into = into, out
    call.whole(*places, *kernel)
    if call.arguments["groups"] == 1:
        contract(call, data, weight, (channels, into))
    else:
        call.whole(channels, out, into)
        out = new_dim(call.output.shape[1])
        call.whole(out)
    spatial = [new_dim(size) for size in call.output.shape[2:]]
    call.whole(*spatial)
    _add(call, bias, (out,))
    call.give(batch, out, *spatial)


@rule(
    "_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention",
)  # fmt: skip
def attention(call: OperatorCall) -> None:
    """``[batch, heads, length, channels]`` of queries, keys and values.

    Queries may have several heads for each head of keys, neighbours for the same one.
    """
    query, key, value = (call.dims(each) for each in call.inputs[:3])
    query_heads, key_heads = call.inputs[0].shape[1], call.inputs[1].shape[1]
    for one, other in ((query, key), (key, value)):
        call.same(one[0], other[0])
    call.same(key[1], value[1])
    call.same(query[1], (*key[1], *new_dim(query_heads // key_heads)))
    call.same(query[3], key[3])
    call.same(key[2], value[2])
    call.whole(query[3], key[2])
    scores = (query[0], query[1], query[2], key[2])
    for name in ("attn_mask", "attn_bias"):
        _mask(call, call.tensor(name), scores)
    if (call.arguments.get("dropout_p") or 0) > 0:
        call.draws(scores)
    call.give(query[0], query[1], query[2], value[3])
    call.give_new(*call.outputs[1:])


def _mask(call: OperatorCall, mask: Tensor | None, scores: tuple[Dim, ...]) -> None:
    if mask is None:
        return
    for size, dim, other in zip(
        reversed(mask.shape), reversed(call.dims(mask)), reversed(scores), strict=False
    ):
        if size > 1:
            call.same(dim, other)

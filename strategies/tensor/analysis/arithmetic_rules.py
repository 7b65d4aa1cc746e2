"""Rules for operators that compute: element by element, along a dim, and matrix products.

That includes operators that create tensors or only read one, and random masks. A matrix product or
convolution sums over one axis and keeps the others; fused attention keeps the heads, and needs the
channels of a head and the keys whole.
"""

from collections.abc import Sequence

from torch import Tensor

from boltmesh.strategies.tensor.analysis.symbolic_dims import Dim, new_dim
from boltmesh.strategies.tensor.analysis.trace import OperatorCall, Product, rule


@rule(
    "arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "zeros",
)  # fmt: skip
def make(call: OperatorCall) -> None:
    """Create axes that occur nowhere else; later operators unify them with others."""
    call.give_new(*call.outputs)


@rule(
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_has_same_storage_numel",
    "_local_scalar_dense", "device", "equal", "is_same_size", "item", "sym_numel", "sym_size",
    "sym_storage_offset", "sym_stride",
)  # fmt: skip
def look(call: OperatorCall) -> None:
    """Return nothing or a number, which is equal on all ranks if the input is whole."""
    if call.name in {"_local_scalar_dense", "equal"}:
        call.whole_tensors(*call.inputs)


@rule(
    "_conj", "_conj_physical", "addcdiv", "addcmul", "complex", "copy", "copy_", "fill", "fill_",
    "floor_divide", "imag", "lerp", "log_sigmoid_forward", "masked_fill", "masked_fill_", "polar",
    "real", "resolve_conj", "resolve_neg", "where", "zero", "zero_",
)  # fmt: skip
def pointwise(call: OperatorCall) -> None:
    """Unify dims at the same position, counted from the last; size 1 broadcasts."""
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
        call.uses(each)
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
def draw(call: OperatorCall) -> None:
    """Draw a random number for each element."""
    dims = call.dims(call.first)
    call.draws(dims)
    for each in call.outputs:
        call.give(*dims, output=each)


def _places(asked: object, ndim: int) -> set[int]:
    """Return the dims that an argument names; all if it names none."""
    if asked is None or asked == [] or ndim == 0:
        return set(range(ndim))
    named = [int(each) for each in asked] if isinstance(asked, Sequence) else [int(str(asked))]
    return {each % ndim for each in named}


@rule(
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "linalg_vector_norm",
    "logsumexp", "max", "mean", "median", "min", "nanmean", "nansum", "norm", "prod", "std",
    "std_mean", "sum", "var", "var_mean",
)  # fmt: skip
def reduce(call: OperatorCall) -> None:
    """Reduce dims, which must be whole."""
    dims = call.dims(call.first)
    gone = _places(call.arguments.get("dim"), len(dims))
    if call.name != "mean" or call.trace.module not in call.trace.attentions:
        # Torch's attention averages weights over heads; its replacement can do that divided.
        call.whole(*(dims[each] for each in sorted(gone)))
    keeps = call.output.ndim == len(dims)
    kept = [
        () if place in gone else dim for place, dim in enumerate(dims) if keeps or place not in gone
    ]
    for each in call.outputs:
        call.give(*kept, output=each)


@rule(
    "_log_softmax", "_safe_softmax", "_softmax", "cummax", "cummin", "cumprod", "cumsum", "flip",
    "log_softmax", "logcumsumexp", "roll", "softmax", "sort",
)  # fmt: skip
def along(call: OperatorCall) -> None:
    """Keep the shape; each element depends on all elements along a dim."""
    dims = call.dims(call.first)
    asked = call.arguments.get("dim", call.arguments.get("dims"))
    call.whole(*(dims[each] for each in sorted(_places(asked, len(dims)))))
    for each in call.outputs:
        call.give(*dims, output=each)


@rule("kthvalue", "mode", "multinomial", "topk")
def choose(call: OperatorCall) -> None:
    """Select elements along a dim, or their indices."""
    dims = list(call.dims(call.first))
    place = call.arguments.get("dim", -1) % max(len(dims), 1)
    call.whole(dims[place])
    for each in call.outputs:
        if each.ndim == len(dims):
            dims[place] = call.new_whole(each.shape[place])
            call.give(*dims, output=each)
        else:
            call.give(*dims[:place], *dims[place + 1 :], output=each)


@rule("tril", "triu")
def triangle(call: OperatorCall) -> None:
    """Mask elements by their position in the last two dims."""
    dims = call.dims(call.first)
    call.whole(*dims[-2:])
    call.give(*dims)


@rule("_fused_rms_norm", "native_layer_norm", "rms_norm")
def norm(call: OperatorCall) -> None:
    """Normalise over the last dims, with a learned scale and bias."""
    dims = call.dims(call.first)
    count = len(call.arguments["normalized_shape"])
    normed = dims[len(dims) - count :]
    call.whole(*normed)
    for name in ("weight", "bias"):
        scale = call.tensor(name)
        if scale is not None:
            for one, other in zip(normed, call.dims(scale), strict=True):
                call.same(one, other)
            call.uses(scale)
    call.give(*dims)
    for each in call.outputs[1:]:
        call.give(*dims[: len(dims) - count], *[()] * count, output=each)


@rule(
    "_batch_norm_with_update", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
    "native_batch_norm", "native_group_norm",
)  # fmt: skip
def channel_norm(call: OperatorCall) -> None:
    """Normalise per channel or group of channels, perhaps with running statistics."""
    batch, *rest = call.dims(call.first)
    call.whole(*rest)
    if call.name != "native_group_norm":
        call.whole(batch)
    call.whole_tensors(*call.inputs[1:])
    call.give(batch, *rest)
    call.give_new(*call.outputs[1:])


@rule(
    "binary_cross_entropy", "huber_loss", "mse_loss", "nll_loss2d_forward", "nll_loss_forward",
    "smooth_l1_loss",
)  # fmt: skip
def loss(call: OperatorCall) -> None:
    """Compute a loss from predictions and targets, reduced or not."""
    call.whole_tensors(*call.inputs)
    call.give_new(*call.outputs)


@rule(
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool2d",
    "avg_pool3d", "im2col", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_trilinear3d",
)  # fmt: skip
def pool(call: OperatorCall) -> None:
    """Combine neighbours within a channel; if patches become channels, these stay whole."""
    dims = call.dims(call.first)
    first = 1 if call.name == "im2col" else len(dims) - _spatial(call.name)
    call.whole(*dims[first:])
    for each in call.outputs:
        spatial = [call.new_whole(size) for size in each.shape[first:]]
        call.give(*dims[:first], *spatial, output=each)


def _spatial(name: str) -> int:
    return next(count for count in (1, 2, 3) if f"{count}d" in name)


def contract(call: OperatorCall, one: Tensor, other: Tensor, dims: tuple[Dim, Dim]) -> None:
    """Unify the dims of two tensors that a product sums over.

    Only a product with a parameter may be divided there, as a row module, where the sum over ranks
    follows at the end of the module.
    """
    call.same(*dims)
    first, second = call.trace.parameter(one), call.trace.parameter(other)
    parameter = first or second
    if parameter is None or (first and second):
        call.whole(*dims)
    else:
        call.trace.products.append(Product(parameter, dims[0], call.trace.module))


def _add(call: OperatorCall, added: Tensor | None, dims: tuple[Dim, ...]) -> None:
    """Unify the dims of a bias or another addend with those of a product, from the last back."""
    if added is None:
        return
    call.uses(added, is_addend=True)
    call.same_from_last(added.shape, dims, call.dims(added))


@rule("mm", "addmm", "bmm", "baddbmm")
def matrix_product(call: OperatorCall) -> None:
    """Multiply ``([batch,] rows, inner)`` and ``([batch,] inner, columns)``; perhaps add."""
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
    """Multiply as ``linear``, if torch does not decompose it."""
    one, other = call.inputs[:2]
    left, right = call.dims(one), call.dims(other)
    contract(call, one, other, (left[-1], right[1]))
    dims = (*left[:-1], right[0])
    _add(call, call.tensor("bias"), dims)
    call.give(*dims)


@rule("mv", "dot", "vdot")
def vector_product(call: OperatorCall) -> None:
    """Multiply a matrix or a vector by a vector."""
    one, other = call.inputs[:2]
    left, right = call.dims(one), call.dims(other)
    call.same(left[-1], right[-1])
    call.whole(left[-1])
    call.give(*left[:-1])


@rule("linalg_solve_triangular")
def solve(call: OperatorCall) -> None:
    """Solve independent systems of equations."""
    left, right = (call.dims(each) for each in call.inputs[:2])
    for one, other in zip(left[:-2], right[:-2], strict=True):
        call.same(one, other)
    call.whole(*left[-2:], *right[-2:])
    call.give(*right)


@rule("_grouped_mm")
def grouped_product(call: OperatorCall) -> None:
    """Multiply each row by the matrix of its expert."""
    one, other = call.inputs[:2]
    left, right = call.dims(one), call.dims(other)
    contract(call, one, other, (left[-1], right[-2]))
    for dims in (left, right):
        if len(dims) == 3:
            call.whole(dims[0])
    call.give(*left[: call.output.ndim - 1], right[-1])


@rule("convolution", "_convolution")
def convolution(call: OperatorCall) -> None:
    """Sum over channels and neighbours; with several groups, channels stay whole."""
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
        out = call.new_whole(call.output.shape[1])
    spatial = [call.new_whole(size) for size in call.output.shape[2:]]
    _add(call, bias, (out,))
    call.give(batch, out, *spatial)


@rule(
    "_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention",
)  # fmt: skip
def attention(call: OperatorCall) -> None:
    """Attend with queries, keys and values ``(B, H, S, D)``.

    There may be several query heads, adjacent ones, for each head of keys.
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
        mask = call.tensor(name)
        if mask is not None:
            call.same_from_last(mask.shape, call.dims(mask), scores)
    if (call.arguments.get("dropout_p") or 0) > 0:
        call.draws(scores)
    call.give(query[0], query[1], query[2], value[3])
    call.give_new(*call.outputs[1:])

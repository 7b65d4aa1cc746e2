"""Operators that combine tensors element by element, random masks among them.

Operators that make tensors out of nothing, or look at one without making any.

Operators that look along a dimension: sums, softmax, norms, sorts.
"""

from collections.abc import Sequence

from boltmesh.strategies.tensor.analysis.op_rules.rule import OperatorCall, rule
from boltmesh.strategies.tensor.analysis.symbolic_dims import Dim, new_dim
from boltmesh.strategies.tensor.analysis.trace import Use


@rule(
    "arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "zeros",
)  # fmt: skip
def make(call: OperatorCall) -> None:
    """Axes that occur nowhere else; what they meet says what they are."""
    call.give_new(*call.outputs)


@rule(
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_has_same_storage_numel",
    "_local_scalar_dense", "device", "equal", "is_same_size", "item", "sym_numel", "sym_size",
    "sym_storage_offset", "sym_stride",
)  # fmt: skip
def look(call: OperatorCall) -> None:
    """Nothing comes out, or a number: what it says is the same on all ranks where it is whole."""
    if call.name in {"_local_scalar_dense", "equal"}:
        for each in call.inputs:
            call.whole(*call.dims(each))


@rule(
    "_conj", "_conj_physical", "addcdiv", "addcmul", "complex", "copy", "copy_", "fill", "fill_",
    "floor_divide", "imag", "lerp", "log_sigmoid_forward", "masked_fill", "masked_fill_", "polar",
    "real", "resolve_conj", "resolve_neg", "where", "zero", "zero_",
)  # fmt: skip
def pointwise(call: OperatorCall) -> None:
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
def draw(call: OperatorCall) -> None:
    """Random numbers for each element."""
    dims = call.dims(call.first)
    call.draws(dims)
    for each in call.outputs:
        call.give(*dims, output=each)


def _places(asked: object, ndim: int) -> set[int]:
    """Dimensions that an argument names; all of them where it names none."""
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
    """One number out of many."""
    dims = call.dims(call.first)
    gone = _places(call.arguments.get("dim"), len(dims))
    if call.name != "mean" or call.trace.module not in call.trace.attentions:
        # Torch's attention gives weights averaged over heads: the layers that it is run as can.
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
    """As many numbers, each of which depends on all along a dimension."""
    dims = call.dims(call.first)
    asked = call.arguments.get("dim", call.arguments.get("dims"))
    call.whole(*(dims[each] for each in sorted(_places(asked, len(dims)))))
    for each in call.outputs:
        call.give(*dims, output=each)


@rule("kthvalue", "mode", "multinomial", "topk")
def choose(call: OperatorCall) -> None:
    """Some elements along a dimension, or their places."""
    dims = list(call.dims(call.first))
    place = call.arguments.get("dim", -1) % max(len(dims), 1)
    call.whole(dims[place])
    for each in call.outputs:
        if each.ndim == len(dims):
            dims[place] = new_dim(each.shape[place])
            call.whole(dims[place])
            call.give(*dims, output=each)
        else:
            call.give(*dims[:place], *dims[place + 1 :], output=each)


@rule("tril", "triu")
def triangle(call: OperatorCall) -> None:
    """Elements by their places in the last two dimensions."""
    dims = call.dims(call.first)
    call.whole(*dims[-2:])
    call.give(*dims)


@rule("_fused_rms_norm", "native_layer_norm", "rms_norm")
def norm(call: OperatorCall) -> None:
    """The last dimensions by their mean and variance, scaled and moved by parameters."""
    dims = call.dims(call.first)
    count = len(call.arguments["normalized_shape"])
    normed = dims[len(dims) - count :]
    call.whole(*normed)
    for name in ("weight", "bias"):
        _scale(call, name, normed, dims)
    call.give(*dims)
    for each in call.outputs[1:]:
        call.give(*dims[: len(dims) - count], *[()] * count, output=each)


def _scale(call: OperatorCall, name: str, normed: Sequence[Dim], dims: Sequence[Dim]) -> None:
    given = call.tensor(name)
    if given is None:
        return
    for one, other in zip(normed, call.dims(given), strict=True):
        call.same(one, other)
    parameter = call.trace.parameter(given)
    if parameter is not None:
        call.trace.uses.append(Use(parameter, tuple(dims), call.trace.module))


@rule(
    "_batch_norm_with_update", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
    "native_batch_norm", "native_group_norm",
)  # fmt: skip
def channel_norm(call: OperatorCall) -> None:
    """Over all but channels, or over groups of them, with running statistics beside."""
    batch, *rest = call.dims(call.first)
    call.whole(*rest)
    if call.name != "native_group_norm":
        call.whole(batch)
    for each in call.inputs[1:]:
        call.whole(*call.dims(each))
    call.give(batch, *rest)
    call.give_new(*call.outputs[1:])


@rule(
    "binary_cross_entropy", "huber_loss", "mse_loss", "nll_loss2d_forward", "nll_loss_forward",
    "smooth_l1_loss",
)  # fmt: skip
def loss(call: OperatorCall) -> None:
    """One number out of predictions and targets, or one for each of them."""
    for each in call.inputs:
        call.whole(*call.dims(each))
    call.give_new(*call.outputs)


@rule(
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool2d",
    "avg_pool3d", "im2col", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_trilinear3d",
)  # fmt: skip
def pool(call: OperatorCall) -> None:
    """Neighbours within one channel; where patches become channels, all of that is left whole."""
    dims = call.dims(call.first)
    first = 1 if call.name == "im2col" else len(dims) - _spatial(call.name)
    call.whole(*dims[first:])
    for each in call.outputs:
        spatial = [new_dim(size) for size in each.shape[first:]]
        call.whole(*spatial)
        call.give(*dims[:first], *spatial, output=each)


def _spatial(name: str) -> int:
    return next(count for count in (1, 2, 3) if f"{count}d" in name)

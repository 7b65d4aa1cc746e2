"""Fused attention: heads go on, what a head is made of and the keys it looks at do not."""

from torch import Tensor

from boltmesh.strategies.tensor.analysis.atoms import Dim, new_dim
from boltmesh.strategies.tensor.analysis.operators.rule import Call, rule


@rule(
    "_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention",
)  # fmt: skip
def attention(call: Call) -> None:
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


def _mask(call: Call, mask: Tensor | None, scores: tuple[Dim, ...]) -> None:
    if mask is None:
        return
    for size, dim, other in zip(
        reversed(mask.shape), reversed(call.dims(mask)), reversed(scores), strict=False
    ):
        if size > 1:
            call.same(dim, other)

"""How the demo's layers are divided over the tensor axis, as a plan of such a GPT says it."""

import functools
from math import prod

from boltmesh.telemetry.tensor_plan import (
    WHOLE,
    PlannedBlocks,
    PlannedParameters,
    TensorPlanTable,
)
from boltmesh.tui.demo.setup import HEAD_WIDTH, TOKENS_PER_SAMPLE, VOCABULARY, WIDTH, Setup

_HEADS = WIDTH // HEAD_WIDTH
_HIDDEN = 4 * WIDTH
_PARAMETER_BYTES = 4
_NORM = "layer_norm in blocks.*.norm_1 needs it whole"
_TABLE = f"{_NORM}; a table of 0.1% of the model is not worth a sum"
_TOGETHER = "parts that nothing needs together"
_FROM_HEADS = f"{_HEADS} {_TOGETHER} before blocks.*.attention.out.weight sums over them"
_FROM_HIDDEN = f"{_HIDDEN} {_TOGETHER} before blocks.*.down.weight sums over them"
_TOKENS = f"{VOCABULARY} tokens, of which only sums are needed"
_NOTE = (
    "the plan that ships with the model leaves head.weight whole; here it is divided by tokens, "
    "for the loss needs only sums over them"
)
_LOOKUP = "a lookup: sum forward; a loss: maximum and sums forward, sum backward"


@functools.lru_cache(maxsize=8)
def tensor_plan(setup: Setup) -> TensorPlanTable | None:
    """Return the plan; None where the tensor axis has one rank."""
    if setup.tensor == 1:
        return None
    layers, vocabulary, heads = setup.num_layers, f"{VOCABULARY}x1", f"{_HEADS}x{HEAD_WIDTH}"
    qkv = f"column of dim 0: 3x{heads}"
    up = f"column of dim 0: {_HIDDEN}x1"

    def divided(
        pattern: str, count: int, shape: tuple[int, ...], style: str, why: str, asked: str = ""
    ) -> PlannedParameters:
        whole = count * prod(shape) * _PARAMETER_BYTES
        kept = whole if style == WHOLE else whole // setup.tensor
        return PlannedParameters(pattern, count, shape, style, why, kept, whole, asked)

    def in_layers(
        name: str, shape: tuple[int, ...], style: str, why: str, asked: str = ""
    ) -> PlannedParameters:
        return divided(f"blocks.*.{name}", layers, shape, style, why, asked)

    token_style = f"vocabulary of dim 0: {vocabulary}"
    rows = (
        divided("tokens.weight", 1, (VOCABULARY, WIDTH), token_style, _TOKENS, _LOOKUP),
        in_layers("attention.qkv.weight", (3 * WIDTH, WIDTH), qkv, _FROM_HEADS, "sum backward"),
        in_layers("attention.qkv.bias", (3 * WIDTH,), qkv, _FROM_HEADS),
        in_layers(
            "attention.out.weight",
            (WIDTH, WIDTH),
            f"row of dim 1: {heads}",
            f"sums over {_HEADS} {_TOGETHER}",
            "sum forward",
        ),
        in_layers("up.weight", (_HIDDEN, WIDTH), up, _FROM_HIDDEN, "sum backward"),
        in_layers("up.bias", (_HIDDEN,), up, _FROM_HIDDEN),
        in_layers(
            "down.weight",
            (WIDTH, _HIDDEN),
            f"row of dim 1: {_HIDDEN}x1",
            f"sums over {_HIDDEN} {_TOGETHER}",
            "sum forward",
        ),
        divided("head.weight", 1, (VOCABULARY, WIDTH), token_style, _TOKENS, _LOOKUP),
        divided("positions.weight", 1, (TOKENS_PER_SAMPLE, WIDTH), WHOLE, _TABLE),
        *(
            in_layers(name, (WIDTH,), WHOLE, _NORM)
            for name in (
                "norm_1.weight",
                "norm_1.bias",
                "norm_2.weight",
                "norm_2.bias",
                "attention.out.bias",
                "down.bias",
            )
        ),
        divided("norm.weight", 1, (WIDTH,), WHOLE, _NORM),
        divided("norm.bias", 1, (WIDTH,), WHOLE, _NORM),
    )
    return TensorPlanTable(
        setup.tensor,
        rows,
        blocks=(PlannedBlocks("blocks.0", layers, "local"), PlannedBlocks("", 1, "local")),
        notes=(_NOTE,),
    )

"""The GPT of ``examples/gpt.py`` in numbers, and the sizes of GPT-3.

Counts are exact: a test compares every shape with the module, and the activations with what
autograd saves.

Shapes in the comments: B batch, T time, C channels, H heads, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from boltmesh.errors import ConfigError
from boltmesh.strategies.cost_model.model import (
    Activations,
    ModelShape,
    TensorShape,
    UnitShape,
    Widths,
)


@dataclass(frozen=True)
class GPTSize:
    """The sizes that determine all shapes; the defaults are those of the model."""

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    tie_weights: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "GPTSize":
        """Read the size from the arguments of the model."""
        known = {name: arguments[name] for name in cls.__dataclass_fields__ if name in arguments}
        return cls(**known)


SIZES: dict[str, GPTSize] = {
    name: GPTSize(50257, 2048, layers, heads, width)
    for name, layers, heads, width in (
        ("125M", 12, 12, 768),
        ("350M", 24, 16, 1024),
        ("760M", 24, 16, 1536),
        ("1.3B", 24, 16, 2048),
        ("2.7B", 32, 32, 2560),
        ("6.7B", 32, 32, 4096),
        ("13B", 40, 40, 5120),
        ("30B", 48, 56, 7168),
        ("66B", 64, 72, 9216),
        ("175B", 96, 96, 12288),
    )
}
"""Brown et al. 2020, table 2.1, with GPT-2's vocabulary; 1.3B and 13B have a width here that is a
multiple of their heads. 30B and 66B are of OPT, Zhang et al. 2022, table 1."""


def size_named(name: str) -> GPTSize:
    """Return a size by its name, ignoring case.

    Raises:
        ConfigError: For an unknown name.
    """
    found = {each.upper(): size for each, size in SIZES.items()}.get(name.upper())
    if found is None:
        raise ConfigError(f"There is no size '{name}'. Use {', '.join(SIZES)}.")
    return found


def describe_gpt(size: GPTSize, *, batch: tuple[int, int] | None, widths: Widths) -> ModelShape:
    """Describe the model; with microbatches of (B, T) tokens per rank also its activations."""
    width, vocabulary = size.n_embd, size.vocab_size
    rest = [
        TensorShape(
            "token_embedding.weight",
            (vocabulary, width),
            layers=("lookup", "product") if size.tie_weights else ("lookup",),
            is_multiplied=size.tie_weights,
        ),
        TensorShape("position_embedding.weight", (size.block_size, width), layers=("lookup",)),
        TensorShape("norm.weight", (width,)),
        TensorShape("norm.bias", (width,)),
    ]
    if not size.tie_weights:
        rest.append(_matrix("head.weight", (vocabulary, width)))
    blocks = [_block(f"blocks.{at}", width) for at in range(size.n_layer)]
    if widths.is_autocast:
        # Autocast uses norms in fp32, so they are gathered with the root, which is in fp32.
        norms = {
            each.name: each for unit in reversed(blocks) for each in unit.tensors if _is_norm(each)
        }
        rest += norms.values()
        blocks = [
            replace(unit, tensors=tuple(each for each in unit.tensors if each.name not in norms))
            for unit in blocks
        ]
    activations = None if batch is None else _activations(size, batch, widths)
    root = UnitShape("", tuple(rest), is_autocast=False, stays_gathered=True)
    return ModelShape(
        "GPT",
        (*blocks, root),
        activations=activations,
        forward_flops=None if batch is None else _forward_flops(size, batch),
    )


def _block(name: str, width: int) -> UnitShape:
    shapes: dict[str, tuple[int, ...]] = {
        "norm_1.weight": (width,),
        "norm_1.bias": (width,),
        "norm_2.weight": (width,),
        "norm_2.bias": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.qkv.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "attention.out.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }
    tensors = (
        _matrix(f"{name}.{key}", shape) if len(shape) == 2 else TensorShape(f"{name}.{key}", shape)
        for key, shape in shapes.items()
    )
    return UnitShape(name, tuple(tensors))


def _matrix(name: str, shape: tuple[int, ...]) -> TensorShape:
    """Shape of the weight of a Linear."""
    return TensorShape(name, shape, layers=("product",), is_multiplied=True)


def _is_norm(tensor: TensorShape) -> bool:
    return ".norm_" in tensor.name


def _activations(size: GPTSize, batch: tuple[int, int], widths: Widths) -> Activations:
    width, vocabulary = size.n_embd, size.vocab_size
    tokens = batch[0] * batch[1]
    stream = widths.store(4)  # norms, the residual stream and the loss stay out of autocast
    product = widths.compute(4)
    per_token = (
        2 * stream * width  # inputs of both norms
        + 4 * stream  # their means and deviations
        # Inputs of qkv 1, q, k and v 3, inputs of out and up 2, inputs of gelu and down 8.
        + 14 * product * width
        + max(4, product) * size.n_head  # the logarithms of attention's sums
    )
    # Input of the final norm, its output for the head, its statistics, log-probabilities.
    per_token_at_the_end = stream * width + 2 * stream + product * width + stream * vocabulary
    indices = 8 * (2 * tokens + batch[1])
    saved = tokens * (size.n_layer * per_token + per_token_at_the_end) + indices + stream
    # Gradients of log-probabilities and of logits, or those before and after gelu.
    transient = tokens * max(2 * stream * vocabulary, 8 * product * width + stream * width)
    return Activations(
        saved_bytes=saved,
        transient_bytes=transient,
        how=f"counted for micro-batches of {batch[0]} x {batch[1]} tokens on each rank",
    )


def _forward_flops(size: GPTSize, batch: tuple[int, int]) -> int:
    tokens, width = batch[0] * batch[1], size.n_embd
    matrices = size.n_layer * 12 * width**2 + size.vocab_size * width
    # A causal kernel computes half of the products of queries with keys, and of their result
    # with values.
    attention = size.n_layer * 2 * batch[1] * width
    return tokens * (2 * matrices + attention)

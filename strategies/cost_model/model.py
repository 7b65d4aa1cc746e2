"""Inputs of the estimates: the shapes of a model's tensors, a layout and a job.

``ModelShape`` describes a model as a list of units (``UnitShape``), each a list of parameters
(``TensorShape``). It is computed for a known model (``describe_gpt``), or read from a module that
is built without memory; estimates do not distinguish them.

``Widths`` holds bytes per element in each form (stored, computed, reduced) for a Trainer's
precision, ``Bytes`` amounts by place, ``ShardingLayout`` what a rank keeps and where, ``JobShape``
what all layouts of a job have in common.

``GPTSize`` is the GPT of ``examples/gpt.py`` in numbers, with the sizes of GPT-3. Counts are exact:
a test compares every shape with the module, and activations with the tensors that autograd saves.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from operator import add
from typing import Any

from boltmesh.errors import ConfigError


@dataclass(frozen=True)
class Widths:
    """Bytes per element of parameters and gradients.

    Gradients are reduced in fp32 with autocast, and in their own dtype without.
    """

    stored: int | None
    """Bytes of a parameter and its gradient between steps; None: as the model builds it."""
    computed: int | None
    """Bytes of a gathered parameter and its full gradient; None: as stored."""
    reduced: int | None
    """Bytes of a gradient in a collective; None: as computed."""

    def store(self, element_bytes: int) -> int:
        """Return the bytes of an element as it is stored."""
        return self.stored or element_bytes

    def compute(self, element_bytes: int, *, is_autocast: bool = True) -> int:
        """Return the bytes of a gathered element."""
        chosen = self.computed if is_autocast else None
        return chosen or self.store(element_bytes)

    def reduce(self, element_bytes: int, *, is_autocast: bool = True) -> int:
        """Return the bytes of an element in a reduction."""
        return self.reduced or self.compute(element_bytes, is_autocast=is_autocast)

    @property
    def is_autocast(self) -> bool:
        """Whether autocast computes in another dtype than parameters are stored in."""
        return self.computed is not None


_WIDTHS = {
    "32-true": Widths(None, None, None),
    "64-true": Widths(8, None, None),
    "16-true": Widths(2, None, None),
    "bf16-true": Widths(2, None, None),
    "16-mixed": Widths(None, 2, 4),
    "bf16-mixed": Widths(None, 2, 4),
}


def widths_of(precision: str) -> Widths:
    """Return the widths of a Trainer's ``precision``.

    Raises:
        ConfigError: If they do not follow from the name alone.
    """
    if precision not in _WIDTHS:
        raise ConfigError(
            f"trainer.precision={precision} stores weights as its library decides, which cannot "
            f"be planned. Plan with trainer.precision=bf16-mixed."
        )
    return _WIDTHS[precision]


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank in the device's memory, in the host's and on a disk."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host, self.disk + other.disk)

    @classmethod
    def at(cls, place: str, num_bytes: float) -> "Bytes":
        """Return this many bytes in one place."""
        return cls(**{place: round(num_bytes)})

    def on_host(self) -> "Bytes":
        """Return the amounts of a CPU, whose memory is the host's."""
        return Bytes(0, self.device + self.host, self.disk)

    def items(self) -> list[tuple[str, int]]:
        """Return place and bytes, for every place."""
        return [("device", self.device), ("host", self.host), ("disk", self.disk)]


def total(amounts: Iterable[Bytes]) -> Bytes:
    """Return the sum of some amounts."""
    return reduce(add, amounts, Bytes())


@dataclass(frozen=True)
class TensorShape:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool = True
    element_bytes: int = 4
    """Bytes per element as the model builds it."""
    layers: tuple[str, ...] = ()
    """Layers that use it and could gather it in tiles: ``product`` for a Linear, ``lookup`` for an
    Embedding; several if it is tied."""
    is_multiplied: bool = False
    """Whether a matrix product reads it: autocast then keeps a cast copy, unless the parameter is
    gathered in autocast's dtype."""

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)

    def is_larger_than(self, num_bytes: int) -> bool:
        """Whether it is gathered in tiles of this many bytes."""
        return bool(self.layers) and self.numel * self.element_bytes > num_bytes

    def padded_numel(self, num_shards: int) -> int:
        """Return the elements of a padded shard, of ceil(rows / shards) rows."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // num_shards) * (self.numel // rows if rows else 0)


@dataclass(frozen=True)
class UnitShape:
    """Parameters that are gathered, and whose gradients are reduced, in one collective."""

    name: str
    """Dotted name of the module; empty for parameters that no unit below the root owns."""
    tensors: tuple[TensorShape, ...]
    is_autocast: bool = True
    """Whether it is gathered in autocast's dtype, if there is autocast; else as stored."""
    stays_gathered: bool = False
    """Whether it stays gathered between forward and backward pass in stage 3, as the root does."""
    tile_bytes: int | None = None
    """If set, the unit is one weight, gathered in tiles of this many bytes in its stored dtype."""

    @property
    def numel(self) -> int:
        """Number of elements of the full unit."""
        return sum(each.numel for each in self.tensors)

    @property
    def trained_numel(self) -> int:
        """Number of elements with gradients."""
        return sum(each.numel for each in self.tensors if each.is_trained)


@dataclass(frozen=True)
class Activations:
    """Activations of one microbatch on one rank."""

    saved_bytes: int
    """Bytes kept until the backward pass, without parameters and casts of them."""
    transient_bytes: int
    """Bytes of the largest temporary results of the backward pass, in addition."""
    how: str
    """How the numbers were found, as text."""
    elsewhere: Bytes = Bytes()
    """Bytes that activation offload keeps outside of the device until the backward pass."""


@dataclass(frozen=True)
class StepWork:
    """Forward and backward pass of one microbatch on one rank, counted operator by operator."""

    flops: int
    """Floating-point operations of matrix products, convolutions and attention."""
    moved_bytes: int
    """Bytes that all operators except views read and write."""
    operators: int
    products: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    """Number of products ``(rows, inner) @ (inner, columns)``, by these three sizes."""
    product_bytes: int = 0
    """Bytes that these products read and write, included in ``moved_bytes``."""


@dataclass(frozen=True)
class ModelShape:
    """Description of a model for the estimates."""

    name: str
    units: tuple[UnitShape, ...]
    """In the order of the forward pass; the root last."""
    buffer_bytes: int = 0
    activations: Activations | None = None
    """None if they could not be counted."""
    forward_flops: int | None = None
    """Floating-point operations of one microbatch's forward pass on one rank."""
    work: StepWork | None = None
    """None if its step could not be run."""
    chosen_widths: frozenset[int] = frozenset()
    """Numbers of scores among which its step chooses; the number of its experts is one of them."""
    reads_gradients: bool = False
    """Whether its hooks may read gradients between backward pass and step."""
    keeps_gradients: bool = False
    """Whether it zeroes gradients itself, or reads them before they are zeroed."""

    def step_flops(self, num_microbatches: int) -> int | None:
        """Return the FLOPs of an optimizer step; a backward pass counts as two forward ones."""
        return None if self.forward_flops is None else 3 * num_microbatches * self.forward_flops

    def in_tiles(self, tile_bytes: int | None) -> "ModelShape":
        """Return the model with every larger weight as a unit of its own."""
        if tile_bytes is None:
            return self
        units: list[UnitShape] = []
        for unit in self.units:
            if unit.tile_bytes is not None:
                units.append(unit)
                continue
            tiled = [each for each in unit.tensors if each.is_larger_than(tile_bytes)]
            rest = tuple(each for each in unit.tensors if each not in tiled)
            units += [UnitShape(each.name, (each,), tile_bytes=tile_bytes) for each in tiled]
            units.append(replace(unit, tensors=rest))
        return replace(self, units=tuple(units))

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(each.numel for each in self.units)

    @property
    def trained_numel(self) -> int:
        """Number of elements of the trained parameters."""
        return sum(each.trained_numel for each in self.units)


@dataclass(frozen=True)
class OwnedExperts:
    """Experts that are divided over ranks, each of which keeps its own whole.

    Attributes:
        names: Names of their parameters.
        size: Number of ranks that together have all of them.
        num_copies: Number of ranks that have the same ones.
    """

    names: frozenset[str]
    size: int
    num_copies: int

    def split(self, model: ModelShape) -> tuple[ModelShape, ModelShape]:
        """Return the model without its experts, and the experts of one rank."""
        rest, owned = [], []
        for unit in model.units:
            others = tuple(each for each in unit.tensors if each.name not in self.names)
            rest.append(replace(unit, tensors=others))
            owned += [
                replace(each, shape=(-(-each.shape[0] // self.size), *each.shape[1:]))
                for each in unit.tensors
                if each.name in self.names
            ]
        units = (UnitShape("experts", tuple(owned)),)
        return replace(model, units=tuple(rest)), ModelShape("experts", units)


@dataclass(frozen=True)
class ShardingLayout:
    """Which part of the model's state a rank keeps, and where."""

    name: str
    """Name in a config, for example ``zero3_nvme``."""
    stage: int
    """0: replicas; 1, 2 and 3: ZeRO stages."""
    state_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the optimizer state on ``host`` and ``disk``; the rest is on the device. Empty
    without offload of the optimizer."""
    parameter_place: str = "device"
    """Place of shards before they are gathered: ``device``, ``host`` or ``disk``."""
    tile_bytes: int | None = None
    """Larger weights are gathered in tiles of about this size."""
    keeps_in_buckets: bool | None = None
    """Whether replicas keep their gradients in the buckets that they reduce; None: unless a hook
    reads them."""

    @property
    def has_engine(self) -> bool:
        """Whether the optimizer steps outside of the device, with its own fp32 masters."""
        return bool(self.state_shares)


REPLICA = ShardingLayout("replicas", 0)


@dataclass(frozen=True)
class JobShape:
    """The properties of a job that are the same in every layout."""

    num_ranks: int
    """Number of ranks of the data axis."""
    widths: Widths
    shard_size: int | None = None
    """Number of ranks that together hold one copy of the state; None: all."""
    num_microbatches: int = 1
    """Number of batches of a rank per optimizer step."""
    state_copies: int = 2
    """Number of tensors per parameter that the optimizer keeps: 2 for Adam, 1 for momentum."""
    reads_gradients: bool = False
    """Whether the Trainer itself reads gradients, as a scaler and clipping by value do."""
    is_on_host: bool = False
    """Whether ranks compute on the CPU: device and host are one memory."""

    @property
    def num_shards(self) -> int:
        """Number of shards that a copy of the state is divided into."""
        return self.shard_size or self.num_ranks


@dataclass(frozen=True)
class GPTSize:
    """The sizes that determine all shapes, with the defaults of the example model."""

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
        ConfigError: If the name is unknown.
    """
    found = {each.upper(): size for each, size in SIZES.items()}.get(name.upper())
    if found is None:
        raise ConfigError(f"There is no size '{name}'. Use {', '.join(SIZES)}.")
    return found


def describe_gpt(size: GPTSize, *, batch: tuple[int, int] | None, widths: Widths) -> ModelShape:
    """Describe the example model.

    Args:
        size: Its sizes.
        batch: Microbatch ``(B, S)`` of a rank, for activations and operations; None: without.
        widths: Bytes per element.
    """
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
    """Return the shape of the weight of a Linear."""
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

"""The sizes of a transformer, from which its work and its memory follow."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from boltmesh.configs.advice import name_choices, nearest
from boltmesh.errors import ConfigError


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal blocks.

    Attributes:
        layers: Blocks.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Heads of keys and values; fewer than ``heads`` under grouped-query attention.
        ffn: Width of the feed-forward layer.
        vocab: Rows of the embedding.
        seq: Tokens of a sequence.
        is_gated: Whether the feed-forward layer has a third matrix (SwiGLU).
        is_tied: Whether the output projection is the embedding.
        has_flash: Whether attention keeps no scores (SDPA, FlashAttention).
        experts: Feed-forward layers of a block, of which a router chooses; 0 for a dense model.
        active: Experts that compute each token.
        head_dim: Width of a head; 0: ``hidden`` divided by ``heads``.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    is_gated: bool = False
    is_tied: bool = False
    has_flash: bool = True
    experts: int = 0
    active: int = 0
    head_dim: int = 0

    @property
    def query_width(self) -> int:
        """Width of all queries, and of the output of attention."""
        return self.heads * self.head_dim or self.hidden

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.query_width * self.kv_heads // self.heads

    @property
    def expert_numel(self) -> int:
        """Parameters of a feed-forward layer, one expert of a mixture."""
        return (3 if self.is_gated else 2) * self.hidden * self.ffn

    @property
    def shared_numel(self) -> int:
        """Parameters of a block less its feed-forward layer or its experts."""
        return 2 * self.hidden * (self.query_width + self.kv_width) + self.hidden * self.experts

    @property
    def block_numel(self) -> int:
        """Parameters of a block; norms and biases count as nothing."""
        return self.shared_numel + max(1, self.experts) * self.expert_numel

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        tables = 1 if self.is_tied else 2
        return self.layers * self.block_numel + tables * self.vocab * self.hidden

    def step_flops(self, sequences: int) -> float:
        """Return floating point operations of a step without recomputation: model FLOPs."""
        tokens = float(sequences * self.seq)
        block = self.shared_numel + max(1, self.active) * self.expert_numel
        products = 6.0 * tokens * (self.layers * block + self.vocab * self.hidden)
        return products + 6.0 * tokens * self.layers * self.query_width * self.seq


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, seq: int = 2048) -> Transformer:
    return Transformer(layers, hidden, heads, heads, 4 * hidden, vocab, seq, is_tied=True)


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, seq: int
) -> Transformer:
    return Transformer(layers, hidden, heads, kv, ffn, vocab, seq, is_gated=True)


_EXPERTS = {"experts": 0, "active": 0}
_FLAGS = {"is_gated": 0, "is_tied": 0, "has_flash": 1}

KNOWN: Mapping[str, Transformer] = {
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024),
    "gpt3-1.3b": _gpt(24, 2048, 16),
    "gpt3-6.7b": _gpt(32, 4096, 32),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-175b": _gpt(96, 12288, 96),
    "bloom-176b": _gpt(70, 14336, 112, 250880),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 8192),
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 8, 14336, 32000, 8192), experts=8, active=2),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, 4096),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064, 4096),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, 4096),
}
"""Published sizes, by name."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts"),
    "active": ("num_experts_per_tok",),
    "head_dim": ("head_dim",),
}
"""Names of each size in configurations of Hugging Face."""


def transformer_named(text: str, *, seq: int | None = None) -> Transformer:
    """Return the sizes of a model.

    Args:
        text: ``layers=70 hidden=14336 heads=112 ffn=57344 vocab=250880 seq=2048``, a name of
            ``KNOWN``, the path of a ``config.json`` of Hugging Face, or of a folder that has one.
        seq: Tokens of a sequence, in place of the model's.

    Raises:
        ConfigError: For an unknown name, a missing or an impossible size.
    """
    if "=" in text:
        found = _from_sizes(dict(_pair(each) for each in text.replace(",", " ").split()))
    elif (name := text.lower().rpartition("/")[2].replace("meta-", "")) in KNOWN:
        found = KNOWN[name]
    elif (near_name := _without_suffix(name)) in KNOWN:
        found = KNOWN[near_name]
    elif text and Path(text).exists():
        found = _from_hugging_face(Path(text))
    else:
        near = nearest(name, KNOWN)
        hint = f" Did you mean '{near}'?" if near else ""
        raise ConfigError(
            f"There is no model '{text}'.{hint} Known are {name_choices(KNOWN, at_most=20)}; else "
            f"give the path of its config.json, or its sizes: "
            f'--model "layers=32 hidden=4096 heads=32 ffn=14336 vocab=128256 seq=8192".'
        )
    return found if seq is None else replace(found, seq=seq)


def transformer_like(
    products: Mapping[tuple[int, int, int], float],
    *,
    rows: int,
    blocks: int,
    block_numel: float,
    numel: int,
    heads: int,
) -> Transformer | None:
    """Return a transformer with the work and the parameters of another model, roughly.

    It is good enough to order layouts, not to predict them.

    Args:
        products: How many matrix products (m, k) by (k, n) a step of a batch has.
        rows: Rows of the batch.
        blocks: Repeated blocks.
        block_numel: Parameters of one.
        numel: Parameters of the model.
        heads: Any number that all divisions of layers divide.

    Returns:
        None where no product is of tokens.
    """
    work: Counter[int] = Counter()
    for (m, k, n), count in products.items():
        for size in {m, k, n}:
            work[size] += round(count * m * k * n)
    # Every product has a dimension of tokens: forward, of the input and of the weight.
    (tokens, _), *others = work.most_common() or [(0, 0)]
    if not others or not blocks or tokens < rows:
        return None
    hidden = others[0][0]
    ffn = max(1, round((block_numel / hidden - 4 * hidden) / (3 * heads))) * heads
    vocab = max(1, round((numel - blocks * block_numel) / (2 * hidden)))
    return Transformer(
        blocks, hidden, heads, heads, ffn, vocab, max(1, tokens // rows), is_gated=True
    )


def _without_suffix(name: str) -> str:
    """Return ``llama3-8b`` for ``llama-3.1-8b-instruct``."""
    parts = [each for each in name.split("-") if each not in {"instruct", "base", "hf", "chat"}]
    if len(parts) == 3:
        parts = [parts[0] + parts[1].removesuffix(".1"), parts[2]]
    return "-".join(parts)


def _pair(text: str) -> tuple[str, int]:
    key, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(
            f"--model: '{text}' is no size. Give the name of a model alone, or sizes as KEY=NUMBER."
        )
    names = [each.name for each in fields(Transformer)]
    spelled = {"gated": "is_gated", "tied": "is_tied", "flash": "has_flash"}.get(key, key)
    if spelled not in names:
        near = nearest(key, [*names, "gated", "tied", "flash"])
        raise ConfigError(
            f"--model has no size '{key}'." + (f" Did you mean '{near}'?" if near else "")
        )
    if not value.isdigit():
        raise ConfigError(f"--model {text}: '{value}' is no whole number of 0 or more.")
    return spelled, int(value)


def _from_sizes(sizes: dict[str, int]) -> Transformer:
    needed = [each for each in ("layers", "hidden", "heads", "vocab", "seq") if each not in sizes]
    if needed:
        raise ConfigError(f"--model lacks {name_choices(needed)}: write layers=32 hidden=4096 …")
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("ffn", 4 * sizes["hidden"])
    flags = {name: bool(sizes.pop(name, default)) for name, default in _FLAGS.items()}
    mixture = {name: sizes.pop(name, default) for name, default in _EXPERTS.items()}
    head_dim = sizes.pop("head_dim", 0)
    if (mixture["experts"] == 0) != (mixture["active"] == 0) or mixture["active"] > mixture[
        "experts"
    ]:
        raise ConfigError(
            f"--model: experts={mixture['experts']} and active={mixture['active']} are no mixture: "
            f"give both, as experts=8 active=2, with no more active ones than experts."
        )
    if min(sizes.values()) < 1:
        raise ConfigError("--model: every size has to be 1 or more.")
    has_parts = sizes["heads"] % sizes["kv_heads"] == 0
    if not has_parts or (head_dim == 0 and sizes["hidden"] % sizes["heads"]):
        raise ConfigError(
            f"--model: hidden={sizes['hidden']} has to be a multiple of heads={sizes['heads']}, "
            f"unless head_dim is given, and that one of kv_heads={sizes['kv_heads']}."
        )
    return Transformer(
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        ffn=sizes["ffn"],
        vocab=sizes["vocab"],
        seq=sizes["seq"],
        experts=mixture["experts"],
        active=mixture["active"],
        head_dim=head_dim,
        **flags,
    )


def _from_hugging_face(path: Path) -> Transformer:
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise ConfigError(f"--model {path.parent} is a folder without a config.json.")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path} cannot be read as a configuration: {error}.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"--model {path} is no configuration of Hugging Face.")
    if isinstance(table.get("text_config"), dict):  # of a model that also reads images
        text = table["text_config"].items()
        table = {**table, **{key: each for key, each in text if each is not None}}
    sizes: dict[str, int] = {}
    for name, keys in _NAMES.items():
        value: Any = next((table[key] for key in keys if table.get(key) is not None), None)
        if isinstance(value, int):
            sizes[name] = value
    is_gemma = str(table.get("model_type", "")).startswith("gemma")
    is_gated = is_gemma or str(table.get("hidden_act", "")).startswith(("silu", "swish"))
    is_tied = table.get("tie_word_embeddings")
    if is_tied is None:  # the file does not say
        is_tied = is_gemma or not is_gated
    sizes["is_gated"], sizes["is_tied"] = int(is_gated), int(bool(is_tied))
    return _from_sizes(sizes)

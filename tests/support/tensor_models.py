"""Small models to divide over a tensor axis, by hand and of Hugging Face, with a batch for each."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, TOKENS = 96, 64, 4, 16


NO_DTENSOR_RULES = frozenset({"bloom", "falcon"} if torch.__version__ < "2.13" else ())
"""Models between whose matrices DTensor of this torch has no rules for what their code does."""


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Separate q, k and v; several heads of queries may share one of keys."""

    def __init__(self, width: int, heads: int, key_heads: int, *, norms: bool = False) -> None:
        super().__init__()
        self.heads, self.key_heads, self.channels = heads, key_heads, width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, key_heads * self.channels)
        self.v = nn.Linear(width, key_heads * self.channels)
        self.out = nn.Linear(width, width)
        self.k_norm = nn.LayerNorm(self.channels) if norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q = self.q(x).view(rows, tokens, self.heads, self.channels).transpose(1, 2)
        k = self.k(x).view(rows, tokens, self.key_heads, self.channels)
        k = self.k_norm(k).transpose(1, 2)
        v = self.v(x).view(rows, tokens, self.key_heads, self.channels).transpose(1, 2)
        repeats = self.heads // self.key_heads
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, tokens, width))


class FusedAttention(nn.Module):
    """One projection for q, k and v, cut by width; the softmax is written out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.seen: Tensor
        self.register_buffer("seen", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        channels = width // self.heads
        q, k, v = (
            each.view(rows, tokens, self.heads, channels).transpose(1, 2)
            for each in self.qkv(x).split(self.width, dim=2)
        )
        scores = (q @ k.transpose(2, 3)) / math.sqrt(channels)
        scores = scores.masked_fill(~self.seen[:tokens, :tokens], float("-inf"))
        y = self.dropout(scores.softmax(-1)) @ v
        return self.out(y.transpose(1, 2).reshape(rows, tokens, width))


class OuterAttention(nn.Module):
    """One projection in which q, k and v are outside of the heads, as vision models have it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(x).reshape(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(rows, tokens, width))


class TorchAttention(nn.Module):
    """Torch's own, with or without the weights that it gives beside."""

    def __init__(self, width: int, heads: int, *, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.weights)[0]


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = attention, MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(
        self,
        attention: Callable[[], nn.Module],
        *,
        width: int = WIDTH,
        vocabulary: int = VOCABULARY,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList([Block(width, attention()) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block(WIDTH, OuterAttention(WIDTH, HEADS)) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class Chain(nn.Module):
    """Linear layers without norms: every one could be divided on either side."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [32, 64, 64, 64, 8]
        self.layers = nn.ModuleList([nn.Linear(*each) for each in pairwise(sizes)])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return F.cross_entropy(self.layers[-1](x), labels)


@dataclass(frozen=True)
class Example:
    """A model and what it is called with."""

    module: nn.Module
    batch: dict[str, Tensor]

    def loss(self, module: nn.Module) -> Tensor:
        """The loss of the batch; of ``module``, which may stand for the model."""
        output: Any = module(**self.batch)
        return getattr(output, "loss", output)


def _texts(rows: int, tokens: int, vocabulary: int, names: tuple[str, str]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(1, vocabulary, (rows, tokens), generator=generator)
    return {names[0]: made, names[1]: made.roll(-1, 1)}


def _images(rows: int, pixels: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 16, 16, generator=generator)
    return {pixels: images, "labels": torch.arange(rows) % 5}


def _gpt(**kwargs: Any) -> Callable[[], nn.Module]:
    fused = kwargs.pop("fused", False)
    weights = kwargs.pop("weights", None)
    heads, key_heads = kwargs.pop("heads", HEADS), kwargs.pop("key_heads", None)
    norms, dropout = kwargs.pop("norms", False), kwargs.pop("dropout", 0.0)
    width = kwargs.get("width", WIDTH)

    def attention() -> nn.Module:
        if weights is not None:
            return TorchAttention(width, heads, weights=weights)
        if fused:
            return FusedAttention(width, heads, dropout)
        return Attention(width, heads, key_heads or heads, norms=norms)

    return lambda: GPT(attention, **kwargs)


_BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "gpt_separate": _gpt(),
    "gpt_tied": _gpt(tied=True),
    "gpt_grouped": _gpt(key_heads=2),
    "gpt_one_key_head": _gpt(key_heads=1),
    "gpt_one_key_head_norm": _gpt(key_heads=1, norms=True),
    "gpt_three_heads": _gpt(heads=3, width=60),
    "gpt_odd_vocabulary": _gpt(vocabulary=97),
    "gpt_fused": _gpt(fused=True),
    "gpt_dropout": _gpt(fused=True, dropout=0.1),
    "gpt_torch_attention": _gpt(weights=False),
    "gpt_torch_attention_weights": _gpt(weights=True),
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HUGGING_FACE = (
    "llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gpt2", "gpt2_eager",
    "bert", "t5", "vit", "neox", "bloom", "phi3", "opt", "falcon", "mixtral",
)  # fmt: skip
BY_HAND = (*_BY_HAND, "vit_by_hand", "chain")


def example(name: str, *, seed: int = 0, rows: int = 2, tokens: int = TOKENS) -> Example:
    """Build a model of that name, in training mode, with a batch of texts or images."""
    torch.manual_seed(seed)
    if name in _BY_HAND:
        module = _BY_HAND[name]()
        vocabulary = module.get_parameter("tokens.weight").shape[0]
        return Example(module, _texts(rows, tokens, vocabulary, ("tokens", "labels")))
    if name == "vit_by_hand":
        return Example(ViT(), _images(rows, "images"))
    if name == "chain":
        generator = torch.Generator().manual_seed(1)
        batch = {"x": torch.randn(rows, 32, generator=generator), "labels": torch.arange(rows)}
        return Example(Chain(), batch)
    module = hugging_face(name).train()
    if name == "vit":
        return Example(module, _images(rows, "pixel_values"))
    return Example(module, _texts(rows, tokens, VOCABULARY, ("input_ids", "labels")))


def hugging_face(name: str, **settings: Any) -> Any:
    """A model of that family with random weights and two layers; settings override its sizes."""
    import transformers as hf

    config = _config(hf, name)
    for key, value in settings.items():
        setattr(config, key, value)
    config.use_cache = False
    config._attn_implementation = "eager" if name in {"bloom", "gemma2", "gpt2_eager"} else "sdpa"
    heads = {
        "BertConfig": hf.BertForMaskedLM,
        "T5Config": hf.T5ForConditionalGeneration,
        "ViTConfig": hf.ViTForImageClassification,
    }
    kind = heads.get(type(config).__name__)
    if kind is not None:
        return kind(config)
    return hf.AutoModelForCausalLM.from_config(config)


def _config(hf: Any, name: str) -> Any:
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    layers = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS}
    grouped = {**usual, "num_key_value_heads": 2}
    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    gpt2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 64}
    made: dict[str, Callable[[], Any]] = {
        "llama": lambda: hf.LlamaConfig(**grouped),
        "llama_tied": lambda: hf.LlamaConfig(**grouped, tie_word_embeddings=True),
        "qwen2": lambda: hf.Qwen2Config(**grouped),
        "qwen3": lambda: hf.Qwen3Config(**grouped, head_dim=16),
        "mistral": lambda: hf.MistralConfig(**grouped),
        "gemma": lambda: hf.GemmaConfig(**{**usual, "num_key_value_heads": 1}, head_dim=16),
        "gemma2": lambda: hf.Gemma2Config(**grouped, head_dim=16),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, **gpt2
        ),
        "bert": lambda: hf.BertConfig(**usual, **_NO_DROPOUT),
        "t5": lambda: hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=3,  # the first of each stack is not like the others
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        "vit": lambda: hf.ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=128,
            image_size=16,
            patch_size=4,
            num_labels=5,
            **_NO_DROPOUT,
        ),
        "neox": lambda: hf.GPTNeoXConfig(**usual, **none),
        "bloom": lambda: hf.BloomConfig(**layers, **none),
        "phi3": lambda: hf.Phi3Config(**grouped, resid_pdrop=0.0),
        "opt": lambda: hf.OPTConfig(
            **{key: usual[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
            num_attention_heads=HEADS,
            ffn_dim=128,
            max_position_embeddings=64,
            dropout=0.0,
            word_embed_proj_dim=WIDTH,
        ),
        "falcon": lambda: hf.FalconConfig(
            **{key: usual[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
            num_attention_heads=HEADS,
            new_decoder_architecture=True,
            num_kv_heads=2,
            **none,
        ),
        "mixtral": lambda: hf.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2),
    }
    return made["gpt2" if name == "gpt2_eager" else name]()

"""Tiny models of which nothing knows of ranks, and batches whose labels fall unevenly on them."""

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 61


class Trained(LightningModule):
    """Trains something that gives a loss for a batch."""

    def __init__(self, model: nn.Module, rate: float = 0.3) -> None:
        super().__init__()
        self.model, self.rate = model, rate

    def training_step(self, batch: dict[str, Tensor], _: int = 0) -> Tensor:
        loss: Tensor = self.model(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int = 0) -> None:
        self.log("val_loss", self.model(batch))

    def predict_step(self, batch: dict[str, Tensor], _: int = 0) -> Any:
        outputs: Any = getattr(self.model, "outputs", self.model)
        return outputs(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class EagerGPT(nn.Module):
    """Its own causal mask, learned positions, products and a softmax; targets shifted inside."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(EagerBlock(width, heads, length) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tok.weight

    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits."""
        ids = batch["input_ids"]
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.outputs(batch)[:, :-1]
        target = batch["input_ids"][:, 1:].reshape(-1)
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target)


class MaskedGPT(EagerGPT):
    """Its own mean over targets; rows that begin with an even token have none."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits, target = self.outputs(batch)[:, :-1], batch["labels"][:, 1:]
        losses = functional.cross_entropy(
            logits.transpose(1, 2), target.clamp(min=0), reduction="none"
        )
        shown = (target >= 0) & (batch["input_ids"][:, :1] % 2 == 1)
        return (losses * shown).sum() / shown.sum().clamp(min=1)


class EagerBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.bias: Tensor
        mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = functional.softmax(att, dim=-1) @ v
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.norm2(x))


class Pooled(nn.Module):
    """Attention both ways, a masked mean and the first token, and a classifier behind them."""

    def __init__(self, width: int = 32, heads: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Parameter(torch.randn(1, 64, width) * 0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, classes))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        keep = ids != 0
        x = self.tok(ids) + self.pos[:, : ids.shape[1]]
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        x = self.norm(x + self.out(y.transpose(1, 2).reshape(b, t, c)))
        m = keep.unsqueeze(-1).to(x.dtype)
        mean = (x * m).sum(1) / m.sum(1)
        return functional.cross_entropy(self.head(torch.cat([x[:, 0], mean], -1)), batch["labels"])


class Mixer(nn.Module):
    """A causal convolution, a token shift and a cumulative sum: no attention; a squared error."""

    def __init__(self, width: int = 16, kernel: int = 4) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, width), nn.Linear(width, 3)
        self.conv = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1)
        self.mix = nn.Parameter(torch.rand(width))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.into(batch["series"])
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        y = functional.silu(y)
        before = functional.pad(y, (0, 0, 1, -1))
        y = y * self.mix + before * (1 - self.mix)
        y = y + torch.tanh(y.cumsum(1) / 8)
        return functional.mse_loss(self.out(y)[:, :-1], batch["series"][:, 1:])


class Prefixed(nn.Module):
    """A class token in front of patches that a convolution makes: a small vision transformer."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.pos = nn.Parameter(torch.randn(1, 17, width) * 0.1)
        self.blocks = nn.ModuleList(PrefixedBlock(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.patch(batch["image"]).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        for each in self.blocks:
            x = each(x)
        return functional.cross_entropy(self.head(x[:, 0]), batch["labels"])


class PrefixedBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + functional.gelu(self.up(x))


class Squared(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Counted(torch.autograd.Function):
    """A function of the user's own that makes positions inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], device=x.device)[None, :, None] / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Own(nn.Module):
    """Functions of the user's own, and what no rule was written for."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        x = Counted.apply(Squared.apply(self.tok(ids)))
        x = x + 0.1 * torch.einsum("btd,bsd->bts", x, x).softmax(-1) @ x
        x = x / x.norm(dim=1, keepdim=True)
        b, t, d = x.shape
        pairs = x.view(b, t // 2, 2, d).mean(2, keepdim=True).expand(-1, -1, 2, -1)
        x = x + pairs.reshape(b, t, d)
        with torch.no_grad():
            largest = x.max(1, keepdim=True).values
        x = x - largest + x.std(1, keepdim=True) - x.max(1, keepdim=True).values
        y = functional.log_softmax(self.out(x), -1)
        kept = ids > 9
        picked = y.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return -(picked * kept).sum() / kept.sum()


class HuggingFace(nn.Module):
    """A model of transformers with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(**batch).logits
        return logits

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def causal_lm(config: Any, attention: str | None = "sdpa") -> nn.Module:
    """A causal language model of transformers."""
    config.use_cache = False
    auto = transformers.AutoModelForCausalLM
    return HuggingFace(auto.from_config(config, attn_implementation=attention))


def _llama(attention: str) -> nn.Module:
    return causal_lm(transformers.LlamaConfig(**SMALL, num_key_value_heads=2), attention)


def _gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return causal_lm(config, attention)


def _bert(attention: str) -> nn.Module:
    config = transformers.BertConfig(
        **SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config._attn_implementation = attention
    return HuggingFace(transformers.BertForMaskedLM(config))


def _qwen2(attention: str) -> nn.Module:
    config = transformers.Qwen2Config(**SMALL, num_key_value_heads=1, tie_word_embeddings=True)
    return causal_lm(config, attention)


def _mistral(attention: str) -> nn.Module:
    config = transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=6)
    return causal_lm(config, attention)


def _gemma3(attention: str) -> nn.Module:
    config = transformers.Gemma3TextConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, sliding_window=5
    )
    return causal_lm(config, attention)


def _vit(attention: str) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config._attn_implementation = attention
    return HuggingFace(transformers.ViTForImageClassification(config))


MADE: dict[str, Callable[[str], nn.Module]] = {
    "gpt": lambda _: EagerGPT(),
    "pooled": lambda _: Pooled(),
    "mixer": lambda _: Mixer(),
    "prefixed": lambda _: Prefixed(),
    "masked": lambda _: MaskedGPT(),
    "own": lambda _: Own(),
    "llama": _llama,
    "qwen2": _qwen2,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
}


def built(name: str) -> nn.Module:
    """A model by name: that of ``MADE``, and behind dashes ``eager``, ``padded``, ``left``."""
    base, *rest = name.split("-")
    return MADE[base]("eager" if "eager" in rest else "sdpa")


def batch_of(name: str, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for a model by name."""
    base, *rest = name.split("-")
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    if base == "mixer":
        return {"series": torch.randn(2, length, 3, generator=generator)}
    if base in {"prefixed", "vit"}:
        key = "image" if base == "prefixed" else "pixel_values"
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {key: images, "labels": torch.tensor([1, 2])}
    if base == "pooled":
        ids[0, length // 3 :] = 0
        return {"input_ids": ids, "labels": torch.tensor([1, 2])}
    if base in {"gpt", "own"}:
        return {"input_ids": ids}
    labels = ids.clone()
    labels[0, : length // 2] = -100  # a prompt: ranks have other numbers of targets
    labels[1, -3:] = -100
    batch = {"input_ids": ids, "labels": labels}
    if "padded" in rest or "left" in rest:
        mask = torch.ones_like(ids)
        if "left" in rest:
            mask[1, :5] = 0
            labels[1, :5] = -100
        else:
            mask[1, -5:] = 0
        batch["attention_mask"] = mask
    return batch

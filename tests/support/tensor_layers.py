"""More small models for plans to run, with what those of ``tensor_models`` lack."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.tensor_models import GPT, HEADS, TOKENS, VOCABULARY, WIDTH, Example


class LocalAttention(nn.Module):
    """Views by its number of heads alone, so its code runs on a rank's heads as well."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Keys and values made of a few channels, beside others that all heads share.

    What is divided meets both: the shared channels head by head, the few as columns of ``up``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.down = nn.Linear(width, 20 * heads), nn.Linear(width, 12 + 6)
        self.norm = nn.LayerNorm(12)
        self.up, self.o = nn.Linear(12, (14 + 20) * heads), nn.Linear(20 * heads, width)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.down(x).split([12, 6], -1)
        q, made = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q(x), self.up(self.norm(latent)))
        )
        k, v = made.split([14, 20], -1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, self.num_heads, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class TorchLayers(nn.Module):
    """Torch's own encoder layers, whose attention takes its projection as one argument."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.encoder(self.emb(tokens), src_key_padding_mask=tokens == 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """Stacked matrices of experts, of which each token takes two."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * inner) * 0.1)
        self.down = nn.Parameter(torch.randn(count, inner, width) * 0.1)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gate, up = torch.einsum("nd,edf->nef", x, self.up).chunk(2, -1)
        given = torch.einsum("nef,efd->ned", F.silu(gate) * up, self.down)
        picked = given.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(1)


class ScaledExperts(Experts):
    """Scales what is divided inside of experts by what the router gives."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        scales = torch.zeros(len(x), len(self.up)).to(weights).scatter(1, chosen, weights)
        gate, up = torch.einsum("nd,edf->enf", x, self.up).chunk(2, -1)
        inner = F.silu(gate) * up * scales.t().unsqueeze(-1)
        return torch.einsum("enf,efd->end", inner, self.down).sum(0)


class Routed(nn.Module):
    def __init__(self, width: int, kind: type[Experts] = Experts) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = kind(width, 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return self.experts(flat, weights, chosen).view_as(x)


class Images(nn.Module):
    """Pairs of convolutions beside a shortcut, the first of which makes channels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.ModuleList([nn.Conv2d(8, 16, 3, padding=1) for _ in range(2)])
        self.second = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1) for _ in range(2)])
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(F.relu(first(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class DrawingAttention(nn.Module):
    """Draws for its heads and, by a child, for its output."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.p = heads, dropout
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.rest = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
        y = F.dropout(scores, self.p, self.training) @ v
        return self.rest(self.o(y.transpose(1, 2).flatten(2)))


def _routed(kind: type[Experts] = Experts) -> nn.Module:
    model = GPT(lambda: LocalAttention(WIDTH, HEADS))
    for block in model.blocks:
        block.mlp = Routed(WIDTH, kind)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt_local": lambda: GPT(lambda: LocalAttention(WIDTH, HEADS)),
    "gpt_local_tied": lambda: GPT(lambda: LocalAttention(WIDTH, HEADS), tied=True),
    "gpt_latent": lambda: GPT(lambda: LatentAttention(WIDTH, HEADS)),
    "gpt_drawing": lambda: GPT(lambda: DrawingAttention(WIDTH, HEADS, 0.1)),
    "experts": _routed,
    "experts_scaled": lambda: _routed(ScaledExperts),
    "torch_layers": TorchLayers,
    "convolutions": Images,
}


def more(name: str) -> Example:
    """Build one of these, in training mode, with a batch."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    generator = torch.Generator().manual_seed(1)
    if name == "convolutions":
        images = torch.randn(2, 3, 8, 8, generator=generator)
        return Example(model, {"images": images, "labels": torch.tensor([1, 3])})
    tokens = torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)
    return Example(model, {"tokens": tokens, "labels": tokens.roll(-1, 1)})

"""The transformer that is divided by hand and by plan; its projections are layers of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention that takes the number of its heads from what it is given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.channels = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.channels)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """From token numbers to logits, without positions."""

    def __init__(self, width: int, *, layers: int, words: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(width: int, *, layers: int, words: int, heads: int) -> Transformer:
    """Return the same weights in every process."""
    torch.manual_seed(0)
    return Transformer(width, layers=layers, words=words, heads=heads)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

"""Small models that wire their layers in all the ways that a pipeline has to follow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.skips import Skips

WIDTH, WORDS, LENGTH = 8, 13, 6


class Block(nn.Module):
    """A residual layer that mixes positions and features."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(self.mix(self.norm(x)))
        return x + self.scale * mixed + mixed.mean(1, keepdim=True)


class Words(LightningModule):
    """Embedding, blocks, norm and head; a subclass says how they are called."""

    def __init__(self, count: int = 6, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions[: tokens.shape[1]]

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch
        loss = self.loss(self.body(self.embed(tokens), batch), tokens)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch
        return {"loss": self.loss(self.body(self.embed(tokens), batch), tokens)}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch
        return self.head(self.norm(self.body(self.embed(tokens), batch))).argmax(-1)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """No trainer is attached."""


class Tied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class HeadBetweenUnits(Words):
    """The embedding's weight is used by a function, not by a layer."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits = self.norm(x) @ self.embedding.weight.mT
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class OutsideResidual(Words):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.blocks)

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


class InPlaceResidual(Words):
    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x += block(2 * x)
        return x


class WrittenRows(Words):
    """Outputs are written into a tensor that the step made beforehand."""

    def body(self, x: Tensor, batch: Any) -> Tensor:
        kept = torch.zeros(len(self.blocks), *x.shape)
        for i, block in enumerate(self.blocks):
            x = block(x)
            kept[i] = x
        kept[0].mul_(2.0)
        return kept.mean(0)


class BlockInPlace(nn.Module):
    """Changes its argument and returns nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> None:
        x.add_(torch.tanh(self.mix(2 * x)))


class ChangedArgument(Words):
    def __init__(self) -> None:
        super().__init__(make=BlockInPlace)

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            block(x)
        return x


class TwoStreams(nn.Module):
    """Two tensors, a number and None in; a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, *, right: Tensor, power: int, mask: Any = None) -> Any:
        assert mask is None
        made = {"left": left + torch.tanh(self.left(right)) ** power, "power": power, "none": mask}
        return {**made, "more": [right - torch.sin(self.right(left)), right.shape[1]]}


class Streams(Words):
    def __init__(self) -> None:
        super().__init__(make=TwoStreams)

    def body(self, x: Tensor, batch: Any) -> Tensor:
        out: Any = {"left": x, "power": 2, "none": None, "more": [x * 0.5, 0]}
        for block in self.blocks:
            out = block(out["left"], right=out["more"][0], power=out["power"], mask=out["none"])
            assert out["more"][1] == x.shape[1]
            out.pop("unknown", None)
        return out["left"] + out["more"][0]


@dataclass
class State:
    hidden: Tensor
    first: Tensor
    depth: int = 0


class StateBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: State) -> State:
        return State(self.block(state.hidden), state.first, state.depth + 1)


class DataclassState(Words):
    """``first`` passes through every block untouched, and so through whole stages."""

    def __init__(self) -> None:
        super().__init__(make=StateBlock)

    def body(self, x: Tensor, batch: Any) -> Tensor:
        state = State(x, x)
        for block in self.blocks:
            state = block(state)
        assert state.depth == len(self.blocks)
        return state.hidden * torch.sigmoid(state.first)


class FrozenStart(Words):
    def __init__(self) -> None:
        super().__init__()
        for each in (self.embedding, self.blocks[0], self.blocks[1], self.blocks[2]):
            each.requires_grad_(False)
        self.positions.requires_grad_(False)


class BatchDecides(Words):
    """What runs depends on numbers in the batch; tensors of the same shape, other layers."""

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for i, block in enumerate(self.blocks):
            if batch["skipped"].item() != i:
                x = block(x)
        return x * batch["weight"].sum()


class DataDecides(nn.Module):
    """Branches on its own activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) if x.mean() > 0 else self.other(x)
        chosen = x.flatten(0, 1)[(x.sum(-1) > 0).flatten()]
        return x + 0.1 * chosen.sum(0) + float(x.detach().std())


class DataInBlock(Words):
    def __init__(self) -> None:
        super().__init__(make=DataDecides)


class DictBatch(Words):
    """Masks made from the batch are used on every stage; a value of the first one in the loss."""

    def body(self, x: Tensor, batch: Any) -> Tensor:
        mask = batch["mask"].unsqueeze(-1).float()
        early = x
        for block in self.blocks:
            x = block(x * mask)
        return x + early.mean()


class DropoutBetweenUnits(Words):
    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(x), 0.3, self.training)
        return x


class Checkpointed(Words):
    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class CheckpointInBlock(Words):
    def __init__(self) -> None:
        super().__init__(make=CheckpointedInside)


class Extra(Words):
    """Returns more than a loss, and reads data after the last layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.body(self.embed(batch), batch)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
        right = (logits.argmax(-1) == batch).float().mean().item()
        chosen = logits[batch > 2]
        surprising = logits[logits > 0]
        if loss.item() < 1e-9:
            loss = loss + x.sum()
        self.log("early", x.detach().mean())
        more = 1e-3 * chosen.square().mean() + 1e-3 * surprising.square().mean()
        return {"loss": loss + more, "right": right, "logits": logits.detach()}


class MappedMask(Words):
    """Makes a mask of the batch by torch.vmap, as Hugging Face does for patterns of attention."""

    def body(self, x: Tensor, batch: Any) -> Tensor:
        later = torch.vmap(torch.vmap(lambda token, at: token > at, (0, None)), (None, 0))
        mask = later(batch, torch.arange(4)).float().mean(0).unsqueeze(-1)
        for block in self.blocks:
            x = x + mask * block(x)
        return x


class Asserts(Words):
    """Checks what it has computed, behind a decision by a value of a later stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = self.embed(batch)
        logits = self.head(self.norm(self.body(first, batch)))
        penalty = 0.0 if (logits > 1e9).any() else 1e-3 * first.square().mean()
        assert logits.isfinite().all()
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten()) + penalty


class Encoder(Words):
    """All blocks of a decoder look at what the encoder gave."""

    def __init__(self) -> None:
        super().__init__(count=3)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0) for _ in range(3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        source, target = batch
        memory = self.body(self.embed(source), batch)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, memory=memory)
        return self.loss(x, target)


class Level(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x)))


class UNet(Skips):
    """Skips from every level down to the same level up."""

    def __init__(self) -> None:
        super().__init__(1, 4, Level)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.through(batch), batch)


class Convolutions(LightningModule):
    """A plain deep ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(6):
            layers += [nn.Conv2d(1 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4)]
            layers += [nn.ReLU(inplace=i % 2 == 1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        target = torch.arange(len(batch), device=batch.device) % 5
        return F.cross_entropy(self.net(batch), target)

"""Models whose loss is of the whole batch, so that losses of microbatches do not add up to it."""

from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.support.stack import VOCABULARY, Stack


class Contrastive(Stack):
    """Every row against every other one, as in CLIP, with a trained temperature of its own."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        states = functional.normalize(self(tokens).mean(1), dim=-1)
        others = functional.normalize(
            functional.one_hot(targets, VOCABULARY).float().mean(1), dim=-1
        )
        scores = states @ others.T * self.scale.exp()
        labels = torch.arange(len(scores))
        loss = functional.cross_entropy(scores, labels) + functional.cross_entropy(scores.T, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("rows", len(tokens), reduce_fx="sum")
        self.log_dict({"spread": scores.detach().std(), "hits": (scores.argmax(1) == labels).sum()})
        self.accuracy(scores.detach().max())
        self.log("accuracy", self.accuracy)
        return {"loss": loss, "scale": self.scale.detach().clone()}


class SigmoidLoss(nn.Module):
    """The loss of SigLIP, whose temperature and bias are its own, on pairs of equal labels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.bias = nn.Parameter(torch.tensor(-0.4))

    def forward(self, states: Tensor, labels: Tensor) -> Tensor:
        scores = states @ states.T * self.scale.exp() + self.bias
        pairs = labels[:, None] == labels[None]
        weights = torch.ones(len(labels))
        weights[torch.where(labels == labels.min())[0]] = 0.5  # a look at data, as ArcFace's
        return -functional.logsigmoid(torch.where(pairs, scores, -scores)).mean(1) @ weights / 10


class Criterion(Stack):
    """Whose loss is a module with parameters, as in pytorch-metric-learning and open_clip."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.criterion = SigmoidLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        states = functional.normalize(self(tokens).mean(1), dim=-1)
        loss: Tensor = self.criterion(states, targets[:, 0] % 3)
        self.log("train_loss", loss)
        return loss


class Ratio(Stack):
    """Overlap over the size of both, beside a loss of tokens that are unevenly masked."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        mask = targets != -100
        chosen = functional.one_hot(targets.clamp(min=0), VOCABULARY) * mask[..., None]
        shares = logits.softmax(-1)
        dice = 1 - 2 * (shares * chosen).sum() / (shares.square().sum() + chosen.sum())
        weighted = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), torch.linspace(0.5, 2, VOCABULARY)
        )
        loss = dice + weighted
        self.log_dict({"train_loss": loss, "dice": dice})
        return loss


class Balanced(Stack):
    """Means over the batch that are multiplied, as of experts' shares of the tokens."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.steps_seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x, routes = self.embedding(tokens), []
        for block in self.blocks:
            x = block(x)
            routes.append(x.softmax(-1))
        shares = torch.stack(routes).flatten(0, 2)
        chosen = functional.one_hot(shares.argmax(-1), shares.shape[-1]).float()
        balance = (shares.mean(0) * chosen.mean(0)).sum()
        logits = self.head(self.norm(x))
        self.steps_seen.append(len(tokens))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + balance
        self.log_dict({"train_loss": loss, "balance": balance})
        return loss


def uneven_data(count: int, batch_size: int) -> DataLoader[Any]:
    """Texts of random tokens; rows have between none and all of their tokens masked."""
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(VOCABULARY, (count, 6), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[
        torch.rand(targets.shape, generator=generator) < torch.arange(count)[:, None] % 4 / 3
    ] = -100
    return DataLoader(TensorDataset(tokens[:, :-1], targets), batch_size=batch_size)


class Views(Stack):
    """Two views of each row through one encoder, told apart from all others, as in SimCLR."""

    def __init__(self, *, is_concatenated: bool = False) -> None:
        super().__init__(depth=4)
        self.is_concatenated = is_concatenated

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        views = tokens, tokens.flip(1) * 3 % VOCABULARY
        if self.is_concatenated:
            states = self(torch.cat(views)).mean(-2)
        else:
            states = self(torch.stack(views, 1)).mean(-2).transpose(0, 1).flatten(0, 1)
        states = functional.normalize(states, dim=-1)
        scores = (states @ states.T / 0.5).fill_diagonal_(-1e4)
        rows = len(tokens)
        loss = functional.cross_entropy(scores, torch.arange(2 * rows).roll(rows))
        self.log("train_loss", loss)
        return loss


class TwoPasses(Views):
    """Each view by a pass of its own through all layers, as published modules write SimCLR."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        first, second = (
            functional.normalize(self(view).mean(1), dim=-1)
            for view in (tokens, tokens.flip(1) * 3 % VOCABULARY)
        )
        loss = functional.cross_entropy(first @ second.T / 0.5, torch.arange(len(tokens)))
        self.log("train_loss", loss)
        return loss


class Mined(Stack):
    """Pairs of rows as pytorch-metric-learning finds them: zero where a batch has none."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        states = functional.normalize(self(tokens).mean(1), dim=-1)
        is_same = torch.eye(len(tokens), dtype=torch.bool).roll(1, 0)
        apart, near = (torch.cdist(states, states)[each] for each in (~is_same, is_same))
        violations = (near[:, None] - apart[None] + 0.05).relu()
        found = violations[violations > 0]
        loss = found.mean() if len(tokens) > 1 and len(found) else 0 * states.sum()
        self.log("train_loss", loss)
        return loss


class Triplets(Stack):
    """Anchor, positive and negative through one encoder; a mean over rows, with logs of each."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.largest = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        views = []
        for name, view in (("one", tokens), ("two", tokens.flip(1)), ("three", tokens * 3)):
            views.append(functional.normalize(self(view % VOCABULARY).mean(1), dim=-1))
            self.log(name, views[-1].square()[:, 0].mean())
            self.log(f"below_{name}", 1 - self.largest(views[-1].detach().amax(1)))
        anchor, positive, negative = views
        loss = functional.triplet_margin_loss(anchor, positive, negative, margin=2.0)
        self.log_dict({"train_loss": loss, "largest": self.largest})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, _ = batch
        states = self(tokens)
        self.log("val_apart", functional.mse_loss(states, self(tokens.flip(1))), sync_dist=True)

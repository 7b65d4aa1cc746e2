"""Models whose evaluation says more than a mean loss, each in a way that microbatches may spoil."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

WIDTH, CLASSES, LENGTH = 6, 4, 3


def points(count: int, batch_size: int, seed: int = 0) -> DataLoader[Any]:
    """``count`` rows of ``(LENGTH, WIDTH)`` numbers, with a class each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, LENGTH, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Judged(LightningModule):
    """Every kind of number that authors take of a batch, and every way to keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.accuracy: Any = MulticlassAccuracy(CLASSES, average="micro", dist_sync_on_step=True)
        self.by_loader: Any = nn.ModuleDict({"0": MeanMetric(), "1": MeanMetric()})
        self.collection: Any = MetricCollection(
            {"macro": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
        )
        self.area, self.total = BinaryAUROC(), SumMetric()
        self.seen = 0
        self.outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1)) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        self.seen += len(x)
        self.total.update(len(x))
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        right = (logits.argmax(-1) == y).float()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("exp", loss.exp(), sync_dist=True)
        self.log("over_len", right.sum() / len(y))
        self.log("over_numel", right.sum() / y.numel())
        self.log("over_all", right.mean(), batch_size=len(y))
        self.log("sum", functional.cross_entropy(logits, y, reduction="sum") / len(y))
        self.log("num_right", right.sum(), reduce_fx="sum")
        self.log("worst", functional.cross_entropy(logits, y, reduction="none").max(),
                 reduce_fx="max")  # fmt: skip
        self.log("float", loss.item())
        self.log("spread", logits.std())
        self.log("weights", self.layers[0].linear.weight.norm())
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.by_loader[str(dataloader_idx)].update(loss, weight=len(y))
        self.log_dict(self.collection(logits, y))
        self.area.update(logits[:, 0], y == 0)
        self.outputs.append({"logits": logits, "loss": loss})
        return {"loss": loss, "logits": logits, "count": len(y), "names": ["a"] * len(y)}

    def on_validation_epoch_end(self) -> None:
        self.log("area", self.area.compute())
        self.log("appended", torch.stack([each["loss"] for each in self.outputs]).mean())
        self.log("rows", float(sum(len(each["logits"]) for each in self.outputs)))
        self.log("total", self.total.compute())
        self.log("seen", float(self.seen))
        for name, metric in self.by_loader.items():
            if metric.update_called:
                self.log(f"mean_{name}", metric.compute())
            metric.reset()
        for each in (self.area, self.total, self.collection):
            each.reset()
        self.outputs.clear()

    def test_step(self, batch: Any) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"best": logits.argmax(-1), "spread": logits.std(), "both": (logits, logits.sum(0))}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SequenceFirst(Judged):
    """Rows are the second dimension, to the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(0) * self.temperature


class FlatByTime(Judged):
    """Rows and steps share a dimension, and the rows are not the outer ones."""

    def forward(self, x: Tensor) -> Tensor:
        count = len(x)
        x = x.transpose(0, 1).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).unflatten(0, (LENGTH, count)).mean(0) * self.temperature


class Measured(Layer):
    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        return made, made.square().mean()


class ScalarOfLayer(Judged):
    """A layer's second output is a mean over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Measured() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        extra: Any = 0.0
        for layer in self.layers:
            x, size = layer(x)
            extra = extra + size
        return self.head(x.mean(1)) * self.temperature + extra


class Contrastive(Judged):
    """Every row is compared with all others of its batch, and with prompts that are no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prompts", torch.linspace(-1, 1, CLASSES * WIDTH).view(CLASSES, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        prompts = self.first(self.prompts)
        for layer in self.layers:
            x = layer(x)
        pooled = self.head(x.mean(1)) @ prompts[:, :CLASSES]
        alike = pooled @ pooled.T
        return pooled + alike.softmax(1) @ pooled * self.temperature


class ReadsOnItsWay(Judged):
    """Python looks at what a layer of the last stage gives, between layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.size = x.abs().max().item()
        return self.head(x.mean(1)) * self.temperature * self.size


class Noisy(Judged):
    """Noise of the step goes into the layers and is compared with what comes out of them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:  # so that what goes in comes out
            nn.init.zeros_(layer.linear.weight)
            nn.init.zeros_(layer.linear.bias)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x = noise = self.noise(batch[0])
        for layer in self.layers:
            x = layer(x)
        self.log("noise", noise.std())
        self.log("left", functional.mse_loss(x, noise))

    def noise(self, x: Tensor) -> Tensor:
        """Return noise of a tensor's shape."""
        return torch.randn_like(x)

    def on_validation_epoch_end(self) -> None:
        pass


class NoisyByOwn(Noisy):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)
        self.others = [np.random.default_rng(7)]

    def noise(self, x: Tensor) -> Tensor:
        drawn = self.others[0].normal(size=tuple(x.shape))
        return torch.randn(x.shape, generator=self.generator) + torch.from_numpy(drawn).to(x)


MODELS = {
    each.__name__: each
    for each in (Judged, SequenceFirst, FlatByTime, ScalarOfLayer, Contrastive, ReadsOnItsWay)
}


class Counting(Judged):
    """Counts what it sees while it trains, by metrics of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.rows, self.mean = SumMetric(), SumMetric(), MeanMetric()
        self.by_epoch: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.rows.update(len(x))
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("value", self.by_loader["0"](loss, weight=len(y)), on_step=True, on_epoch=True)
        self.log_dict(self.collection(logits.softmax(-1), y), on_step=True, on_epoch=True)
        self.area.update(logits[:, 0], target=y == 0)
        self.mean.update(functional.cross_entropy(logits, y, reduction="none"))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.total.update((logits.argmax(-1) == y).sum())
        self.log("sofar", self.total.compute(), on_step=True)
        return {"loss": loss, "logits": logits}

    def on_train_epoch_end(self) -> None:
        everything = {
            "area": self.area, "total": self.total, "rows": self.rows,
            "macro": self.collection["macro"], "by_loader": self.by_loader["0"],
        }  # fmt: skip
        found = {name: metric.compute() for name, metric in everything.items()}
        self.by_epoch.append(found | {"updates": self.accuracy.update_count})
        self.log("epoch_area", found["area"])
        for metric in everything.values():
            metric.reset()

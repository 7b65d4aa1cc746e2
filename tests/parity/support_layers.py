"""Modules of ``support`` with unusual layers, parameters, buffers or optimizers."""

from collections.abc import Callable
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.stack import Stack


class Model(Stack):
    """Blocks of 16 channels; ``configure`` of a case changes it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"depth": 4, "width": 16, "hidden": 32, "optimizer": "adamw", **options})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


class DictBatch(Model):
    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            batch = batch["tokens"], batch["targets"]
        return super().loss(batch)


class ManualTwoOptimizers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.blocks.parameters(), lr=0.01),
            torch.optim.AdamW([*self.head.parameters(), *self.embedding.parameters()], lr=0.02),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class ManualOne(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ParameterGroups(Model):
    def __init__(self) -> None:
        super().__init__(groups=True)


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__(freezes=True)


class FrozenStart(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class FrozenUnderNoGrad(FrozenStart):
    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](self.embedding(tokens))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(self.norm(x))


class Unfreezes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.blocks[1].requires_grad_(True)


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class LoRA(Model):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            adapted: Any = block
            adapted.up, adapted.down = LoRALinear(adapted.up), LoRALinear(adapted.down)


class CompiledBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Checkpointed(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__(ties=True)


class TiedByFunction(Model):
    """Uses the embedding's weight as the head without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class WeightPenalty(Model):
    """Adds a penalty that reads parameters in training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        blocks: Any = self.blocks
        penalty = sum(block.up.weight.square().sum() for block in blocks)
        return self.loss(batch) + 1e-3 * penalty


class Metrics(Model):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(13, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        self.accuracy(logits.flatten(0, 1), targets.flatten())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def on_train_epoch_end(self) -> None:
        self.log("last", 1.0)


class EpochEndLists(Model):
    """Collects outputs in a list and uses it at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(self(batch[0]).mean())

    def on_validation_epoch_end(self) -> None:
        self.log("mean_logit", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()


class SkipsSteps(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class ConfigureModel(Model):
    """Makes its layers in configure_model."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.options: dict[str, Any] = {}
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = Model()

    @property
    def hparams(self) -> Any:
        return {"optimizer": "adamw", "groups": False, "skips": False}

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens)


class Contrastive(Model):
    """InfoNCE over the batch: each row is compared with all others."""

    def loss(self, batch: Any) -> Tensor:
        x = functional.normalize(self(batch[0]).mean(1), dim=-1)
        return functional.cross_entropy(x @ x.T / 0.1, torch.arange(len(x)))


class Counts(Model):
    """Writes a buffer in place in its step."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Normalized(Model):
    """Batch norm in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(Transposed(), nn.BatchNorm1d(16), Transposed())


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class UsesFindUnused(ManualTwoOptimizers):
    """Runs under DDP with ``find_unused_parameters``."""


def optimizer_case(make: Callable[[list[Any]], Any]) -> type[Model]:
    class WithOptimizer(Model):
        def configure_optimizers(self) -> Any:
            return make(list(self.parameters()))

    return WithOptimizer


class LARS(torch.optim.Optimizer):
    """Scales each parameter's step by norms of the whole parameter and its gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    rate = each.norm() / (each.grad.norm() + 1e-6)
                    each.sub_(0.01 * rate * each.grad)
        return loss

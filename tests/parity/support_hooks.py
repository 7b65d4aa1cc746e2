"""Modules of ``support`` with unusual steps or hooks."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from boltmesh.strategies import (
    gathered_parameters,
)
from tests.parity.support_layers import Model


class Teacher(Model):
    """A moving average of the student, updated after each batch, as BYOL does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x = y = self.embedding(batch[0])
        for block, average in zip(self.blocks, self.teacher, strict=True):
            x, y = block(x), average(y)
        logits = self.head(self.norm(x + 0.1 * y.detach()))
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        for average, new in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
            average.lerp_(new, 0.1)


class GatheredTeacher(Teacher):
    """The same, on full parameters."""

    def update(self) -> None:
        with gathered_parameters(self, writes=True):
            super().update()


class Generates(Model):
    """Generates token by token in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        tokens = batch[0][:, :1]
        for _ in range(4):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        self.log("sum", tokens.float().sum(), reduce_fx="sum", sync_dist=True)


class ForwardHook(Model):
    """Doubles a block's output by a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_hook(lambda _, __, output: output * 2)


class ParameterHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)


class AccumulateHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class LogsGradNorm(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.log_dict(grad_norm(self, norm_type=2))


class ReadsGradients(Model):
    """Scales gradients by hand in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ClampsWeights(Model):
    """Clamps weights after each batch, as WGAN does."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.clamp()

    @torch.no_grad()
    def clamp(self) -> None:
        for parameter in self.parameters():
            parameter.clamp_(-0.3, 0.3)


class GatheredClamp(ClampsWeights):
    """The same, on full parameters."""

    def clamp(self) -> None:
        with gathered_parameters(self, writes=True):
            super().clamp()


class WarmsUp(Model):
    """Overrides optimizer_step to set the learning rate, as Lightning's docs show."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.global_step)


class Plateau(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class GradientPenalty(Model):
    """Differentiates inside training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        (gradient,) = torch.autograd.grad(logits.square().mean(), x, create_graph=True)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return loss + gradient.square().mean()


class Scalar(Model):
    def __init__(self) -> None:
        super().__init__(has_scalar=True)


class SparseEmbedding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recurrent(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.rnn(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BranchesOnValues(Model):
    """Which layers run depends on what a layer has computed."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != 2 or x.mean() < 100:
                x = block(x)
        return self.head(self.norm(x))


class AlternatesLayers(Model):
    """Leaves a block out of odd steps."""

    def __init__(self) -> None:
        super().__init__(skips=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UnusedParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(16, 16)


class GathersInLoss(Model):
    """Logs the mean over ranks by self.all_gather."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("gathered", self.all_gather(loss.detach()).mean())
        return loss


class DrawsBatches(Model):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class TwoLoaders(Model):
    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return super().loss(batch["a"]) + 0.5 * super().loss(batch["b"])
        return super().loss(batch)


class FindsRate(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class BackwardHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda *_: None)


class TwoNames(Model):
    """Registers its blocks under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.blocks


class MaxNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16, max_norm=0.5)


class Lazy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(13)


class OtherBatch(Model):
    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            batch = torch.stack(batch["tokens"]), batch["targets"]
        elif not isinstance(batch, (tuple, list)):
            batch = batch.tokens, batch.targets
        return super().loss(batch)


class KeepsActivations(Model):
    """Reads another layer's activations by a forward hook and uses them in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None

        def keep(_: Any, __: Any, output: Tensor) -> None:
            self.seen = output

        self.blocks[0].register_forward_hook(keep)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + 1e-2 * self.seen.square().mean()

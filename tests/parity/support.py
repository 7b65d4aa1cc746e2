"""Things that LightningModules do, under every strategy, against one process.

    python -m tests.parity.support [--strategies ddp zero3 ...] [--cases lora ...]

Each case is a small module that does one thing. It trains for a few optimizer steps on two ranks
(3d: on four) and is validated. Prints a line for each case and strategy: ``same`` if the losses are
those of one process, ``differs`` with both, or the error. docs/support.md is written from this
table. Some minutes for each strategy.
"""

import copy
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, WeightedRandomSampler

from boltmesh.strategies import (
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    gathered_parameters,
)
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import Stack

ROWS, BATCH, STEPS = 48, 8, 4

STRATEGIES: dict[str, tuple[Callable[[], Any], int, int]] = {
    # How it is made, ranks, and how many of those have batches of their own.
    "ddp": (lambda: DDPStrategy(telemetry=False), 2, 2),
    "zero1": (lambda: ZeROStrategy(stage=1, telemetry=False), 2, 2),
    "zero2": (lambda: ZeROStrategy(stage=2, telemetry=False), 2, 2),
    "zero3": (lambda: ZeROStrategy(stage=3, telemetry=False), 2, 2),
    "zero3_cpu": (
        lambda: ZeROStrategy(
            stage=3, offload_optimizer="cpu", offload_parameters="cpu", telemetry=False
        ),
        2,
        2,
    ),
    "pipeline": (lambda: PipelineParallelStrategy(microbatches=4, telemetry=False), 2, 1),
    "tensor": (lambda: TensorParallelStrategy(telemetry=False), 2, 1),
    "3d": (
        lambda: Parallel3DStrategy(pipeline=2, tensor=2, microbatches=4, telemetry=False),
        4,
        1,
    ),
}


class Tokens(Dataset[Any]):
    """Texts in which each token follows from the one before it; as a tuple, a dict or a list."""

    def __init__(self, kind: str = "tuple", rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(3)
        starts = torch.randint(13, (rows, 1), generator=generator)
        self.tokens, self.kind = (starts * 3 ** torch.arange(7)) % 13, kind

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        tokens, targets = self.tokens[index, :-1], self.tokens[index, 1:]
        return {"tokens": tokens, "targets": targets} if self.kind == "dict" else (tokens, targets)


class Stream(IterableDataset[Any]):
    """The same texts one after the other; each data rank takes every second one."""

    def __init__(self, share: int, shares: int) -> None:
        self.share, self.shares, self.tokens = share, shares, Tokens()

    def __iter__(self) -> Iterator[Any]:
        return (self.tokens[row] for row in range(self.share, ROWS, self.shares))


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


class UsesFindUnused(ManualTwoOptimizers):
    """Runs under DDP with ``find_unused_parameters``."""


@dataclass
class Pair:
    """A batch as a dataclass."""

    tokens: Tensor
    targets: Tensor


class Custom:
    """A batch of a class that torch knows nothing of."""

    def __init__(self, tokens: Tensor, targets: Tensor) -> None:
        self.tokens, self.targets = tokens, targets


def collate(kind: str, rows: list[Any]) -> Any:
    tokens, targets = (torch.stack([row[index] for row in rows]) for index in (0, 1))
    if kind == "lists":
        return {"tokens": [row[0] for row in rows], "targets": targets, "nothing": None}
    return (Pair if kind == "dataclass" else Custom)(tokens, targets)


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


Case = tuple[Callable[[], LightningModule], dict[str, Any]]

CASES: dict[str, Case] = {
    "plain": (Model, {}),
    "parameter groups, scheduler": (ParameterGroups, {}),
    "several optimizers, manual": (ManualTwoOptimizers, {}),
    "manual optimisation": (ManualOne, {}),
    "frozen layers": (Frozen, {}),
    "frozen start": (FrozenStart, {}),
    "frozen part under no_grad": (FrozenUnderNoGrad, {}),
    "unfreezes a block later": (Unfreezes, {}),
    "lora": (LoRA, {}),
    "compiled blocks": (CompiledBlocks, {}),
    "torch.utils.checkpoint": (Checkpointed, {}),
    "tied weights": (Tied, {}),
    "F.linear with embedding.weight": (TiedByFunction, {}),
    "reads weights in the step": (WeightPenalty, {}),
    "torchmetrics, log at epoch end": (Metrics, {}),
    "lists for epoch end": (EpochEndLists, {}),
    "training_step returns None": (SkipsSteps, {}),
    "configure_model": (ConfigureModel, {}),
    "batch-global loss": (Contrastive, {}),
    "module under two names": (TwoNames, {}),
    "max_norm": (MaxNorm, {}),
    "lazy module": (Lazy, {}),
    "two optimizers, unused": (UsesFindUnused, {}),
    "batch with a list and None": (OtherBatch, {"data": "lists"}),
    "batch as a dataclass": (OtherBatch, {"data": "dataclass"}),
    "batch of a custom class": (OtherBatch, {"data": "custom"}),
    "in-place buffer": (Counts, {}),
    "batch norm": (Normalized, {}),
    "sync_batchnorm": (Normalized, {"sync_batchnorm": True}),
    "moving average by hand": (Teacher, {}),
    "moving average, gathered": (GatheredTeacher, {}),
    "generation in validation": (Generates, {}),
    "forward hook": (ForwardHook, {}),
    "backward hook of a module": (BackwardHook, {}),
    "hook keeps activations": (KeepsActivations, {}),
    "hook on a parameter": (ParameterHook, {}),
    "post-accumulate hook": (AccumulateHook, {}),
    "grad_norm in a hook": (LogsGradNorm, {}),
    "scales gradients in a hook": (ReadsGradients, {}),
    "clamps weights": (ClampsWeights, {}),
    "clamps weights, gathered": (GatheredClamp, {}),
    "optimizer_step override": (WarmsUp, {}),
    "ReduceLROnPlateau": (Plateau, {}),
    "autograd.grad in the step": (GradientPenalty, {}),
    "0-dim parameter": (Scalar, {}),
    "sparse embedding": (SparseEmbedding, {}),
    "LSTM": (Recurrent, {}),
    "branches on values": (BranchesOnValues, {}),
    "leaves a block out": (AlternatesLayers, {}),
    "unused parameter": (UnusedParameter, {}),
    "all_gather": (GathersInLoss, {}),
    "dataloader_iter": (DrawsBatches, {}),
    "dict batch": (DictBatch, {"data": "dict"}),
    "two loaders": (TwoLoaders, {"data": "two"}),
    "IterableDataset": (Model, {"data": "stream"}),
    "custom sampler": (Model, {"data": "sampler"}),
    "gradient clipping": (Model, {"gradient_clip_val": 0.1}),
    "accumulation": (Model, {"accumulate_grad_batches": 2}),
    "bf16-mixed": (Model, {"precision": "bf16-mixed"}),
    "bf16-true": (Model, {"precision": "bf16-true"}),
    "64-true": (Model, {"precision": "64-true"}),
    "EMAWeightAveraging": (Model, {"callbacks": lambda: [EMAWeightAveraging()]}),
    "StochasticWeightAveraging": (
        Model,
        {"callbacks": lambda: [StochasticWeightAveraging(0.1, swa_epoch_start=1)]},
    ),
    "ModelPruning": (Model, {"callbacks": lambda: [ModelPruning("l1_unstructured", amount=0.5)]}),
    "EarlyStopping": (Model, {"callbacks": lambda: [EarlyStopping("val_loss")]}),
    "OnExceptionCheckpoint": (Model, {"callbacks": lambda: [OnExceptionCheckpoint("x")]}),
    "LearningRateFinder": (
        FindsRate,
        {"callbacks": lambda: [LearningRateFinder(num_training_steps=8, attr_name="lr")]},
    ),
    "SGD": (optimizer_case(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), {}),
    "Adagrad": (optimizer_case(lambda p: torch.optim.Adagrad(p, lr=0.01)), {}),
    "RMSprop": (optimizer_case(lambda p: torch.optim.RMSprop(p, lr=0.01)), {}),
    "LBFGS": (optimizer_case(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)), {}),
    "Adafactor": (optimizer_case(lambda p: torch.optim.Adafactor(p, lr=0.01)), {}),
    "LARS": (optimizer_case(LARS), {}),
}
if hasattr(torch.optim, "Muon"):
    CASES["Muon"] = (
        optimizer_case(
            lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01)
        ),
        {},
    )


def loader_of(kind: str, *, share: int, shares: int, rows: int) -> Any:
    size = BATCH // shares
    if kind == "stream":
        return DataLoader(Stream(share, shares), batch_size=size)
    tokens = Tokens("dict" if kind == "dict" else "tuple", rows)
    # As Lightning's sampler does where it does not shuffle.
    data = tokens if kind == "sampler" else Subset(tokens, range(share, rows, shares))
    if kind == "two":
        return {name: DataLoader(data, batch_size=size) for name in "ab"}
    if kind == "sampler":
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            data,
            batch_size=size,
            sampler=WeightedRandomSampler([1.0] * rows, rows, generator=generator),
        )
    if kind in {"lists", "dataclass", "custom"}:
        return DataLoader(data, batch_size=size, collate_fn=partial(collate, kind))
    return DataLoader(data, batch_size=size)


def run_case(name: str, strategy: str | None, rank: int, world_size: int) -> Any:
    make, options = CASES[name]
    options = dict(options)
    make_strategy, _, shares = STRATEGIES[strategy] if strategy else (lambda: "auto", 1, 1)
    kind = options.pop("data", "tuple")
    callbacks = options.pop("callbacks", list)()
    seed_everything(1, verbose=False)
    module = make()
    made = make_strategy()
    if strategy == "ddp" and isinstance(module, UsesFindUnused):
        made = DDPStrategy(find_unused_parameters=True, telemetry=False)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=made, max_epochs=2, logger=False,
        enable_checkpointing=any("Checkpoint" in type(each).__name__ for each in callbacks),
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_train_batches=STEPS, callbacks=callbacks, use_distributed_sampler=kind == "sampler",
        **options,
    )  # fmt: skip
    share = rank if shares > 1 else 0
    trainer.fit(module, loader_of(kind, share=share, shares=shares, rows=ROWS),
                loader_of("tuple", share=share, shares=shares, rows=16))  # fmt: skip
    (found,) = trainer.validate(
        module, loader_of("tuple", share=share, shares=shares, rows=16), verbose=False
    )
    logged: dict[str, Any] = {
        f"train {key}": value for key, value in trainer.logged_metrics.items()
    }
    return {key: float(value) for key, value in {**found, **logged}.items()}


def _outcome(name: str, strategy: str | None, rank: int, world_size: int) -> Any:
    try:
        return run_case(name, strategy, rank, world_size)
    except Exception as error:  # noqa: BLE001 - the table shows it
        return f"{type(error).__name__}: {error}"


def work(rank: int, world_size: int, strategy: str | None, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        found[name] = _outcome(name, strategy, rank, world_size)
    return found


def tell(name: str, strategy: str, whole: Any, found: Any) -> None:
    if isinstance(found, str):
        verdict = found if isinstance(whole, dict) else f"{found} | one process: {whole}"
    elif isinstance(whole, str):
        verdict = f"runs; one process: {whole}"
    else:
        differing = {
            key: (value, found.get(key))
            for key, value in whole.items()
            if key not in found or abs(found[key] - value) > 2e-4 * max(1.0, abs(value))
        }
        verdict = f"differs: {differing}" if differing else "same"
    print(f"{strategy:10} {name:32} {' '.join(verdict.split())[:600]}", flush=True)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    (whole,) = run_ranks(work, 1, None, options.cases, timeout_s=1500)
    for name in options.cases:
        if isinstance(whole[name], str):
            tell(name, "one", {}, whole[name])
    for strategy in options.strategies:
        ranks = STRATEGIES[strategy][1]
        for name in options.cases:
            try:
                found = run_ranks(work, ranks, strategy, [name], timeout_s=180)[0]
            except RankFailure as failure:
                found = {name: f"died: {str(failure)[-500:]}"}
            tell(name, strategy, whole[name], found[name])


if __name__ == "__main__":
    main()

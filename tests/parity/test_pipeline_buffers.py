"""Buffers that code between layers writes, through ``.data`` and otherwise, as in one process.

Microbatches of a pipeline are those of a process that accumulates: each reads what the one before
it has written, and its backward pass what it has read itself.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks

FORMS = (
    "data_add", "data_copy", "data_assigned", "data_rows", "in_place", "numpy", "behind", "vq",
    "layer",
)  # fmt: skip
MICROBATCHES = 2


class Codebook(nn.Module):
    """A moving average of what comes in, in a buffer, as in a VQ-VAE; ``layer`` has parameters."""

    mean: Tensor
    seen: Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))
        if form == "layer":
            self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        mean, new = self.mean, x.detach().mean(0)
        if self.form == "data_add":
            mean.data.mul_(0.9).add_(new, alpha=0.1)
        elif self.form == "data_copy":
            mean.data.copy_(new)
        elif self.form == "data_assigned":
            mean.data = mean.data * 0.9 + new * 0.1
        elif self.form == "data_rows":
            self.seen.data.add_(1)
            mean.data[2], mean.data[3] = new[2], self.seen
        elif self.form == "in_place":
            with torch.no_grad():
                mean.mul_(0.9).add_(new, alpha=0.1)
        elif self.form == "vq":  # VectorQuantize passes gradients on where its input needs them
            mean.data.mul_(0.9).add_(new, alpha=0.1)
            return x + (mean - x).detach() if x.requires_grad else mean.expand_as(x)
        elif self.form == "numpy":
            self.seen.numpy()[...] += 1
        elif self.form == "layer":
            self.seen.data.add_(1)
            mean.data.mul_(0.9).add_(new, alpha=0.1)
            return (x + (mean - x).detach()) * self.scale
        return x * mean + (0 if self.form == "behind" else self.seen)


class Quantized(LightningModule):
    """Reads the codebook again behind a layer of a later stage."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.codebook = Codebook(form)

    def on_train_start(self) -> None:
        # Batches that were tried before left nothing behind.
        assert self.codebook.mean.eq(1).all()
        assert self.codebook.seen == 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.second(self.codebook(self.first(batch)))
        if self.codebook.form != "layer":
            x = x * self.codebook.mean
        loss = self.third(x).square().mean()
        if self.codebook.form == "behind":  # as the pointer of a queue of MoCo
            self.codebook.seen += 1
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    """Return what is left of each model, without the parameters of other ranks."""
    found = {}
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    size = 8 if world_size > 1 else 8 // MICROBATCHES
    for form in FORMS:
        strategy: Any = "auto"
        if world_size > 1:
            strategy = PipelineParallelStrategy(telemetry=False, microbatches=MICROBATCHES)
        trainer = Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, logger=False,
            accumulate_grad_batches=1 if world_size > 1 else MICROBATCHES,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Quantized(form)
        buffers = dict(model.named_buffers())
        trainer.fit(model, DataLoader(rows, size))  # type: ignore[arg-type]
        assert all(each is buffers[name] for name, each in model.named_buffers())
        stores = strategy.checkpoints.stores if world_size > 1 else lambda name: True
        if form == "layer":  # the rank of the layer alone has its buffers
            buffers = {name: each for name, each in buffers.items() if stores(name)}
        parameters = {k: v.detach().clone() for k, v in model.named_parameters() if stores(k)}
        found[form] = parameters | {k: v.clone() for k, v in buffers.items()}
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_buffers_written_between_layers_equal_those_of_one_process() -> None:
    (alone,) = run_ranks(train, 1)
    for found in run_ranks(train, 2):
        for form in FORMS:
            if form != "layer" or "codebook.scale" in found[form]:
                assert {"codebook.mean", "codebook.seen"} < found[form].keys()
            expected = {name: alone[form][name] for name in found[form]}
            torch.testing.assert_close(found[form], expected, rtol=1e-5, atol=1e-6)


class Reading(Quantized):
    """Reads the codebook of its layer with parameters, before or behind the next layer."""

    def __init__(self, *, is_behind: bool) -> None:
        super().__init__("layer")
        self.is_behind = is_behind

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.codebook(self.first(batch))
        if self.is_behind:
            x = self.second(x) * self.codebook.mean
        else:  # a copy: the next microbatch changes the buffer before this one's backward pass
            x = self.second(x * self.codebook.mean.clone())
        return self.third(x).square().mean()


def read(rank: int, world_size: int, is_behind: bool) -> dict[str, Tensor] | str:
    """Return the parameters of this rank, or why the run was refused."""
    is_alone = world_size == 1
    strategy: Any = "auto"
    if not is_alone:
        strategy = PipelineParallelStrategy(telemetry=False, microbatches=MICROBATCHES)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, logger=False,
        accumulate_grad_batches=MICROBATCHES if is_alone else 1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Reading(is_behind=is_behind)
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    try:
        trainer.fit(model, DataLoader(rows, 8 // MICROBATCHES if is_alone else 8))  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    stores = (lambda name: True) if is_alone else strategy.checkpoints.stores
    return {name: each.detach().clone() for name, each in model.named_parameters() if stores(name)}


@pytest.mark.ranks
def test_a_buffer_that_a_layer_writes_is_read_on_the_stage_of_the_layer_alone() -> None:
    """Other stages have its first values: a step that read them there was wrong."""
    (alone,) = run_ranks(read, 1, False)
    for found in run_ranks(read, 2, False):
        expected = {name: alone[name] for name in found}
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    refused = "the step uses a buffer of 'codebook' on stage 1 or later"
    for found in run_ranks(read, 2, True):
        assert refused in found

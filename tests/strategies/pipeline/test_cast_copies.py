"""Under autocast a stage keeps one cast copy of each weight, not one for each microbatch."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, MICROBATCHES = 24, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Layers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class SavedWeights(Callback):
    """Counts the bf16 tensors of a weight's shape that autograd keeps in a batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._seen: dict[int, Tensor] = {}

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.shape == (WIDTH, WIDTH):
            self._seen[tensor.data_ptr()] = tensor
        return tensor

    def on_train_batch_start(self, *args: Any) -> None:
        self._seen = {}
        self._hooks = saved_tensors_hooks(self._keep, lambda each: each)
        self._hooks.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self.counts.append(len(self._seen))


def fit(rank: int, world_size: int, schedule: str) -> tuple[list[int], dict[str, Tensor]]:
    strategy: Any = DDPStrategy(telemetry=False)
    if world_size > 1:
        strategy = PipelineParallelStrategy(
            telemetry=False, microbatches=MICROBATCHES, split=["blocks.2"], schedule=schedule
        )
    seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(12, WIDTH))
    module, saved = Layers(), SavedWeights()
    Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, callbacks=[saved],
        precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    ).fit(module, DataLoader(data, batch_size=4))  # fmt: skip
    return saved.counts, {name: each.detach().clone() for name, each in module.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_stage_keeps_one_copy_of_each_weight(schedule: str) -> None:
    ((_, expected),) = run_ranks(fit, 1, schedule)
    for rank, (counts, own) in enumerate(run_ranks(fit, 2, schedule)):
        # The first block's input has no gradient, so its weight is not kept.
        assert counts[1:] == [1 + rank] * 2
        for index in (2 * rank, 2 * rank + 1):
            name = f"blocks.{index}.inner.weight"
            torch.testing.assert_close(own[name], expected[name], rtol=1e-2, atol=1e-3)

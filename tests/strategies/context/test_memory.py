"""No tensor of a divided step is larger than a rank's share of that of one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import ContextParallelStrategy
from boltmesh.strategies.torch_compat.tensors import is_fake, tree_leaves
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

LENGTH, WORDS, WIDTH, HEADS, RANKS, TILE = 512, 1024, 16, 2, 4, 32


class Decoder(LightningModule):
    """A block of a decoder with a large vocabulary, and attention by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (ids,) = batch
        x = self.embedding(ids)
        parts = self.attention(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        logits = self.head(x + self.feed_forward(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operator made."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.device.type != "meta" and not is_fake(each):
                self.num_bytes = max(self.num_bytes, each.nbytes)
        return made


class LastStep(Callback):
    """Looks at the tensors of the second step."""

    def __init__(self) -> None:
        self.seen = Largest()

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self.seen.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self.seen.__exit__(None, None, None)


def largest(rank: int, size: int, options: dict[str, Any]) -> int:
    """Train two steps; return the most bytes of a tensor in the last one."""
    strategy: Any = "auto"
    if size > 1:
        strategy = ContextParallelStrategy(telemetry=False, balance="zigzag", **options)
    last = LastStep()
    trainer = Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=2, callbacks=[last],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    ids = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer.fit(Decoder(), DataLoader(TensorDataset(ids)))
    return last.seen.num_bytes


def test_tensors_are_a_share_of_those_of_one_process() -> None:
    (whole,) = run_ranks(largest, 1, {})
    assert whole == 4 * LENGTH * WORDS  # the logits
    assert max(run_ranks(largest, RANKS, {})) <= 1.01 * whole / RANKS


def test_no_tensor_has_the_logits_of_a_rank_where_these_are_tiled() -> None:
    gradients = sum(each.numel() for each in Decoder().parameters())  # in one bucket
    found = max(run_ranks(largest, RANKS, {"tile_logits": TILE}))
    assert found <= 4 * max(TILE * WORDS, gradients) < 4 * LENGTH // RANKS * WORDS
    assert found < 4 * LENGTH * LENGTH // RANKS  # nor has one the scores of attention

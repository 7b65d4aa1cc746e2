"""Adapters of peft on a tiny Llama, trained under every strategy and in one process."""

from collections.abc import Callable
from tempfile import gettempdir
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    gathered_parameters,
)
from tests.support.shard_runs import QUIET

STEPS, BATCH = 4, 4

Make = Callable[..., Any]
STRATEGIES: dict[str, tuple[Make, int, bool]] = {
    # How it is made, its ranks, and whether each has batches of its own.
    "ddp": (DDPStrategy, 2, True),
    "zero1": (lambda **kw: ZeROStrategy(stage=1, **kw), 2, True),
    "zero2": (lambda **kw: ZeROStrategy(stage=2, **kw), 2, True),
    "zero3": (lambda **kw: ZeROStrategy(stage=3, **kw), 2, True),
    "zero2_cpu": (lambda **kw: ZeROStrategy(stage=2, offload_optimizer="cpu", **kw), 2, True),
    "zero3_cpu": (
        lambda **kw: ZeROStrategy(offload_optimizer="cpu", offload_parameters="cpu", **kw),
        2,
        True,
    ),
    "zero3_nvme": (
        lambda **kw: ZeROStrategy(
            offload_optimizer="nvme", offload_parameters="nvme", offload_path=gettempdir(), **kw
        ),
        2,
        True,
    ),
    "pipeline": (lambda **kw: PipelineParallelStrategy(microbatches=2, **kw), 2, False),
    "tensor": (TensorParallelStrategy, 2, False),
    "context": (lambda **kw: ContextParallelStrategy(size=2, **kw), 2, False),
    "3d": (
        lambda **kw: Parallel3DStrategy(pipeline=2, tensor=2, microbatches=2, **kw),
        4,
        False,
    ),
    "3d_zero": (
        lambda **kw: Parallel3DStrategy(pipeline=2, zero_stage=1, microbatches=2, **kw),
        4,
        True,
    ),
}


class Sentences(Dataset[Tensor]):
    """Random tokens, the same on every rank, of which a rank reads every ``shares``-th."""

    def __init__(self, share: int, shares: int) -> None:
        tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(3))
        self.tokens = tokens[share::shares]

    def __len__(self) -> int:
        return len(self.tokens)

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def base(seed: int = 7) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.config.use_cache = False
    return model


class Adapted(LightningModule):
    """A Llama whose base is frozen.

    Args:
        seed: Of the base.
        options: Of ``LoraConfig``.
    """

    def __init__(self, *, seed: int = 7, **options: Any) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        config = LoraConfig(
            r=4, lora_alpha=8, task_type="CAUSAL_LM", **{"target_modules": "all-linear"} | options
        )
        model = base(seed)
        torch.manual_seed(11)
        self.model = get_peft_model(model, config)
        # B starts at zero, and a step of A would change nothing.
        for name, each in self.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(each, std=0.02)
        self.losses: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)


def fit(
    module: LightningModule,
    strategy: Any,
    *,
    share: int = 0,
    shares: int = 1,
    devices: int = 1,
    max_steps: int = STEPS,
    max_epochs: int = -1,
    ckpt_path: str | None = None,
    **options: Any,
) -> Trainer:
    """Train, and validate after every second batch."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=max_steps,
        max_epochs=max_epochs, use_distributed_sampler=False, num_sanity_val_steps=0,
        val_check_interval=2,
        **{**QUIET, **options},
    )  # fmt: skip
    size = BATCH // shares
    loaders = [DataLoader(Sentences(share, shares), batch_size=size) for _ in range(2)]
    trainer.fit(module, loaders[0], loaders[1], ckpt_path=ckpt_path)
    return trainer


def fit_under(
    name: str, module: LightningModule, rank: int, world_size: int, *, keywords: Any = None,
    **options: Any,
) -> Trainer:  # fmt: skip
    """Train under a strategy by its name in ``STRATEGIES``."""
    make, ranks, has_own_batches = STRATEGIES[name]
    assert ranks == world_size
    strategy = make(telemetry=False, **(keywords or {}))
    shares = 2 if has_own_batches else 1
    return fit(module, strategy, share=rank % shares, shares=shares, devices=world_size, **options)


def whole(module: LightningModule) -> dict[str, Tensor]:
    """Return all parameters whole. Collective."""
    with gathered_parameters(module) as gathered:
        return {name: each.detach().clone() for name, each in gathered.items()}


def largest_difference(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert mine.keys() == other.keys()
    return max((mine[name] - other[name]).abs().max().item() for name in mine)

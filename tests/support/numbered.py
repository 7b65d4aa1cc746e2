"""Models of Hugging Face that keep keys and values by the numbers of their layers, as they come."""

from random import Random
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

STEPS = 3

Settings = dict[str, Any]

ALL_NUMBERS: Settings = {
    "kind": "Llama", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 7,
}  # fmt: skip
"""Layer 2 has the number of key heads, layer 4 that of heads, layer 6 that of channels of one."""


def drawn(seed: int) -> Settings:
    """Settings of a small model, by a seed."""
    random = Random(seed)
    key_heads = random.choice([1, 2, 2, 3, 4, 8])
    heads = key_heads * random.choice([1, 2, 3])
    channels = random.choice([2, 4, 6, 8])
    return {
        "kind": random.choice(["Llama", "Qwen2", "Mistral"]),
        "vocab_size": random.randint(20, 50),
        "hidden_size": heads * channels,
        "head_dim": channels,
        "intermediate_size": random.choice([2, 3, 4, 8]) * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": random.randint(2, 9),
    }


class Numbered(LightningModule):
    """A causal language model that gives its own loss; its cache is used where it would be."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        import transformers

        known = dict(settings)
        kind = known.pop("kind")
        known.pop("padded", None)
        known.pop("length", None)
        recomputes = known.pop("recomputes", False)
        config = getattr(transformers, f"{kind}Config")(**known)
        self.net = getattr(transformers, f"{kind}ForCausalLM")(config).train()
        if recomputes:
            self.net.activation_checkpointing_enable()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch, labels=batch["input_ids"]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Losses(Callback):
    """Keeps the loss of every batch that is trained with."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.kept.append(float(outputs["loss"]))


def batches(settings: Settings) -> list[dict[str, Tensor]]:
    """Texts of the same length, for every rank alike; those that are ``padded`` have a mask."""
    generator = torch.Generator().manual_seed(1)
    length = settings.get("length", 9)
    shape = (STEPS, 4, length)
    texts = torch.randint(0, settings["vocab_size"], shape, generator=generator)
    mask = torch.ones(4, length, dtype=torch.long)
    mask[0, 6:] = mask[2, 3:] = 0
    padded = settings.get("padded", [False] * STEPS)
    return [
        {"input_ids": text, **({"attention_mask": mask} if has_mask else {})}
        for text, has_mask in zip(texts, padded, strict=True)
    ]


def by_a_plain_loop(settings: Settings) -> list[float]:
    """Losses of a model that is trained by nothing but torch."""
    seed_everything(3, verbose=False)
    module: Any = Numbered(settings)
    optimizer = module.configure_optimizers()
    losses = []
    for batch in batches(settings):
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_a_strategy(settings: Settings, strategy: Any, world_size: int) -> list[float]:
    """Losses of a model that is trained by a strategy, all data ranks with the same batches."""
    seed_everything(3, verbose=False)
    losses = Losses()
    Trainer(
        strategy=strategy, accelerator="cpu", devices=world_size, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[losses],
    ).fit(Numbered(settings), DataLoader(batches(settings), batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    return losses.kept

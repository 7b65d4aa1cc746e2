"""Families of models for plans to divide over 2 and 4 ranks, and batches that make it hard."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.tensor_models import BY_HAND, VOCABULARY, example, hugging_face

STEPS, ROWS, LENGTHS = 5, 4, (12, 9, 13)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT, fused q, k, v": ("gpt_fused", {}),
    "GPT, separate q, k, v": ("gpt_separate", {}),
    "GPT, nn.MultiheadAttention": ("gpt_torch_attention", {}),
    "Llama": ("llama", {"num_attention_heads": 8, "head_dim": 16, "num_key_value_heads": 4}),
    "Qwen 2": ("qwen2", {}),
    "Mistral": ("mistral", {"num_key_value_heads": 4}),
    "Gemma": ("gemma", {"num_key_value_heads": 4}),
    "GPT-2": ("gpt2", {}),
    "BERT": ("bert", {}),
    "T5": ("t5", {"is_gated_act": True, "dense_act_fn": "gelu_new"}),
    "ViT": ("vit", {}),
    "Mixtral": ("mixtral", {"num_key_value_heads": 4}),
}
"""By name: that of ``tensor_models.py``, and what is set otherwise.

Qwen has two heads of keys. T5 is version 1.1: in the first one, a rounding tips a ReLU within five
steps, and its gradient with it.
"""


def has_tokens(name: str) -> bool:
    """Whether a family's loss is over tokens."""
    return FAMILIES[name][0] != "vit"


class Family(LightningModule):
    """A model that gives its own loss, or an output that has one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind, settings = FAMILIES[name]
        if kind in BY_HAND:
            self.model = example(kind).module
        else:
            self.model = hugging_face(kind, **settings).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output: Any = self.model(**batch)
        loss: Tensor = getattr(output, "loss", output)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def family_data(name: str) -> DataLoader[Any]:
    """Texts of changing, odd lengths, with padding that counts for nothing; or images.

    The last batch has a row less.
    """
    generator = torch.Generator().manual_seed(0)
    kind, _ = FAMILIES[name]
    made: list[dict[str, Tensor]] = []
    for number in range(STEPS):
        rows = ROWS - (number == STEPS - 1)
        if not has_tokens(name):
            images = torch.randn(rows, 3, 16, 16, generator=generator)
            labels = torch.randint(0, 5, (rows,), generator=generator)
            made.append({"pixel_values": images, "labels": labels})
            continue
        length = LENGTHS[number % len(LENGTHS)]
        tokens = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
        lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        labels = tokens.masked_fill(mask == 0, -100)
        if kind in BY_HAND:
            made.append({"tokens": tokens, "labels": labels})
        else:
            made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset

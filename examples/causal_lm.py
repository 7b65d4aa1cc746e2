"""A causal language model of Hugging Face transformers, as a plain LightningModule.

    python examples/causal_lm.py                 in one process, about a minute on a CPU
    boltmesh fit pipeline_hf devices=2           the same class, unchanged, in a pipeline of two

Needs transformers: ``pip install -c constraints.txt -e ".[transformers]"``.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


class CausalLM(LightningModule):
    """Any architecture that ``AutoModelForCausalLM`` knows, pretrained or with random weights.

    Args:
        architecture: Such as ``llama``, ``qwen2``, ``mistral`` or ``gpt2``; not used if
            ``pretrained`` is given.
        config: Changes to the architecture's own configuration: its sizes, for example.
        pretrained: A model of the Hub, or a folder, whose weights are loaded.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
    """

    def __init__(
        self,
        architecture: str = "llama",
        config: dict[str, Any] | None = None,
        pretrained: str | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if pretrained is not None:
            self.model = AutoModelForCausalLM.from_pretrained(pretrained, **(config or {}))
        else:
            chosen = AutoConfig.for_model(architecture, **(config or {}))
            self.model = AutoModelForCausalLM.from_config(chosen)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, _ = batch  # (B, T); the model shifts its labels itself
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, _ = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(),
            lr=self.hparams["learning_rate"],
            weight_decay=self.hparams["weight_decay"],
        )


if __name__ == "__main__":
    from text import TextData

    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    seed_everything(0)
    Trainer(max_steps=200, limit_val_batches=50).fit(CausalLM(config=sizes), TextData())

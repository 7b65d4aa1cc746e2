"""A module that generates text with Hugging Face's ``generate``, in steps and in hooks.

``generated`` trains it for two optimizer steps under a strategy and returns the tokens of each
batch of prompts, to be compared with those of one process.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

WORDS = 31
PAD, END = 0, 1
Tokens = dict[tuple[str, str, int], list[list[int]]]
"""By place, way of generating and number of the batch of prompts."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 9, "temperature": 1.5},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}
"""How ``generate`` is called."""

PLACES = (
    "predict_step",
    "predict alone",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)


def causal_model(family: str) -> Any:
    """Return a tiny random model that ends some texts early."""
    import transformers as hf

    ids = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": END}
    if family == "gpt2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64}
        config: Any = hf.GPT2Config(**ids, **rates, **sizes, initializer_range=0.3)
        return hf.GPT2LMHeadModel(config)
    widths = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    if family == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**ids, **widths, num_local_experts=4))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**ids, **widths, tie_word_embeddings=False))


class Prompts(Dataset[dict[str, Any]]):
    """Batches of prompts of different lengths, padded on the left."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 + number)
        length = 4 + number % 3
        tokens = torch.randint(2, WORDS, (2, length), generator=generator)
        mask = torch.ones_like(tokens)
        if number % 2:
            mask[0, : 1 + number % 3] = 0
        return {
            "number": number,
            "input_ids": tokens.masked_fill(mask == 0, PAD),
            "attention_mask": mask,
        }


class Texts(Dataset[Tensor]):
    """To train on."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Tensor:
        return torch.randint(2, WORDS, (8,), generator=torch.Generator().manual_seed(number))


class Generating(LightningModule):
    """Trains a causal model and generates where it is told to."""

    def __init__(self, family: str, ways: list[str], place: str) -> None:
        super().__init__()
        self.net = causal_model(family)
        self.ways, self.place = ways, place
        self.tokens: Tokens = {}
        self.batches: list[Any] = []

    def generate_all(self, place: str) -> None:
        """Generate from what the validation has seen on this rank."""
        for batch in self.batches:
            self.generate(place, batch)

    def generate(self, place: str, batch: Mapping[str, Any]) -> None:
        """Generate from a batch of prompts in all ways."""
        for way in self.ways:
            number = int(batch["number"])
            # Ranks stop at different lengths, and in steps they may differ in their calls.
            for _ in range(1 + number % 2 if not place.startswith("on_") else 1):
                torch.manual_seed(7 + number)
                made = self.net.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=4 + number % 3,
                    **WAYS[way],
                )
            self.tokens[place, way, number] = made.tolist()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def on_validation_epoch_start(self) -> None:
        self.batches.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        if self.place == "validation_step":
            self.generate("validation_step", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        self.generate(self.place, batch)
        return int(batch["number"])

    def on_validation_epoch_end(self) -> None:
        if self.place == "on_validation_epoch_end":
            self.generate_all("on_validation_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writer(Callback):
    """Shows what the model writes so far."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.place == "on_train_epoch_end":
            pl_module.generate_all("on_train_epoch_end")


def generated(
    family: str, ways: list[str], place: str, strategy: Any, *, replicas: int = 1, prompts: int = 3
) -> Tokens:
    """Train for two steps, generate, and return this rank's tokens.

    Args:
        family: Of ``causal_model``.
        ways: Keys of ``WAYS``.
        place: Of ``PLACES``.
        strategy: Of the Trainer.
        replicas: Data ranks, which get different texts and prompts; 1 in one process.
        prompts: Batches of prompts over all ranks.
    """
    torch.manual_seed(0)
    module = Generating(family, ways, place)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Writer()],
    )
    texts = DataLoader(Texts(), batch_size=len(Texts()) // replicas)
    loader = DataLoader(Prompts(prompts), batch_size=None)
    if place != "predict alone":
        trainer.fit(module, texts, loader)
    if place.startswith("predict"):
        trainer.predict(module, loader)
    return module.tokens

"""Tiny random models of Hugging Face, each with its own loss, in a LightningModule."""

from typing import Any

import torch
from lightning.pytorch import LightningModule

WORDS = 31


class HuggingFace(LightningModule):
    """Hands the batch to the model and takes its loss, as scripts do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = make(kind)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch).loss


def make(kind: str) -> Any:
    """A model of that kind, with six layers or three and three."""
    import transformers as hf

    small = {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 2}
    if kind == "llama":
        config = hf.LlamaConfig(
            **small, intermediate_size=24, num_hidden_layers=6, num_key_value_heads=1
        )
        return hf.LlamaForCausalLM(config)
    if kind.startswith("gpt2"):
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=WORDS,
                n_embd=16,
                n_layer=6,
                n_head=2,
                n_positions=16,
                tie_word_embeddings=kind == "gpt2_tied",
                **rates,
            )
        )
    if kind == "bert":
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForMaskedLM(
            hf.BertConfig(**small, num_hidden_layers=6, intermediate_size=24, **rates)
        )
    if kind == "t5":
        config = hf.T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        return hf.T5ForConditionalGeneration(config)
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


def batches(kind: str) -> list[dict[str, Any]]:
    """Three batches: one with padding, one without, one of another length."""
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        return [
            {
                "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator),
                "labels": torch.randint(0, 3, (rows,), generator=generator),
            }
            for rows in (3, 3, 2)
        ]
    made = []
    for rows, length, padding in ((3, 8, 3), (3, 8, 0), (2, 5, 1)):
        tokens = torch.randint(1, WORDS, (rows, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, length - padding :] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return made

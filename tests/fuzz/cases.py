"""Random configurations of families of Hugging Face: a model and its batches, by a seed."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor

STEPS = 3
RATE = 0.3
ROWS = 4

DECODERS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
    "stablelm", "starcoder2", "olmo", "olmo2", "cohere", "granite", "glm", "helium", "smollm3",
    "ernie4_5",
    "nemotron", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe",
)  # fmt: skip
"""Decoders with the names of Llama's sizes, some of them mixtures of experts."""

OTHERS = (
    "gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "mpt", "codegen", "biogpt",
    "bert", "roberta", "electra", "distilbert", "albert", "t5", "bart",
)  # fmt: skip

FAMILIES = DECODERS + OTHERS
MASKED = {"bert", "roberta", "electra", "distilbert", "albert"}
TRANSLATING = {"t5", "bart"}


@dataclass(frozen=True)
class Case:
    """A model and its batches."""

    seed: int
    family: str
    sizes: dict[str, Any]
    """Keys of the configuration."""
    padded: tuple[bool, ...]
    """Whether a batch has a padding mask."""
    length: int = 8
    is_double: bool = False

    def __str__(self) -> str:
        sizes = ", ".join(f"{key}={value}" for key, value in self.sizes.items())
        padded = "".join("m" if each else "-" for each in self.padded)
        return f"{self.seed} {self.family}({sizes}) length={self.length} masks={padded}"


def drawn(seed: int) -> Case:
    """Return the case of a seed."""
    random = Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    heads, key_heads, channels = _heads(random)
    if "mo" in family or family in {
        "mixtral",
        "phi",
    }:  # grouped products; half of each head rotates
        channels = random.choice([4, 8])
    sizes = {
        "vocab_size": random.randint(20, 50),
        "layers": random.randint(2, 9),
        "heads": heads,
        "key_heads": key_heads,
        "channels": channels,
        "inner": random.choice([2, 3, 4, 8]) * heads,
    }
    padded = tuple(random.random() < 0.4 for _ in range(STEPS))
    return Case(seed, family, _named(family, sizes, random), padded, 2 * random.randint(3, 6))


def _heads(random: Random) -> tuple[int, int, int]:
    key_heads = random.choice([1, 2, 2, 3, 4, 8])
    heads = key_heads * random.choice([1, 2, 3])
    return heads, key_heads, random.choice([2, 4, 6, 8])


def _named(family: str, sizes: dict[str, int], random: Random) -> dict[str, Any]:
    """Return the sizes under the names of a family."""
    heads, layers, inner = sizes["heads"], sizes["layers"], sizes["inner"]
    width = heads * sizes["channels"]
    common = {"vocab_size": sizes["vocab_size"]}
    if family in DECODERS:
        named = {
            **common,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": sizes["key_heads"],
            "head_dim": sizes["channels"],
            "max_position_embeddings": 32,
            "tie_word_embeddings": random.random() < 0.5,
        }
        if "mo" in family or family == "mixtral":
            experts = random.choice([2, 3, 4])
            named |= dict.fromkeys(("num_local_experts", "num_experts"), experts)
            named |= {"num_experts_per_tok": random.randint(1, 2), "decoder_sparse_step": 1}
            inner_keys = ("intermediate_size", "moe_intermediate_size")
            named |= dict.fromkeys((*inner_keys, "shared_expert_intermediate_size"), 4 * inner)
        return named
    if family in {"gpt2", "gptj", "codegen"}:
        named = {**common, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 32}
        if family == "codegen":  # its projection has four parts, whatever the heads
            named |= {"n_head": 4 * heads, "n_embd": 4 * width}
        return named if family == "gpt2" else {**named, "rotary_dim": 2}
    if family == "bloom":
        return {**common, "hidden_size": width, "n_layer": layers, "n_head": heads}
    if family == "mpt":
        heads = 1 << heads.bit_length() % 4
        return {**common, "d_model": heads * 4, "n_layers": layers, "n_heads": heads,
                "max_seq_len": 32}  # fmt: skip
    if family == "falcon":
        new = random.random() < 0.5
        return {**common, "hidden_size": width, "num_hidden_layers": layers,
                "num_attention_heads": heads, "new_decoder_architecture": new,
                "num_kv_heads": sizes["key_heads"], "multi_query": not new}  # fmt: skip
    if family == "opt":
        return {**common, "hidden_size": width, "ffn_dim": inner, "num_hidden_layers": layers,
                "num_attention_heads": heads, "word_embed_proj_dim": width,
                "max_position_embeddings": 32}  # fmt: skip
    if family == "distilbert":
        return {**common, "dim": width, "hidden_dim": inner, "n_layers": layers, "n_heads": heads,
                "max_position_embeddings": 32}  # fmt: skip
    if family == "t5":
        return {**common, "d_model": width, "d_kv": sizes["channels"], "d_ff": inner,
                "num_layers": layers, "num_decoder_layers": random.randint(2, 5),
                "num_heads": heads}  # fmt: skip
    if family == "bart":
        return {**common, "d_model": width, "encoder_layers": layers, "decoder_layers": layers,
                "encoder_attention_heads": heads, "decoder_attention_heads": heads,
                "encoder_ffn_dim": inner, "decoder_ffn_dim": inner,
                "max_position_embeddings": 32}  # fmt: skip
    named = {**common, "hidden_size": width, "intermediate_size": inner,
             "num_hidden_layers": layers, "num_attention_heads": heads,
             "max_position_embeddings": 40}  # fmt: skip
    return {**named, "embedding_size": 12} if family in {"electra", "albert"} else named


def model_of(case: Case) -> Any:
    """Build the model of a case, in training mode, without dropout."""
    import transformers as hf

    kind = hf.CONFIG_MAPPING[case.family]
    known = kind().to_dict()
    rates = {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float)}
    tokens = {key: 1 for key in ("bos_token_id", "eos_token_id", "forced_eos_token_id")
              if key in known}  # fmt: skip
    sizes = {
        key: value
        for key, value in case.sizes.items()
        if key in known or key in kind.attribute_map or key in {"head_dim", "num_key_value_heads"}
    }
    config = kind(**{**rates, **tokens, "pad_token_id": 0, **sizes})
    config.decoder_start_token_id = 1
    automatic = hf.AutoModelForCausalLM
    if case.family in MASKED:
        automatic = hf.AutoModelForMaskedLM
    elif case.family in TRANSLATING:
        automatic = hf.AutoModelForSeq2SeqLM
    return automatic.from_config(config).float().train()


class Module(LightningModule):
    """Takes the model's own loss, as scripts do."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        seed_everything(case.seed, verbose=False)
        self.net = model_of(case).to(torch.float64 if case.is_double else torch.float32)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def batches(case: Case) -> list[dict[str, Tensor]]:
    """Return the batches of a case: texts, and masks in some of them."""
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    for is_padded in case.padded:
        shape = (ROWS, case.length)
        texts = torch.randint(2, case.sizes["vocab_size"], shape, generator=generator)
        batch = {"input_ids": texts, "labels": texts.clone()}
        if is_padded:
            lengths = torch.randint(2, case.length + 1, (ROWS, 1), generator=generator)
            mask = (torch.arange(case.length) < lengths).long()
            batch["attention_mask"] = mask
            batch["labels"][mask == 0] = -100
        found.append(batch)
    return found


def by_a_plain_loop(case: Case) -> list[float]:
    """Return the losses of a model that is trained by nothing but torch."""
    module = Module(case)
    optimizer = module.configure_optimizers()
    losses = []
    for batch in batches(case):
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

"""Causal language models of Hugging Face that ship a tensor plan, tiny, with random weights."""

from typing import Any

import torch
from torch.nn import Module
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "ffn_hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "intermediate_size_mlp": 64,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "sliding_window": 8,
    "first_k_dense_replace": 1,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
"""What a configuration that has such a key is given."""

OPTIONAL = {"q_lora_rank", "sliding_window", "num_experts", "num_local_experts"}
"""Keys whose None switches something off."""

SHIPPED = tuple(
    sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
    )
)
"""The architectures that have a tensor plan of Hugging Face's own."""


def build(name: str, seed: int = 0) -> Module:
    """Make a model with random weights, in training mode.

    Raises:
        Exception: Whatever the architecture raises at these sizes.
    """
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(_config(name)).float().train()


def _config(name: str) -> Any:
    whole = CONFIG_MAPPING[name]()
    known = whole.to_dict()
    chosen = {
        key: value
        for key, value in SIZES.items()
        if key in known and not (key in OPTIONAL and known[key] is None)
    }
    if known.get("kv_lora_rank"):  # latent attention: heads do not share keys
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    layers = chosen.get("num_hidden_layers", 2)
    for key, value in known.items():
        if isinstance(value, list) and len(value) == known.get("num_hidden_layers"):
            chosen[key] = _both_kinds(value, layers)
    return CONFIG_MAPPING[name](**chosen)


def _both_kinds(values: list[Any], count: int) -> list[Any]:
    """As many entries, with the first of each kind that a model of all its layers has."""
    kinds: list[Any] = []
    for each in values:
        if each not in kinds:
            kinds.append(each)
    return (kinds + values)[:count]

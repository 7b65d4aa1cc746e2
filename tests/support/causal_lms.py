"""Language models of Hugging Face, tiny, with random weights."""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, functional
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

SIZES: dict[str, Any] = {
    "vocab_size": 112,
    "vocab_size_per_layer_input": 112,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 12,
    "ffn_hidden_size": 96,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "intermediate_size_mlp": 96,
    "shared_expert_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "dense_intermediate_size": 96,
    "expert_ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "max_position_embeddings": 128,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": 10,
    # Mixtures of experts.
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "zero_expert_num": 2,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    # Latent attention, and what chooses tokens for it.
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_topk": 10,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    # Linear attention and state spaces.
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_chunk_size": 8,
    "ssm_state_size": 12,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    # Tables and mixers of single families.
    "laurel_rank": 8,
    "rel_extent": 24,
    "num_kv_shared_layers": 0,
    "hc_lowrank": 12,
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 97,
    "heads_per_ngram": 2,
    "split_ngram_parts": 2,
    # Towers for pictures and sounds.
    "image_size": 28,
    "crop_size": 28,
    "num_blocks": 2,
    "ext_pw_out_channel": 64,
    "depthwise_separable_out_channel": 64,
    "nemo_conv_channels": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
"""What a configuration that has such a key is given: sizes that differ from one another, so that an
axis is not taken for another one by its length, as it would not be at the sizes that are trained.
"""

KINDS: dict[str, list[str]] = {"lfm2_moe": ["conv", "full_attention"]}
"""The kinds of layers where a configuration leaves them to its checkpoints."""

ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
"""Of each kind of layers, where a configuration leaves that to its checkpoints."""

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


def has_head(name: str) -> bool:
    """Whether an architecture has a causal language model."""
    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


CHANGES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2
        },
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 20],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]
        },
    },
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24
    },
    "diffusion_gemma_text": {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
        },
    },
    "glm5_next_text": {"index_kpool": 2, "qk_rope_head_dim": 0},
    "nllb-moe": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
    "step3p7": {"sliding_window": 10},
    "switch_transformers": {
        "d_model": 64, "d_kv": 16, "d_ff": 48, "num_heads": 4, "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 12,
        "router_jitter_noise": 0.0, "decoder_start_token_id": 0,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What single families need beside the sizes that all are given."""


class Headed(Module):
    """A decoder without a language model's head, with its embeddings as one."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """Return the loss of next tokens."""
        hidden = self.decoder(input_ids=input_ids).last_hidden_state
        table: nn.Embedding = self.decoder.get_input_embeddings()
        logits = functional.linear(hidden[:, :-1], table.weight)
        return SimpleNamespace(
            loss=functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        )


def build_decoder(name: str, seed: int = 0) -> Module:
    """Make the text part of a family that has no causal language model, as ``build`` does.

    Encoder-decoders are whole language models.
    """
    torch.manual_seed(seed)
    config = _config(name)
    if name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForSeq2SeqLM.from_config(config).float().train()
    modeling = type(config).__module__.replace("configuration_", "modeling_")
    __import__(modeling)
    kinds: list[Any] = [
        each
        for key, each in vars(sys.modules[modeling]).items()
        if key.endswith("Model") and isinstance(each, type) and issubclass(each, PreTrainedModel)
    ]
    decoder = next(
        each for each in kinds if each.config_class is type(config) and "forward" in vars(each)
    )
    return Headed(decoder(config).float().train())


def _config(name: str) -> Any:
    kind = CONFIG_MAPPING[name]
    if name == "step3p7":
        kind = kind.sub_configs["text_config"]
    return _shrunk(kind, CHANGES.get(name, {}))


def _shrunk(kind: Any, changes: dict[str, Any] | None = None) -> Any:
    """Make a tiny configuration of a class."""
    whole = kind()
    known = _keys(whole)
    chosen = _sizes(known)
    by_layer = {
        key: value
        for key, value in known.items()
        if isinstance(value, list)
        and len(value) == known.get("num_hidden_layers")
        and value != list(range(len(value)))  # which are numbers of layers
    }
    if whole.model_type in KINDS:
        by_layer["layer_types"] = KINDS[whole.model_type]
    layers = 1 + max([2, *(len(_different(each)) for each in by_layer.values())])
    for key, value in by_layer.items():
        chosen[key] = (
            [SIZES[key]] * layers if key in SIZES else (_different(value) * layers)[:layers]
        )
    for key in {"num_hidden_layers", "num_layers"} & known.keys():
        chosen[key] = layers
    if known.get("rope_parameters") == {} and "layer_types" in chosen:
        chosen["rope_parameters"] = {each: dict(ROTARY) for each in chosen["layer_types"]}
    for key in whole.sub_configs:
        if getattr(whole, key, None) is not None:
            chosen[key] = _shrunk(type(getattr(whole, key)))
    chosen |= changes or {}
    return kind(**_with_inner_sizes(kind(**chosen).to_dict(), chosen))


def _keys(config: Any) -> dict[str, Any]:
    """What a configuration has, by all names that it knows it by."""
    known: dict[str, Any] = config.to_dict()
    return {**known, **{key: known.get(name) for key, name in config.attribute_map.items()}}


def _sizes(known: dict[str, Any]) -> dict[str, Any]:
    chosen = {
        key: value
        for key, value in SIZES.items()
        if key in known and not (key in OPTIONAL and known[key] is None)
    }
    # Masks are drawn for what a rank has, so they differ from those of one process on purpose.
    chosen |= {
        key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float)
    }
    if known.get("kv_lora_rank"):  # latent attention: heads do not share keys
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
        rotated, other = "qk_rope_head_dim", "qk_nope_head_dim"
        if known.get("head_dim") == known[rotated]:
            chosen["head_dim"] = SIZES[rotated]
        elif known.get("head_dim") == known[rotated] + known[other]:
            chosen["head_dim"] = SIZES[rotated] + SIZES[other]
    return chosen


def _with_inner_sizes(known: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """Add what a configuration works out for single layers, with sizes of its own."""
    for key, value in known.items():
        if isinstance(value, dict) and key not in chosen:
            inner = {
                name: {**each, **_sizes(each)} if isinstance(each, dict) else each
                for name, each in value.items()
            }
            if inner != value:
                chosen = {**chosen, key: inner}
    return chosen


def _different(values: list[Any]) -> list[Any]:
    """The first of each kind."""
    kinds: list[Any] = []
    for each in values:
        if each not in kinds:
            kinds.append(each)
    return kinds

"""transformers and peft: models whose loss is their own."""

from typing import Any

import torch

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["transformers.models.llama.modeling_llama", "peft"]

WORDS, LENGTH = 40, 10


def text(number: int) -> Any:
    words = integers(number, WORDS - 2, ROWS, LENGTH) + 2
    return {"input_ids": words, "labels": words.clone()}


def own_loss(net: Any, batch: Any) -> Any:
    return net(**batch).loss


def causal(family: str, **options: Any) -> Any:
    import transformers

    config = transformers.CONFIG_MAPPING[family](
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=1, **options,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).float()


def lora() -> Any:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0,
                             init_lora_weights=False)  # fmt: skip
    return Trained(peft.get_peft_model(causal("llama"), config), own_loss)


def ia3() -> Any:
    import peft

    config = peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    return Trained(peft.get_peft_model(causal("qwen2"), config), own_loss)


def segformer() -> Any:
    import transformers

    config = transformers.SegformerConfig(
        num_labels=3, depths=[2, 2], hidden_sizes=[8, 16], num_encoder_blocks=2,
        num_attention_heads=[1, 2], decoder_hidden_size=8, sr_ratios=[2, 1], patch_sizes=[3, 3],
        strides=[2, 2], mlp_ratios=[2, 2], hidden_dropout_prob=0.0, drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    return Trained(transformers.SegformerForSemanticSegmentation(config), own_loss)


def masks(number: int) -> Any:
    return {
        "pixel_values": normal(number, ROWS, 3, 16, 16),
        "labels": integers(number, 3, ROWS, 16, 16),
    }


def whisper() -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8,
        max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=1, decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip
    return Trained(transformers.WhisperForConditionalGeneration(config), own_loss)


def speech(number: int) -> Any:
    return {"input_features": normal(number, ROWS, 8, 20), "labels": text(number)["labels"]}


def clip() -> Any:
    import transformers

    side = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(
        text_config=side | {"vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 1,
                            "bos_token_id": 0, "pad_token_id": 1},
        vision_config=side | {"image_size": 16, "patch_size": 8}, projection_dim=12,
    )  # fmt: skip
    net = transformers.CLIPModel(config)
    return Trained(net, lambda net, batch: net(**batch, return_loss=True).loss)


def pairs(number: int) -> Any:
    return {"input_ids": text(number)["input_ids"], "pixel_values": normal(number, ROWS, 3, 16, 16)}


def translator(family: str, layers: int = 2, **options: Any) -> Any:
    import transformers

    config = transformers.CONFIG_MAPPING[family](
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=layers,
        num_decoder_layers=layers, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0,
        **options,
    )  # fmt: skip
    return Trained(transformers.AutoModelForSeq2SeqLM.from_config(config), own_loss)


def switch() -> Any:
    return translator(
        "switch_transformers", layers=4, num_experts=4, router_jitter_noise=0.0,
        encoder_sparse_step=2, decoder_sparse_step=2, num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
    )  # fmt: skip


def nllb_moe() -> Any:
    import transformers

    config = transformers.NllbMoeConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=4, decoder_layers=4, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2, num_experts=4,
        encoder_sparse_step=2, decoder_sparse_step=2, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
        moe_token_dropout=0.0, router_jitter_noise=0.0,
    )  # fmt: skip
    return Trained(transformers.NllbMoeForConditionalGeneration(config), own_loss)


def squeezebert() -> Any:
    import transformers

    config = transformers.SqueezeBertConfig(
        vocab_size=WORDS, hidden_size=16, embedding_size=16, intermediate_size=24,
        num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Trained(transformers.SqueezeBertForMaskedLM(config), own_loss)


def padded(number: int) -> Any:
    """Every second batch has a mask: without padding, transformers leaves it out."""
    batch = text(number)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -3:] = number % 2
    return batch | {"attention_mask": mask}


DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip

GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}

JETMOE = {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}

QWEN_NEXT = {
    "head_dim": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


ENTRIES = [
    Entry(
        "transformers LlamaForCausalLM",
        lambda: Trained(causal("llama"), own_loss, lambda found: torch.optim.AdamW(found, lr=1e-3)),
        text,
        in_context=True,
    ),
    Entry(
        "transformers Gemma3ForCausalLM",
        lambda: Trained(causal("gemma3_text", head_dim=8, sliding_window=4), own_loss),
        text,
        in_context=True,
    ),
    Entry("transformers ModernBertForMaskedLM", lambda: Trained(_modern_bert(), own_loss), text),
    Entry("transformers SegformerForSemanticSegmentation", segformer, masks, microbatches=1),
    Entry("transformers WhisperForConditionalGeneration", whisper, speech),
    Entry("transformers CLIPModel", clip, pairs),
    Entry(
        "transformers T5ForConditionalGeneration, masks in some batches",
        lambda: translator("t5"),
        padded,
    ),
    Entry("transformers SwitchTransformersForConditionalGeneration", switch, text, has_unused=True),
    Entry("transformers NllbMoeForConditionalGeneration", nllb_moe, text, has_unused=True),
    Entry("transformers SqueezeBertForMaskedLM", squeezebert, text, has_unused=True),
    Entry(
        "transformers DeepseekV3ForCausalLM",
        lambda: Trained(causal("deepseek_v3", **DEEPSEEK), own_loss),
        text,
    ),
    Entry(
        "transformers GptOssForCausalLM",
        lambda: Trained(causal("gpt_oss", **GPT_OSS), own_loss),
        text,
    ),
    Entry(
        "transformers JetMoeForCausalLM",
        lambda: Trained(causal("jetmoe", **JETMOE), own_loss),
        text,
    ),
    Entry(
        "transformers Qwen3NextForCausalLM",
        lambda: Trained(causal("qwen3_next", **QWEN_NEXT), own_loss),
        text,
    ),
    Entry("peft LoRA on Llama", lora, text),
    Entry("peft IA3 on Qwen2", ia3, text),
]


def _modern_bert() -> Any:
    import transformers

    config = transformers.ModernBertConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1, cls_token_id=1,
        sep_token_id=1, local_attention=4, global_attn_every_n_layers=2, reference_compile=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config)

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

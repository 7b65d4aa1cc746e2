"""Sizes of transformers, by name, in words and in configurations of Hugging Face."""

import json
from pathlib import Path

import pytest

from boltmesh.planner.transformer import KNOWN, transformer_named


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("llama3-8b", 8.03e9),
        ("meta-llama/Llama-3.1-70B-Instruct", 70.6e9),
        ("llama3-405b", 405.9e9),
        ("gpt3-175b", 174.6e9),
        ("layers=70 hidden=14336 heads=112 ffn=57344 vocab=250880 seq=2048 tied=1", 176.2e9),
    ],
)
def test_sizes_give_the_published_number_of_parameters(text: str, numel: float) -> None:
    assert transformer_named(text).numel == pytest.approx(numel, rel=0.01)


def test_a_configuration_of_hugging_face_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({
            "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
            "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False,
        }, indent="\t")
    )  # fmt: skip
    assert transformer_named(str(tmp_path)) == KNOWN["llama3-8b"]


def hugging_face(
    layers: int, hidden: int, ffn: int, vocab: int, **more: object
) -> dict[str, object]:
    """Return the part of a published ``config.json`` that has the sizes."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "vocab_size": vocab, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 8192, "tie_word_embeddings": False, **more,
    }  # fmt: skip


GEMMA = {"model_type": "gemma", "hidden_act": "gelu", "head_dim": 256, "tie_word_embeddings": None}


@pytest.mark.parametrize(
    ("table", "numel"),
    [
        (
            hugging_face(28, 3072, 24576, 256000, num_attention_heads=16)
            | {**GEMMA, "num_key_value_heads": 16},
            8.54e9,
        ),
        (
            hugging_face(18, 2048, 16384, 256000, num_attention_heads=8)
            | {**GEMMA, "num_key_value_heads": 1},
            2.51e9,
        ),
        (hugging_face(40, 5120, 14336, 131072, num_attention_heads=32), 12.2e9),
        (hugging_face(36, 4096, 12288, 151936, num_attention_heads=32), 8.19e9),
        (hugging_face(64, 5120, 25600, 151936, num_attention_heads=64), 32.8e9),
        (
            {
                "model_type": "gemma3",
                "text_config": hugging_face(48, 3840, 15360, 262208, num_attention_heads=16)
                | {**GEMMA, "model_type": "gemma3_text"},
            },
            11.8e9,
        ),
    ],
    ids=["gemma-7b", "gemma-2b", "mistral-nemo", "qwen3-8b", "qwen3-32b", "gemma-3-12b"],
)
def test_configurations_with_a_width_of_heads_have_the_published_number_of_parameters(
    table: dict[str, object], numel: float, tmp_path: Path
) -> None:
    given = {key: each for key, each in table.items() if each is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert transformer_named(str(tmp_path)).numel == pytest.approx(numel, rel=0.01)

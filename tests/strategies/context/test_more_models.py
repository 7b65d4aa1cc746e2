"""Models of transformers that no rule was written for, with their sequence divided."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from tests.support.context_models import SMALL, HuggingFace, causal_lm
from tests.support.context_runs import compare_model
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow(20)]


def texts(length: int, **more: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(1, 61, (2, length))
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": ids, "labels": labels, **more}


class Encoder(nn.Module):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.layers(self.embed(batch["input_ids"])))
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def packed() -> tuple[nn.Module, dict[str, Tensor]]:
    """Three documents in one row, by positions that begin again."""
    places = torch.cat([torch.arange(9), torch.arange(11), torch.arange(4)]).expand(2, -1)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return causal_lm(config), texts(24, position_ids=places)


def mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    )
    return causal_lm(config), texts(24)


def opt() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    return causal_lm(transformers.OPTConfig(**sizes)), texts(24)


def bloom() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    return causal_lm(config, "eager"), texts(24)


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(1, 61, (2, 24)), "labels": torch.randint(1, 61, (2, 12))}
    return HuggingFace(transformers.T5ForConditionalGeneration(config)), batch


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=24, max_target_positions=24, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, dropout=0.0, use_cache=False,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 48), "labels": torch.randint(4, 61, (2, 13))}
    return HuggingFace(transformers.WhisperForConditionalGeneration(config)), batch


def qwen3() -> tuple[nn.Module, dict[str, Tensor]]:
    """All labels but those of the last four positions are -100: they fall on one rank."""
    config = transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)
    batch = texts(25)
    batch["labels"][:, :-4] = -100
    return causal_lm(config), batch


def mamba() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.MambaConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    return causal_lm(config, None), texts(20)


def encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    return Encoder(), texts(21)


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    each.__name__: each
    for each in (packed, mixtral, opt, bloom, t5, whisper, qwen3, mamba, encoder)
}


def run_models(rank: int, size: int, names: list[str], **options: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        torch.manual_seed(3)
        model, batch = MODELS[name]()
        found[name] = compare_model(model, [batch], **options)
    return found


@pytest.mark.parametrize(
    "names",
    [["packed", "mixtral"], pytest.param(["opt", "bloom", "t5", "encoder"],
                                         marks=pytest.mark.full),
     pytest.param(["whisper", "qwen3"], marks=pytest.mark.full)],
    ids=str,
)  # fmt: skip
def test_models_without_a_rule_are_those_of_one_process(names: list[str]) -> None:
    for each in run_ranks(run_models, 2, names):
        for name, found in each.items():
            assert found["loss"] < 1e-6, name
            assert found["gradient"] < 1e-6, name


@pytest.mark.full
def test_recurrences_that_are_written_position_by_position_run_by_channels() -> None:
    for each in run_ranks(run_models, 2, ["mamba"]):
        found = each["mamba"]
        assert found["loss"] < 1e-6
        assert found["gradient"] < 1e-6
        channels, positions, states, rows = 16, 10, 4, 2  # of the other rank, of this one
        there, back = 2 * rows * channels * positions * states, rows * channels * positions
        layers, passes = 2, 2
        assert found["sent"]["channels"] == (there + back) * 4 * layers * passes


class Flexible(nn.Module):
    """flex_attention with a mask of documents, scores by distance, fewer heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids, documents = batch["input_ids"], batch["documents"]
        x = self.embed(ids)
        q, k, v = (
            each(x).view(*ids.shape, -1, 8).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )

        def shows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (documents[b, i] == documents[b, j])

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return value - 0.1 * (i - j)

        length = ids.shape[1]
        mask = flex.create_block_mask(shows, 2, None, length, length, "cpu", BLOCK_SIZE=16)
        y = flex.flex_attention(q, k, v, score, mask, enable_gqa=True)
        logits = self.head(x + y.transpose(1, 2).flatten(2))
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def run_flexible(rank: int, size: int, balance: str) -> dict[str, Any]:
    flex._validate_device = lambda *_: None  # torch itself refuses backward passes on CPUs
    torch.manual_seed(3)
    documents = torch.stack([torch.arange(50) // 11, torch.arange(50) // 30])
    return compare_model(Flexible(), [texts(50, documents=documents)], balance=balance)


@pytest.mark.full
@pytest.mark.parametrize("balance", ["contiguous", "documents"])
def test_flex_attention_by_rows_of_its_mask_is_that_of_one_process(balance: str) -> None:
    first, second = run_ranks(run_flexible, 2, balance)
    for each in (first, second):
        assert each["loss"] < 1e-6
        assert each["gradient"] < 1e-6
    if balance == "contiguous":  # blocks of 16 rows: the first rank's see keys up to 31
        row = 2 * 2 * 2 * 8 * 4  # keys and values, batch, heads, channels, fp32
        assert first["sent"]["keys"] == 25 * row
        assert second["sent"]["keys"] == 7 * row


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_packed_documents_balanced_by_their_work_are_those_of_one_process(size: int) -> None:
    for each in run_ranks(run_packed, size):
        assert each["loss"] < 1e-6
        assert each["gradient"] < 1e-6


def run_packed(rank: int, size: int) -> dict[str, Any]:
    return run_models(rank, size, ["packed"], balance="documents")["packed"]

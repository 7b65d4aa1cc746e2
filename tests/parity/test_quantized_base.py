"""LoRA on a base that torchao has quantized equals one process, and resumes to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.strategies.registry import build_strategy
from tests.support.adapters import Adapted, Sentences, fit, fit_under, largest_difference, whole
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET

pytest.importorskip("peft")
torchao = pytest.importorskip("torchao.quantization")
granularity = pytest.importorskip("torchao.quantization.granularity")
QUANTIZED = (torchao.Int8Tensor, torchao.IntxUnpackedToInt8Tensor)
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Quantized(Adapted):
    """A Llama whose frozen matrices are bytes and scales: rows of int8 or groups of int4."""

    def __init__(self, bits: int = 8, **options: Any) -> None:
        super().__init__(**options)
        of_four = torchao.IntxWeightOnlyConfig(
            torch.int4,  # type: ignore[attr-defined]
            granularity.PerGroup(8),
        )
        torchao.quantize_(
            self.model,
            torchao.Int8WeightOnlyConfig() if bits == 8 else of_four,
            filter_fn=lambda module, name: (
                isinstance(module, nn.Linear) and name.endswith("base_layer")
            ),
        )


def values(module: Quantized) -> dict[str, Tensor]:
    """Return all parameters as plain tensors. Collective."""
    return {
        name: each.dequantize() if isinstance(each, QUANTIZED) else each
        for name, each in whole(module).items()
    }


def one_process(rank: int, world_size: int, bits: int) -> dict[str, Tensor]:
    module = Quantized(bits)
    fit(module, "auto")
    return values(module)


def train_and_resume(
    rank: int, world_size: int, bits: int, name: str, keywords: dict[str, Any], folder: str
) -> tuple[dict[str, Tensor], float]:
    module = Quantized(bits, seed=7 + rank)  # the first rank's base counts
    num_quantized = sum(isinstance(each, QUANTIZED) for each in module.parameters())
    assert num_quantized == 14
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    keywords = {"verify_replicas_every": 2, **keywords}
    options: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True}
    fit_under(name, module, rank, world_size, keywords=keywords, **options)
    through = values(module)
    again = Quantized(bits, seed=7 + rank)
    path = f"{folder}/step=2.ckpt"
    fit_under(name, again, rank, world_size, keywords=keywords, ckpt_path=path)
    return through, largest_difference(through, values(again))


ALONE = {"save_trainable_only": True}


@pytest.mark.slow(20)
@pytest.mark.sample("8-ddp-keywords0", "8-zero3-keywords3")
@pytest.mark.parametrize(
    ("bits", "name", "keywords"),
    [
        (8, "ddp", {}),
        (8, "ddp", ALONE),
        (8, "zero1", {}),
        (8, "zero3", {}),
        (8, "zero3", ALONE),
        (8, "zero2_cpu", ALONE),
        (8, "zero3_cpu", {}),
        (8, "zero3", {"tile_linear_bytes": 4096}),
        (4, "ddp", {}),
        (4, "zero3", ALONE),
        (4, "zero3_cpu", {}),
    ],
)
def test_it_equals_one_process_and_resumes_to_the_bit(
    bits: int, name: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    (expected,) = run_ranks(one_process, 1, bits)
    found = run_ranks(train_and_resume, 2, bits, name, keywords, str(tmp_path))
    for through, difference in found:
        assert largest_difference(through, expected) < 1e-5
        assert difference == 0


def validated(rank: int, world_size: int, name: str) -> float:
    """Return the validation loss, with telemetry."""
    strategy = build_strategy(name) if world_size > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, use_distributed_sampler=False,
        **QUIET,
    )  # fmt: skip
    module = Quantized(seed=7 + rank)
    (found,) = trainer.validate(module, DataLoader(Sentences(rank, world_size), 2), verbose=False)
    return found["val_loss"]


@pytest.mark.parametrize("name", ["bolt_ddp", "bolt_zero3"])
def test_it_validates_as_one_process(name: str) -> None:
    (expected,) = run_ranks(validated, 1, name)
    assert run_ranks(validated, 2, name) == pytest.approx([expected] * 2, rel=1e-6)

"""Checkpoints of divided experts go on to the bit, in other layouts, and evaluations give the same.

All ranks train on equal batches here, so that any number of them gives the numbers of one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from boltmesh.cli import run_command
from tests.support.expert_models import MoeModule, tokens
from tests.support.expert_runs import loader, strategy_of, trainer, whole_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def fit(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    epochs: int,
    start: str | None,
    save: str | None,
    kind: str = "mixtral",
) -> dict[str, Tensor]:
    """Train epochs of two batches; return the parameters."""
    module = MoeModule(kind, "adamw")
    strategy = strategy_of(telemetry=False, **options)
    run = trainer(world_size, strategy, max_epochs=epochs, gradient_clip_val=0.5)
    run.fit(module, loader(0, 2), ckpt_path=start)
    if save is not None:
        run.save_checkpoint(save)
    return whole_of(module)


def largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    options = {"stage": 2, "expert": 2}
    path = str(tmp_path / "half.ckpt")
    run_ranks(fit, 2, options, 1, None, path)
    whole = run_ranks(fit, 2, options, 2, None, None)
    resumed = run_ranks(fit, 2, options, 2, path, None)
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sample("mixtral")
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_an_export_has_the_names_of_files_on_the_hub(kind: str, tmp_path: Path) -> None:
    path, target = tmp_path / "half.ckpt", tmp_path / "model"
    trained = run_ranks(fit, 2, {"stage": 2, "expert": 2}, 1, None, str(path), kind)[0]
    net: Any = MoeModule(kind).net
    net.config.save_pretrained(tmp_path)
    line = ["export", str(path), "--to", str(target), "--hf", str(tmp_path)]
    assert run_command(line) == 0
    names = set(load_file(target / "model.safetensors"))
    net.save_pretrained(tmp_path / "own")
    assert names == set(load_file(tmp_path / "own" / "model.safetensors"))
    for name, each in type(net).from_pretrained(target).state_dict().items():
        assert torch.equal(each, trained.get(f"net.{name}", each)), name


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 of 4": (4, {"stage": 1, "expert": 2}),
    "4 of 4": (4, {"stage": 3, "expert": 4}),
    "2 of 2": (2, {"stage": 3, "expert": 2}),
    "shards": (2, {"stage": 3}),
    "tensor 2, 2 of 4": (4, {"zero_stage": 1, "tensor": 2, "expert": 2}),
    "tensor 2, 2 of 2": (2, {"zero_stage": 3, "tensor": 2, "expert": 2}),
    "layers": (4, {"zero_stage": 2, "tensor": 2, "expert": 2, "expert_tensor": "tensor"}),
    "offloaded": (
        2,
        {"stage": 3, "expert": 2, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    ),
    "pipeline": (4, {"zero_stage": 1, "pipeline": 2, "expert": 2, "microbatches": 2}),
    "one": (1, {"stage": 1}),
}


PAIRS = [
    ("4 of 4", "one"), ("one", "2 of 4"), ("2 of 4", "2 of 2"), ("2 of 2", "shards"),
    ("shards", "4 of 4"), ("tensor 2, 2 of 4", "one"), ("2 of 2", "tensor 2, 2 of 2"),
    ("offloaded", "one"), ("2 of 4", "offloaded"),
]  # fmt: skip
CASES = [
    *((one, other, kind) for one, other in PAIRS for kind in ("mixtral", "list", "mixtral, LoRA")),
    *(("pipeline", other, "stacked") for other in ("one", "2 of 2", "pipeline")),
    ("4 of 4", "pipeline", "stacked"),
    *(("layers", other, "stacked") for other in ("one", "2 of 2", "tensor 2, 2 of 4")),
    ("2 of 4", "layers", "stacked"),
]


@pytest.mark.full
@pytest.mark.parametrize(("one", "other", "kind"), CASES)
def test_a_run_goes_on_in_another_layout(one: str, other: str, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    expected = run_ranks(fit, 1, LAYOUTS["one"][1], 2, None, None, kind)[0]
    run_ranks(fit, LAYOUTS[one][0], LAYOUTS[one][1], 1, None, path, kind)
    world_size, options = LAYOUTS[other]
    for got in run_ranks(fit, world_size, options, 2, path, None, kind):
        assert largest_gap(got, expected) < 3e-6


def evaluate(
    rank: int, world_size: int, options: dict[str, Any], counts: list[int], kind: str
) -> tuple[int, list[float]]:
    """Predict another number of batches on each data rank; return its number too."""
    module = MoeModule(kind)
    strategy = strategy_of(telemetry=False, **options)
    place = strategy.layout_of(world_size).coordinates(rank)["data"]
    run = trainer(world_size, strategy)
    predicted: Any = run.predict(module, loader(place, counts[place]))
    return place, [float(each) for each in predicted]


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "counts", "kind"),
    [
        ({"stage": 1, "expert": 2}, [1, 3], "mixtral"),
        ({"stage": 3, "expert": 2}, [1, 3, 2, 4], "mixtral"),
        ({"stage": 3, "expert": 2}, [1, 3, 2, 4], "repeated"),
        ({"stage": 3, "expert": 2}, [1, 3, 2, 4], "mixtral, LoRA"),
        ({"zero_stage": 3, "pipeline": 2, "expert": 2, "microbatches": 2}, [1, 3], "stacked"),
        pytest.param(
            {"zero_stage": 3, "tensor": 2, "expert": 4}, [1, 3], "mixtral", marks=pytest.mark.full
        ),
        pytest.param(
            {"zero_stage": 3, "tensor": 2, "expert": 2, "expert_tensor": 2},
            [1, 3],
            "mixtral",
            marks=pytest.mark.full,
        ),
    ],
)
def test_ranks_predict_different_numbers_of_batches(
    options: dict[str, Any], counts: list[int], kind: str
) -> None:
    tensor, pipeline = options.get("tensor", 1), options.get("pipeline", 1)
    found = run_ranks(evaluate, len(counts) * tensor * pipeline, options, counts, kind)
    module = MoeModule(kind).eval()
    with torch.no_grad():
        expected = [
            [float(module.predict_step(tokens(number, rank), 0)) for number in range(count)]
            for rank, count in enumerate(counts)
        ]
    assert {place for place, _ in found} == set(range(len(counts)))
    for place, got in found:
        assert got == pytest.approx(expected[place], rel=1e-6)

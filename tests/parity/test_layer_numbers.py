"""A layer's own number, by which models keep keys and values, is never taken for a size."""

from typing import Any

import pytest

from boltmesh.strategies import Parallel3DStrategy, TensorParallelStrategy
from tests.support.numbered import ALL_NUMBERS, Settings, by_a_plain_loop, by_a_strategy, drawn
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {}),
    "data and tensor": (4, {"data": 2, "tensor": 2}),
    "pipeline and tensor": (4, {"pipeline": 2, "tensor": 2, "microbatches": 2}),
}


def train(rank: int, world_size: int, cases: list[Settings], layout: str) -> list[list[float]]:
    options = LAYOUTS[layout][1]
    kind = Parallel3DStrategy if options else TensorParallelStrategy
    return [
        by_a_strategy(settings, kind(telemetry=False, **options), world_size) for settings in cases
    ]


def check(cases: list[Settings], layout: str) -> None:
    wanted = [by_a_plain_loop(settings) for settings in cases]
    for found in run_ranks(train, LAYOUTS[layout][0], cases, layout):
        for settings, one, other in zip(cases, wanted, found, strict=True):
            assert other == pytest.approx(one, rel=1e-5), settings


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_whose_number_equals_a_size_train_as_in_one_process(layout: str) -> None:
    check([ALL_NUMBERS], layout)


@pytest.mark.full
@pytest.mark.parametrize("num_models", [1, pytest.param(12, marks=pytest.mark.full)])
def test_models_of_drawn_sizes_train_as_in_one_process(num_models: int) -> None:
    check([drawn(seed) for seed in range(num_models)], "tensor")

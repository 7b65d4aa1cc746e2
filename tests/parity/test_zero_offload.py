"""ZeRO with its state on the host or on a disk computes what one process computes."""

from pathlib import Path
from typing import Any

import pytest

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import trace_layout
from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.data_parallel import fully_shard
from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.host_memory import HostArena
from boltmesh.strategies.offload.state import Staging
from tests.support.cases import BF16, CLIP, SGD, Case, one_process
from tests.support.models import Regression, TwoOptimizers
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.ranks]
"""Several layouts in turn in the same ranks, four of them on as few cores as there are."""

CPU = {"offload_optimizer": "cpu"}
NVME = {"offload_optimizer": "nvme"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 1, cpu": {"stage": 1, **CPU},
    "stage 1, nvme": {"stage": 1, **NVME},
    "stage 2, cpu": {"stage": 2, **CPU},
    "stage 2, nvme": {"stage": 2, **NVME},
    "stage 3, cpu": {"stage": 3, **CPU},
    "stage 3, half of it, cpu": {"stage": 3, **CPU, "offload_fraction": 0.5},
    "stage 3, cpu, parameters too": {"stage": 3, **CPU, "offload_parameters": "cpu"},
    "stage 3, three tiers": {"stage": 3, **NVME, "offload_fraction": {"host": 0.3, "disk": 0.4}},
    "stage 3, nvme, parameters too": {"stage": 3, **NVME, "offload_parameters": "nvme"},
}
SHORT = ("stage 2, cpu", "stage 3, three tiers", "stage 3, nvme, parameters too")
CHUNK_NUMEL = 50
"""So that small models have parameters in several chunks, and chunks of several parameters."""

CASES = [
    Case("clipping", trainer=CLIP),
    Case("accumulation of 3, clipping, 4 ranks", ranks=4, accumulate=3, trainer=CLIP, count=52),
    Case("bf16-mixed, accumulation of 3, clipping", accumulate=3, trainer={**BF16, **CLIP}),
    Case("two parameter groups, 4 ranks", ranks=4, model={"groups": True}, trainer=CLIP),
    Case("frozen layers", model={"freezes": True}, accumulate=2),
    Case("tied weights, 4 ranks", ranks=4, model={"ties": True}, trainer=CLIP),
    Case("a scalar, clipping, accumulation", model={"has_scalar": True}, accumulate=2,
         trainer=CLIP),
    Case("a scalar, bf16-mixed, 4 ranks", ranks=4, model={"has_scalar": True}, trainer=BF16),
]  # fmt: skip
SHORT_CASES = [
    Case("steps enough to guess, never clipped", steps=14, count=24),
    Case("steps enough to guess, clipped late, 4 ranks", ranks=4, steps=14, count=24,
         trainer={"gradient_clip_val": 1.2}),
    Case("a block that odd steps leave out", model={"skips": True}, steps=13),
    Case("sgd with momentum", model=SGD, trainer=CLIP),
    Case("a scalar with state from the beginning", model={"has_scalar": True,
         "optimizer": "adagrad"}, trainer=CLIP),
    Case("clipping by value", model=SGD,
         trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case("a sequence of layers", module=Regression, accumulate=2),
    Case("several optimizers", module=TwoOptimizers),
    Case("copies of shards", ranks=4, accumulate=2, strategy={"shard_size": 2}, trainer=CLIP),
]  # fmt: skip


def layouts(rank: int, world_size: int, case: Case, folder: str, names: list[str]) -> list[Trace]:
    stores.SMALL_NUMEL = 0
    vars(stores)["CHUNK_NUMEL"] = CHUNK_NUMEL
    traces = []
    for name in names:
        options = dict(LAYOUTS[name])
        if options["offload_optimizer"] == "nvme":
            options["offload_path"] = folder
        strategy = ZeROStrategy(telemetry=False, **options, **case.strategy)
        traces.append(trace_layout(case.problem(), strategy, devices=world_size))
    return traces


THIRDS = [list(LAYOUTS)[first::3] for first in range(3)]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("names", THIRDS, ids=["first", "second", "third"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layout_equals_one_process(case: Case, names: list[str], tmp_path: Path) -> None:
    check(case, names, tmp_path)


@pytest.mark.sample("steps enough to guess, clipped late, 4 ranks-stage 3, three tiers")
@pytest.mark.parametrize("layout", SHORT)
@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.name)
def test_some_layouts_equal_one_process(case: Case, layout: str, tmp_path: Path) -> None:
    check(case, [layout], tmp_path)


def staged(rank: int, world_size: int, case: Case, options: dict[str, Any]) -> list[Any]:
    """Train as shards of a GPU do, which wait in host memory, and as those of the CPU do."""
    stores.SMALL_NUMEL = 0
    found = []
    for waits in (True, False):
        vars(fully_shard)["waits_on_host"] = lambda _, waits=waits: waits
        seen: dict[str, int] = {"staged": 0, "reserved": 0}
        add, reserve = Staging.add, HostArena.reserve

        def noted_add(self: Any, held: Any, seen=seen, add=add) -> None:
            seen["staged"] += len(held)
            add(self, held)

        def noted_reserve(self: Any, num_bytes: int, seen=seen, reserve=reserve) -> None:
            seen["reserved"] += num_bytes > 0
            reserve(self, num_bytes)

        type.__setattr__(Staging, "add", noted_add)
        type.__setattr__(HostArena, "reserve", noted_reserve)
        try:
            strategy = ZeROStrategy(telemetry=False, **options)
            found.append((trace_layout(case.problem(), strategy, devices=world_size), seen))
        finally:
            type.__setattr__(Staging, "add", add)
            type.__setattr__(HostArena, "reserve", reserve)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [Case("frozen layers", model={"freezes": True}, trainer=BF16), Case("sgd", model=SGD)],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("parameters", [None, "cpu"])
def test_shards_that_wait_on_the_host_train_to_the_same_bits(
    case: Case, parameters: str | None
) -> None:
    """And host memory is taken unit by unit, as their waiting place becomes free."""
    options = {"stage": 3, **CPU, "offload_parameters": parameters}
    for (waited, seen), (plain, others) in run_ranks(staged, case.ranks, case, options):
        assert find_differences(plain, waited, Tolerance(0.0, 0.0, 0.0)) == []
        assert seen["staged"] > 0 == others["staged"]
        assert seen["reserved"] >= 3


def check(case: Case, names: list[str], folder: Path) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    ranks = run_ranks(layouts, case.ranks, case, str(folder), names)
    assert len(reference.losses) == case.steps
    assert list(folder.iterdir()) == []  # nothing is left of the swap files
    for traces in ranks:
        for name, trace in zip(names, traces, strict=True):
            found = [
                f"{name}: {each}" for each in find_differences(reference, trace, case.tolerance)
            ]
            assert found == []

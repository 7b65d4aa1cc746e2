"""Cuts keep within the memory that ranks have, with what the schedule keeps of activations."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.options import PipelineContext
from boltmesh.strategies.pipeline.partition.choose import (
    MemoryBudget,
    _available_bytes,
    cut_units,
)
from boltmesh.strategies.pipeline.partition.split import UnitCost, balanced_split


def block(index: int, seconds: float = 1.0, num_bytes: float = 4e9, kept: float = 0) -> UnitCost:
    return UnitCost(f"block{index}", seconds, num_bytes, kept)


def sizes(stages: object) -> list[int]:
    return [len(each) for each in stages]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_within_the_memory_is_better(seed: int) -> None:
    source = random.Random(seed)
    draw = source.randint
    units = [
        UnitCost(f"u{index}", float(draw(0, 9)), float(draw(0, 5)), float(draw(0, 3)))
        for index in range(draw(2, 8))
    ]
    num_stages = draw(1, len(units))
    live = [draw(1, 4) for _ in range(num_stages)]
    limit = float(draw(10, 30))
    found = []
    for ends in itertools.combinations(range(1, len(units)), num_stages - 1):
        stages = [units[a:b] for a, b in itertools.pairwise([0, *ends, len(units)])]
        needed = [
            sum(each.num_bytes + count * each.kept_bytes for each in stage)
            for stage, count in zip(stages, live, strict=True)
        ]
        times = [sum(each.seconds for each in stage) for stage in stages]
        if max(needed) <= limit:
            found.append((max(times), sum(each * each for each in times)))
    if not found:
        with pytest.raises(ConfigError, match="live microbatches"):
            balanced_split(units, num_stages, max_bytes=limit, live=live)
        return
    known = {each.name: each.seconds for each in units}
    names = balanced_split(units, num_stages, max_bytes=limit, live=live)
    times = [sum(known[name] for name in stage) for stage in names]
    assert (max(times), sum(each * each for each in times)) == min(found)


def test_a_first_stage_that_keeps_more_microbatches_gets_fewer_blocks() -> None:
    units = [block(index, num_bytes=1e9, kept=1e9) for index in range(8)]
    assert sizes(cut_units("auto", units, (0, 1), MemoryBudget(100e9, True, (2, 1)))) == [4, 4]
    assert sizes(cut_units("auto", units, (0, 1), MemoryBudget(10e9, True, (2, 1)))) == [3, 5]
    with pytest.raises(ConfigError, match=r"within 9 GB: .* 2 live microbatches"):
        cut_units("auto", units, (0, 1), MemoryBudget(9e9, True, (2, 1)))


def test_a_rank_with_two_stages_keeps_within_its_memory() -> None:
    units = [block(0, 4.0, 1e9), *[block(index) for index in range(1, 6)], block(6, 4.0, 1e9)]
    budget = MemoryBudget(20e9, True, (1, 1, 1, 1))
    assert sizes(cut_units("auto", units, (0, 1, 1, 0), budget)) == [1, 3, 2, 1]
    budget = MemoryBudget(16e9, True, (1, 1, 1, 1))
    assert sizes(cut_units("auto", units, (0, 1, 1, 0), budget)) == [2, 2, 2, 1]


def test_a_cut_of_the_users_is_refused_where_it_does_not_fit() -> None:
    units = [block(index) for index in range(4)]
    budget = MemoryBudget(10e9, True, (1, 1))
    assert sizes(cut_units(["block2"], units, (0, 1), budget)) == [2, 2]
    with pytest.raises(ConfigError, match=r"gives rank 1 .* need 12 GB .* it has 10 GB"):
        cut_units(["block1"], units, (0, 1), budget)


def test_what_a_gpu_has_refuses_nothing_and_warns() -> None:
    units = [block(index) for index in range(4)]
    with pytest.warns(RuntimeWarning, match=r"may not fit into the GPUs. No cut into 2 stages"):
        stages = cut_units("auto", units, (0, 1), MemoryBudget(6e9, False, (1, 1)))
    assert sizes(stages) == [2, 2]


def test_the_memory_of_a_gpu_is_what_is_free_with_room_for_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 << 30)
    device = torch.device("cuda", 0)
    assert _available_bytes(device, 0) == pytest.approx(0.92 * (70 << 30), rel=1e-9)
    assert _available_bytes(device, 4) == pytest.approx(0.92 * ((70 << 30) - 2e9), rel=1e-9)
    assert _available_bytes(device, 1000) == 0


@pytest.mark.parametrize(
    ("size", "given", "count"),
    [
        (1, {}, 0),
        (2, {}, 2),  # values, and gradients
        (4, {"num_replicas": 2, "num_sharing": 1}, 3),
        (2, {"num_replicas": 2, "num_sharing": 4}, 4),
    ],
)
def test_a_step_uses_a_communicator_for_each_direction_and_for_each_group_beside(
    size: int, given: dict[str, Any], count: int
) -> None:
    group: Any = SimpleNamespace(size=lambda: size)
    other: Any = None
    context = PipelineContext(group, other, other, torch.device("cpu"), other, 1, **given)
    assert context.num_communicators == count

"""Units are cut into stages by cost, exactly."""

import itertools
import random

import pytest

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.partition.split import UnitCost, balanced_split, named_split


def units_of(seconds: list[float], num_bytes: list[float] | None = None) -> list[UnitCost]:
    kept = num_bytes or [0.0] * len(seconds)
    pairs = zip(seconds, kept, strict=True)
    return [UnitCost(f"unit{index}", *pair) for index, pair in enumerate(pairs)]


def cost(stages: list[list[UnitCost]]) -> tuple[float, float]:
    sums = [sum(each.seconds for each in stage) for stage in stages]
    return max(sums), sum(each * each for each in sums)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_is_better(seed: int) -> None:
    source = random.Random(seed)
    count = source.randint(1, 9)
    units = units_of(
        [float(source.randint(0, 9)) for _ in range(count)],
        [float(source.randint(0, 5)) for _ in range(count)],
    )
    num_stages = source.randint(1, count)
    limit = source.choice([6.0, 12.0, 1e9])
    cuts = []
    for ends in itertools.combinations(range(1, count), num_stages - 1):
        bounds = [0, *ends, count]
        stages = [units[a:b] for a, b in itertools.pairwise(bounds)]
        if all(sum(each.num_bytes for each in stage) <= limit for stage in stages):
            cuts.append(stages)
    if not cuts:
        with pytest.raises(ConfigError, match="No cut into"):
            balanced_split(units, num_stages, max_bytes=limit)
        return
    known = {each.name: each for each in units}
    found = balanced_split(units, num_stages, max_bytes=limit)
    assert [name for stage in found for name in stage] == list(known)
    got = cost([[known[name] for name in stage] for stage in found])
    assert got == min(cost(each) for each in cuts)


def test_a_heavy_head_takes_blocks_from_the_last_stage() -> None:
    units = units_of([0.1, *[1.0] * 8, 3.0])
    assert [len(stage) for stage in balanced_split(units, 4)] == [3, 3, 3, 1]


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages=3 .* 2 parts .*unit0, unit1.*stages=2 or fewer"):
        balanced_split(units_of([1.0, 1.0]), 3)


def test_stages_begin_where_the_user_says() -> None:
    names = ["embed", "block0", "block1", "head"]
    assert named_split(["block1", "head"], names) == [["embed", "block0"], ["block1"], ["head"]]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["blocks"], "no stage can begin. It can at block0, block1, head"),
        (["head", "block1"], "not in the order"),
        (["embed"], "begins with its first module"),
    ],
)
def test_splits_that_cannot_be_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        named_split(names, ["embed", "block0", "block1", "head"])

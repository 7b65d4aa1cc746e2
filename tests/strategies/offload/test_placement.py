"""Chunks go to tiers by share and by when their gradients arrive."""

import random

import pytest

from boltmesh.strategies.offload.chunk_placement import plan_places


def share_of(place: str, numels: list[int], places: list[str]) -> float:
    held = sum(n for n, each in zip(numels, places, strict=True) if each == place)
    return held / sum(numels)


def test_what_arrives_first_goes_to_the_disk_and_what_arrives_last_stays() -> None:
    places = plan_places([10] * 10, {"host": 0.3, "disk": 0.5})
    assert places == ["disk"] * 5 + ["host"] * 3 + ["device"] * 2


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_share_of_one_leaves_nothing_on_the_device(tier: str) -> None:
    generator = random.Random(0)
    for _ in range(200):
        numels = [generator.randint(1, 10**9) for _ in range(generator.randint(1, 40))]
        assert set(plan_places(numels, {tier: 1.0})) == {tier}


def test_shares_that_add_up_to_one_leave_nothing_on_the_device_in_spite_of_rounding() -> None:
    generator = random.Random(1)
    for _ in range(500):
        numels = [generator.randint(1, 10**6) for _ in range(generator.randint(1, 30))]
        host = generator.random()
        assert "device" not in plan_places(numels, {"host": host, "disk": 1.0 - host})


def test_shares_are_met_to_within_a_chunk() -> None:
    generator = random.Random(2)
    for _ in range(500):
        numels = [generator.randint(1, 1000) for _ in range(generator.randint(1, 50))]
        shares = {"host": generator.random() / 2, "disk": generator.random() / 2}
        places = plan_places(numels, shares)
        slack = max(numels) / sum(numels) + 1e-9
        for tier, share in shares.items():
            assert abs(share_of(tier, numels, places) - share) <= slack

"""Ranks find out together where they run, and the first of them warns."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

from boltmesh.errors import LayoutError
from boltmesh.strategies import Parallel3DStrategy, ZeROStrategy
from boltmesh.strategies.topology import devices
from boltmesh.strategies.topology.links import Link, RankLocation
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def looked(strategy: Any, world_size: int) -> list[str]:
    """What a Trainer's strategy warns of once its ranks have met."""
    Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.setup_environment()
    return [text for each in caught if (text := str(each.message)).startswith("Rank placement")]


def at_places(rank: int, world_size: int) -> dict[str, Any]:
    """Set up strategies on ranks that take turns on two hosts, and on GPUs that are not there."""

    def three(**sizes: Any) -> Parallel3DStrategy:
        return Parallel3DStrategy(telemetry=False, **sizes)

    told = {"here": looked(three(data=2, tensor=2), world_size)}
    name = "abab"[rank]
    with mock.patch.object(devices, "this_host", return_value=(name, name)):
        told["tensor"] = looked(three(data=2, tensor=2), world_size)
        told["data"] = looked(three(data=2, pipeline=2), world_size)
        told["one axis"] = looked(three(data=4), world_size)
        told["shards"] = looked(ZeROStrategy(shard_size=2, telemetry=False), world_size)
        told["node"] = looked(ZeROStrategy(shard_size="node", telemetry=False), world_size)
    ids = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    asked: list[str] = []

    def links(uuid: str, others: Any) -> dict[str, Link]:
        asked.extend(others)
        fast = {"GPU-0": "GPU-2", "GPU-1": "GPU-3"}
        return {each: Link.NVLINK if fast.get(uuid) == each else Link.NUMA_NODE for each in others}

    def on_gpu(host: str, machine: str, device: Any, index: Any) -> Any:
        return RankLocation(host, machine, ids[rank], rank)

    with (
        mock.patch.object(devices, "RankLocation", on_gpu),
        mock.patch.object(devices, "read_links", links),
    ):
        told["gpus"] = looked(three(data=2, tensor=2), world_size)
        told["asked"] = asked
    dist.barrier()
    return told


def test_the_first_rank_warns_of_groups_that_a_slow_link_joins() -> None:
    first, *others = run_ranks(at_places, 4)
    assert first["here"] == []
    (text,) = first["tensor"]
    assert "The tensor group {0, 1} crosses the hosts a and b" in text
    (text,) = first["data"]
    assert "The data group {0, 1} crosses the hosts a and b" in text
    assert first["one axis"] == []
    (text,) = first["shards"]
    assert "The shard group {0, 1} crosses the hosts a and b" in text
    assert first["node"] == []  # the Trainer counts one host, which is not looked into
    (text,) = first["gpus"]
    assert text.endswith("NVLink joins them in another order: devices=[0, 2, 1, 3].")
    assert [each["asked"] for each in (first, *others)] == [
        ["GPU-1", "GPU-2", "GPU-3"],
        ["GPU-2", "GPU-3"],
        ["GPU-3"],
        [],
    ]
    for each in others:
        assert not any(each[name] for name in each if name != "asked")


def cut_unevenly(rank: int, world_size: int) -> str:
    with pytest.raises(LayoutError) as error:
        looked(ZeROStrategy(shard_size=3, telemetry=False), world_size)
    return str(error.value)


@pytest.mark.full
def test_groups_of_shards_of_unequal_size_are_refused_when_ranks_meet() -> None:
    for text in run_ranks(cut_unevenly, 2):
        assert "shard_size=3 cuts the 2 ranks of the data axis into groups of unequal size" in text

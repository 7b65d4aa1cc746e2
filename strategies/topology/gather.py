"""Collects where each rank of a job runs."""

from typing import TypeVar

import torch
import torch.distributed as dist

from boltmesh.strategies.topology.links import Link, RankLocation, Topology, read_links, this_host
from boltmesh.telemetry.writer.device import uuid

T = TypeVar("T")


def gather_topology(device: torch.device) -> Topology:
    """Return the location of all ranks, and the links between GPUs of a host.

    Collective over all ranks.

    Args:
        device: Device of this rank.
    """
    rank = dist.get_rank()
    host, machine = this_host()
    places = _gather(RankLocation(host, machine, uuid(device), device.index))
    mine = places[rank]
    later: dict[str, int] = {
        each.device: other
        for other, each in enumerate(places)
        if other > rank and each.machine == machine and each.device is not None
    }
    links = read_links(mine.device, later) if mine.device is not None and later else {}
    told = {(rank, later[other]): link for other, link in links.items()}
    if all(each.device is None for each in places):
        return Topology(places)
    joined: dict[tuple[int, int], Link] = {}
    for each in _gather(told):
        joined |= each
    return Topology(places, joined)


def _gather(mine: T) -> list[T]:
    told: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told

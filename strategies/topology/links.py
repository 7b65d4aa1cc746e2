"""Locations of ranks, the links between a host's GPUs as NVML reports them, and slow groups.

NVML is used, not torch: ``can_device_access_peer`` is true over a PCIe switch and over NVLink.
Nothing is measured, so the start takes no longer. ``devices.gather_topology`` makes a ``Topology``.

``find_slow_groups`` finds groups of ranks that a slow link delays although the job has a faster one
for them. Results do not depend on links, so this is a warning, which names the group, its link
and the alternative. Sizes that no order of ranks can place inside a host are refused earlier, by
``fit_layout`` in ``mesh.py``. ``arrange`` divides the GPUs of a host into groups connected by fast
links.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from socket import gethostname
from types import ModuleType
from typing import NamedTuple

import pynvml

from boltmesh.axes import divisors


class Link(IntEnum):
    """The slowest part of the path between two devices; a greater value is faster.

    The order is that of NCCL's path types and of ``nvidia-smi topo -m``.
    """

    NETWORK = 0
    SOCKETS = 1
    NUMA_NODE = 2
    HOST_BRIDGE = 3
    SWITCHES = 4
    SWITCH = 5
    BOARD = 6
    NVLINK = 7

    @property
    def words(self) -> str:
        """The link's name in messages."""
        return _WORDS[self]


_WORDS = {
    Link.NETWORK: "the network",
    Link.SOCKETS: "the link between NUMA nodes",
    Link.NUMA_NODE: "several PCIe host bridges of a NUMA node",
    Link.HOST_BRIDGE: "a PCIe host bridge",
    Link.SWITCHES: "several PCIe switches",
    Link.SWITCH: "one PCIe switch",
    Link.BOARD: "one board",
    Link.NVLINK: "NVLink",
}


def read_links(uuid: str, others: Iterable[str], nvml: ModuleType = pynvml) -> dict[str, Link]:
    """Return the links between a GPU and others of its host.

    Args:
        uuid: Its UUID as spelled by NVML.
        others: UUIDs of the other GPUs. Those that NVML does not show are left out: a job's
            share of a host may hide the rest, and a slice of a GPU has no links of its own.
        nvml: The module ``pynvml``, not initialized.

    Returns:
        Links by the other GPU's UUID; empty without a driver.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        by_uuid = {other: _link(nvml, uuid, other) for other in others}
    finally:
        nvml.nvmlShutdown()
    return {other: link for other, link in by_uuid.items() if link is not None}


def _link(nvml: ModuleType, uuid: str, other: str) -> Link | None:
    try:
        one, two = (nvml.nvmlDeviceGetHandleByUUID(each) for each in (uuid, other))
        if _has_nvlink(nvml, one, two):
            return Link.NVLINK
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, two)
    except nvml.NVMLError:
        return None
    levels = {
        nvml.NVML_TOPOLOGY_INTERNAL: Link.BOARD,
        nvml.NVML_TOPOLOGY_SINGLE: Link.SWITCH,
        nvml.NVML_TOPOLOGY_MULTIPLE: Link.SWITCHES,
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: Link.HOST_BRIDGE,
        nvml.NVML_TOPOLOGY_NODE: Link.NUMA_NODE,
    }
    return levels.get(level, Link.SOCKETS)


def _has_nvlink(nvml: ModuleType, one: object, two: object) -> bool:
    """Whether NVLink connects two GPUs, directly or by switches; False if NVML cannot tell."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, two, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


@dataclass(frozen=True)
class RankLocation:
    """Location of one rank."""

    host: str
    """Name of the host, for messages."""
    machine: str
    """Equal on ranks that communicate without the network, see ``this_host``."""
    device: str | None = None
    """UUID of its GPU; None on the CPU, or if the GPU has none."""
    index: int | None = None
    """Index of its GPU in the rank's process: the number in ``cuda:0``."""


@dataclass(frozen=True)
class Topology:
    """Locations of all ranks, and the links within hosts."""

    places: Sequence[RankLocation]
    """Locations by global rank."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Links between GPUs of one host, by ranks, smaller one first; unknown ones are left out."""

    def link(self, one: int, other: int) -> Link | None:
        """Return the link between two ranks; None if they share a host and the link is unknown."""
        if self.places[one].machine != self.places[other].machine:
            return Link.NETWORK
        return self.links.get((min(one, other), max(one, other)))

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """Return the hosts of some ranks by name, in the order of the ranks, each once."""
        named = {self.places[rank].machine: self.places[rank].host for rank in ranks}
        return list(named.values())

    def by_host(self) -> list[list[int]]:
        """Return the ranks of each host."""
        by_machine: dict[str, list[int]] = {}
        for rank, place in enumerate(self.places):
            by_machine.setdefault(place.machine, []).append(rank)
        return list(by_machine.values())


def this_host() -> tuple[str, str]:
    """Return this host's name and an identifier of it.

    The identifier has the kernel's boot id and the name, as in NCCL: containers of one machine with
    different host names do not share memory, and communicate over the network.
    """
    name = gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return name, f"{name} {boot}"


MOST_RANKS = 16
"""Hosts with more ranks are not searched: no host has more GPUs of one job, and the search grows
fast."""


class Arrangement(NamedTuple):
    """An order of ranks in which neighbours form groups."""

    ranks: list[int]
    """For each rank of the host, in order, the rank whose GPU it should use."""
    link: Link
    """The slowest link within any group."""


def arrange(
    topology: Topology, ranks: Sequence[int], size: int, *, above: Link
) -> Arrangement | None:
    """Return the order with the fastest links within groups; the present one if none is faster.

    Args:
        topology: Topology of the job.
        ranks: Ranks of one host, in order.
        size: Size of a group; divides the number of ranks.
        above: All links have to be faster than this.

    Returns:
        None if there is no such order.
    """
    if len(ranks) > MOST_RANKS:
        return None
    for link in sorted((each for each in Link if each > above), reverse=True):
        ordered = _cut(topology, list(ranks), size, link)
        if ordered is not None:
            return Arrangement(ordered, link)
    return None


def _cut(topology: Topology, ranks: list[int], size: int, link: Link) -> list[int] | None:
    """Return the ranks in groups connected by at least ``link``, group after group."""
    if not ranks:
        return []
    first, rest = ranks[0], ranks[1:]
    near = [rank for rank in rest if _is_joined(topology, first, rank, link)]
    for others in combinations(near, size - 1):
        if all(_is_joined(topology, one, two, link) for one, two in combinations(others, 2)):
            left = _cut(topology, [rank for rank in rest if rank not in others], size, link)
            if left is not None:
                return [first, *others, *left]
    return None


def _is_joined(topology: Topology, one: int, other: int, link: Link) -> bool:
    actual = topology.link(one, other)
    return actual is not None and actual >= link


Groups = Sequence[Sequence[int]]

CARRIED = {
    "tensor": "sums of every layer",
    "context": "the keys of every attention",
    "shard": "the gathered parameters and reduced gradients of every block",
    "data": "the gradients of each step",
    "expert": "the rows of every layer of experts",
}
"""Traffic of each kind of group, for messages."""


def find_slow_groups(topology: Topology, groups: Mapping[str, Groups]) -> list[str]:
    """Return a message for each kind of group that could be placed on faster links.

    Args:
        topology: Topology of the job.
        groups: Groups whose ranks should be near each other, by kind (the name of an axis, or
            ``"shard"``), in decreasing order of traffic.

    Returns:
        One or two sentences for each finding: at most one on hosts, as they have one cause, and one
        on the links within hosts.
    """
    messages = []
    for kind, ranks in groups.items():
        if text := _on_hosts(topology, kind, ranks):
            messages.append(text)
            break
    if text := _on_links(topology, groups.get("tensor", ())):
        messages.append(text)
    return messages


def _on_hosts(topology: Topology, kind: str, groups: Groups) -> str | None:
    """Return a message if groups cross hosts although they need not."""
    crossing = [each for each in groups if len(topology.hosts(each)) > 1]
    if not crossing:
        return None
    by_host = topology.by_host()
    # The rank at each place if ranks were numbered host by host.
    ordered = [rank for ranks in by_host for rank in ranks]
    better = [[ordered[at] for at in each] for each in groups]
    spans = [max(len(topology.hosts(each)) for each in cut) for cut in (groups, better)]
    num_apart = [sum(len(topology.hosts(each)) > 1 for each in cut) for cut in (groups, better)]
    first = crossing[0]
    said = (
        f"{_group(kind, first)} crosses the hosts {_and(topology.hosts(first))}: "
        f"{CARRIED.get(kind, 'its collectives')} go over {Link.NETWORK.words}."
    )
    if (spans[1], num_apart[1]) < (spans[0], num_apart[0]):
        numbered = "; ".join(
            f"{topology.places[ranks[0]].host} has {_ranks(ranks)}" for ranks in by_host[:2]
        )
        return (
            f"{said} Ranks are not numbered host by host ({numbered}), by which they would stay "
            f"within one. Start them so: torchrun does, srun with --distribution=block, mpirun "
            f"with --map-by slot."
        )
    if kind != "tensor":
        return None  # the data axis has to cross hosts somewhere
    size = math.gcd(len(first), *map(len, by_host))
    if size == 1:
        return f"{said} Start a multiple of {len(first)} ranks on each host."
    return f"{said} Use tensor={size}, whose groups stay within a host."


def _on_links(topology: Topology, groups: Groups) -> str | None:
    """Return a message if groups within a host would have faster links in another order."""
    for ranks in topology.by_host():
        inside = [each for each in groups if set(each) <= set(ranks)]
        if not inside or len(inside[0]) < 2:
            continue
        members = [rank for each in inside for rank in each]
        slowest = min(inside, key=lambda each: _slowest(topology, each) or Link.NVLINK)
        level = _slowest(topology, slowest)
        if level is None or level == Link.NVLINK:
            continue
        said = (
            f"{_group('tensor', slowest)} on {topology.places[slowest[0]].host} is joined by "
            f"{level.words}: {CARRIED['tensor']} go over it."
        )
        best = arrange(topology, members, len(slowest), above=level)
        if best is not None:
            order = _order(topology, best.ranks)
            return f"{said} {_capital(best.link.words)} joins them in another order: {order}."
        for size in divisors(len(slowest))[-2:0:-1]:
            best = arrange(topology, members, size, above=level)
            if best is not None:
                order = "" if best.ranks == members else f", with {_order(topology, best.ranks)}"
                return f"{said} {_capital(best.link.words)} joins groups of tensor={size}{order}."
    return None


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _slowest(topology: Topology, ranks: Sequence[int]) -> Link | None:
    """Return the slowest link between any two ranks; None if one is unknown."""
    slowest = Link.NVLINK
    for at, one in enumerate(ranks):
        for other in ranks[at + 1 :]:
            link = topology.link(one, other)
            if link is None:
                return None
            slowest = min(slowest, link)
    return slowest


def _order(topology: Topology, ranks: Sequence[int]) -> str:
    """Return, as text, the order in which a host's ranks should use its GPUs."""
    indices = [topology.places[rank].index for rank in ranks]
    if None in indices or len(set(indices)) < len(indices):  # each rank sees only its own GPU
        gpus = ", ".join(str(topology.places[rank].device) for rank in ranks)
        return f"give its ranks the GPUs {gpus}"
    return f"devices={indices}"


def _group(kind: str, ranks: Sequence[int]) -> str:
    return f"The {kind} group {{{', '.join(map(str, ranks))}}}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _and(names: Sequence[str]) -> str:
    shown = list(names[:3]) + ([f"{len(names) - 3} more"] if len(names) > 3 else [])
    return " and ".join([", ".join(shown[:-1]), shown[-1]])

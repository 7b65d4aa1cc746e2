"""Locations of ranks, and the links between GPUs of a host as NVML reports them.

NVML rather than torch: ``can_device_access_peer`` is true over a PCIe switch and over NVLink.
Nothing is measured, so a run starts no later. ``Topology`` is plain data; ``gather`` fills it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from socket import gethostname
from types import ModuleType

import pynvml


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
        """Its name in messages."""
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
        others: UUIDs of the other GPUs. Those that NVML does not show here are left out: a job's
            share of a host may hide the rest, and a slice of a GPU has no links of its own.
        nvml: The module ``pynvml``, not initialised.

    Returns:
        Links by the other's UUID; empty without a driver.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        found = {other: _link(nvml, uuid, other) for other in others}
    finally:
        nvml.nvmlShutdown()
    return {other: link for other, link in found.items() if link is not None}


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
    """Whether NVLink connects them, directly or through switches; False if NVML cannot tell."""
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
        found: dict[str, list[int]] = {}
        for rank, place in enumerate(self.places):
            found.setdefault(place.machine, []).append(rank)
        return list(found.values())


def this_host() -> tuple[str, str]:
    """Return the name of this host, and an identifier of it.

    The identifier has the kernel's boot id and the name, as in NCCL: containers of one machine with
    host names of their own do not share memory, and communicate over the network.
    """
    name = gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return name, f"{name} {boot}"

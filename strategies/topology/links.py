"""What joins two GPUs of a host, as NVML knows it, from the slowest to the fastest.

NVML is asked and not torch: ``can_device_access_peer`` says yes over a PCIe switch and over NVLink
alike. Nothing is measured, so a run begins no later for it.

Where each rank of a job runs. Plain Python: what is told about places, not how it is found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from socket import gethostname
from types import ModuleType

import pynvml


class Link(IntEnum):
    """The slowest part of the way from a device to another; a greater one is faster.

    The order is that of NCCL's kinds of paths and of ``nvidia-smi topo -m``.
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
        """As a message calls it."""
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
    """Return what joins a GPU with others of its host.

    Args:
        uuid: As NVML spells it.
        others: Likewise. One that NVML does not show here is left out: a job's share of a host may
            hide the rest, and a slice of a GPU has no links of its own.
        nvml: The module ``pynvml``, not initialised.

    Returns:
        By the other's UUID; nothing at all where there is no driver.
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
    """Whether NVLink joins them, straight or through switches; a model without any may not say."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, two, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


@dataclass(frozen=True)
class RankLocation:
    """Where one rank runs."""

    host: str
    """For messages."""
    machine: str
    """Equal on ranks that reach each other without the network, see ``this_host``."""
    device: str | None = None
    """The UUID of its GPU; None on the CPU, or where it has none."""
    index: int | None = None
    """What the rank calls its GPU: the number behind ``cuda:``."""


@dataclass(frozen=True)
class Topology:
    """The places of all ranks, and what joins those of a host."""

    places: Sequence[RankLocation]
    """By global rank."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Between GPUs of one host, by ranks, the smaller one first; unknown ones are left out."""

    def link(self, one: int, other: int) -> Link | None:
        """Return what joins two ranks; None where they share a host and nobody knows more."""
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
    """Return the name of this host, and what tells it from others.

    Both count, the kernel's boot and the name, as for NCCL: containers of one machine that have
    names of their own do not share memory, and the network joins their ranks.
    """
    name = gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return name, f"{name} {boot}"

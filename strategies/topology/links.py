"""What joins two GPUs of a host, as NVML knows it, from the slowest to the fastest.

NVML is asked and not torch: ``can_device_access_peer`` says yes over a PCIe switch and over NVLink
alike. Nothing is measured, so a run begins no later for it.
"""

from collections.abc import Iterable
from enum import IntEnum
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

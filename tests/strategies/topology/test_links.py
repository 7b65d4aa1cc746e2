"""What NVML says of two GPUs, and what is left out where it says nothing."""

from typing import Any

import pynvml
import pytest

from boltmesh.strategies.topology.links import Link, read_links
from tests.tui.fake_nvml import FakeNvml

COMMON_ANCESTOR, P2P = "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus"


def answers(level: int, status: int = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED) -> FakeNvml:
    return FakeNvml(**{COMMON_ANCESTOR: level, P2P: status})


@pytest.mark.parametrize(
    ("level", "link"),
    [
        (pynvml.NVML_TOPOLOGY_INTERNAL, Link.BOARD),
        (pynvml.NVML_TOPOLOGY_SINGLE, Link.SWITCH),
        (pynvml.NVML_TOPOLOGY_MULTIPLE, Link.SWITCHES),
        (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, Link.HOST_BRIDGE),
        (pynvml.NVML_TOPOLOGY_NODE, Link.NUMA_NODE),
        (pynvml.NVML_TOPOLOGY_SYSTEM, Link.SOCKETS),
    ],
)
def test_each_level_of_pcie_is_a_link(level: int, link: Link) -> None:
    nvml: Any = answers(level)
    assert read_links("GPU-0", ["GPU-1"], nvml) == {"GPU-1": link}
    assert not nvml.is_initialised
    nvlink: Any = answers(level, pynvml.NVML_P2P_STATUS_OK)
    assert read_links("GPU-0", ["GPU-1"], nvlink) == {"GPU-1": Link.NVLINK}


def test_a_model_that_knows_no_nvlink_is_joined_by_pcie() -> None:
    nvml: Any = FakeNvml(P2P, **{COMMON_ANCESTOR: pynvml.NVML_TOPOLOGY_SINGLE})
    assert read_links("GPU-0", ["GPU-1"], nvml) == {"GPU-1": Link.SWITCH}


def test_a_gpu_that_is_not_shown_here_is_left_out() -> None:
    nvml: Any = answers(pynvml.NVML_TOPOLOGY_SINGLE)
    assert read_links("GPU-0", ["GPU-lost", "GPU-1"], nvml) == {"GPU-1": Link.SWITCH}
    silent: Any = FakeNvml(COMMON_ANCESTOR, P2P)
    assert read_links("GPU-0", ["GPU-1"], silent) == {}


def test_without_a_driver_nothing_is_known() -> None:
    class NoDriver(FakeNvml):
        def __getattr__(self, name: str) -> Any:
            if name == "nvmlInit":
                raise pynvml.NVMLError_LibraryNotFound
            return super().__getattr__(name)

    nvml: Any = NoDriver()
    assert read_links("GPU-0", ["GPU-1"], nvml) == {}

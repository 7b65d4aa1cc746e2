"""Accelerators and clusters of them; the data are in ``accelerators.yaml``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from boltmesh.configs.advice import name_choices, nearest
from boltmesh.errors import ConfigError

GB = 1e9
MEMORY_SHARE = 0.88
"""Share of the bandwidth that a data sheet states; copies of large tensors reach 0.85 to 0.92."""
DISK_BYTES, DISK_RATE = 1e12, 2e9
"""Usual of a local disk, for each device: its size, and bytes per second read while as many are
written."""
DATA = Path(__file__).with_name("accelerators.yaml")


@dataclass(frozen=True)
class Accelerator:
    """One device. Rates are per second, of one direction, sizes in bytes."""

    name: str
    flops: Mapping[str, float]
    """Peak of matrix products by dtype: bf16, fp8, fp4."""
    matmul: Mapping[str, float]
    """Share of the peak that large products reach, by dtype."""
    units: int
    """Multiprocessors, or compute units: each computes one tile of a product at a time."""
    attention: float
    """Share of the bf16 peak that fused attention reaches in long sequences."""
    memory_bytes: float
    memory_rate: float
    """Rate that large tensors reach."""
    link_rate: float
    """Rate that collectives reach to the other devices of the node."""
    per_node: int
    """Devices that this link connects."""
    node_network_rate: float
    """Rate from a node to the others."""
    host_bytes: float
    """Host memory for each device, as is usual."""
    host_rate: float

    def matmul_rate(self, dtype: str) -> float:
        """Return the rate of large matrix products, floating point operations per second."""
        known = dtype if dtype in self.flops else min(self.flops, key=self.flops.__getitem__)
        return self.flops[known] * self.matmul[known]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal accelerators.

    Args:
        accelerator: Device of every rank.
        num_devices: In all.
        devices_per_node: Devices that the accelerator's link connects.
        network_rate: From one device to another node, bytes per second, when all devices of its
            node send at once.
    """

    accelerator: Accelerator
    num_devices: int
    devices_per_node: int
    network_rate: float
    is_onload: bool = False

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one maybe not full."""
        return -(-self.num_devices // self.devices_per_node)


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Return all that are known, by name."""
    table = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return {name: _accelerator(name, row) for name, row in table.items()}


def _accelerator(name: str, row: Mapping[str, object]) -> Accelerator:
    tflops, matmul = row["tflops"], row["matmul"]
    assert isinstance(tflops, dict)
    assert isinstance(matmul, dict)
    return Accelerator(
        name=name,
        flops={dtype: float(value) * 1e12 for dtype, value in tflops.items()},
        matmul={dtype: float(value) for dtype, value in matmul.items()},
        units=int(_number(row, "units")),
        attention=_number(row, "attention"),
        memory_bytes=_number(row, "memory_gb") * GB,
        memory_rate=MEMORY_SHARE * _number(row, "memory_gb_s") * GB,
        link_rate=_number(row, "link_gb_s") * _number(row, "link") * GB,
        per_node=int(_number(row, "per_node")),
        node_network_rate=parse_network(str(row["network_gbit"])),
        host_bytes=_number(row, "host_gb") * GB,
        host_rate=_number(row, "host_gb_s") * GB,
    )


def _number(row: Mapping[str, object], key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return float(value)


def accelerator_named(name: str) -> Accelerator:
    """Return an accelerator by its name, also without the size of its memory.

    Raises:
        ConfigError: For an unknown name.
    """
    known = accelerators()
    wanted = name.lower().replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    found = [each for each in known if each == wanted or each.startswith(f"{wanted}-")]
    if found:
        return known[found[0]]
    near = nearest(wanted, [*known, *(each.partition("-")[0] for each in known)])
    hint = f" Did you mean '{near}'?" if near else ""
    raise ConfigError(
        f"There is no accelerator '{name}' in the table.{hint} It has {name_choices(known)}."
    )


def parse_network(text: str) -> float:
    """Return bytes per second of ``8x400`` (links of a node x Gbit/s of each) or of ``3200``.

    Raises:
        ConfigError: For anything else.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*", text)
    if match is None or not float(match[2]) or int(match[1] or 1) == 0:
        raise ConfigError(
            f"--network {text!r} is not the links of a node: write 8x400 for eight links of "
            f"400 Gbit/s, or 3200 for their sum."
        )
    return int(match[1] or 1) * float(match[2]) * 1e9 / 8


def build_cluster(
    accelerator: Accelerator,
    *,
    num_devices: int,
    num_nodes: int | None = None,
    network_rate: float | None = None,
) -> Cluster:
    """Return a cluster; values that are not given are the usual ones of the accelerator.

    Args:
        accelerator: Device of every rank.
        num_devices: In all.
        num_nodes: Must divide the devices.
        network_rate: From a node to the others, bytes per second.

    Raises:
        ConfigError: If the nodes do not divide the devices.
    """
    if num_nodes is None:
        per_node = min(num_devices, accelerator.per_node)
    elif num_nodes < 1 or num_devices % num_nodes:
        raise ConfigError(
            f"--nodes {num_nodes} does not divide --devices {num_devices}: all nodes have the "
            f"same number of devices. Give the devices of all nodes together."
        )
    else:
        per_node = num_devices // num_nodes
    usual = accelerator.node_network_rate / accelerator.per_node
    rate = usual if network_rate is None else network_rate / per_node
    return Cluster(accelerator, num_devices, per_node, rate)


def more_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """Return a larger cluster of the same kind, of equal nodes.

    One node gets as many devices as its accelerator's link connects before there are several.
    """
    per_node = cluster.devices_per_node
    if cluster.num_nodes == 1:
        most = max(per_node, cluster.accelerator.per_node)
        per_node = next(each for each in range(most, 0, -1) if num_devices % each == 0)
    usual = cluster.accelerator.node_network_rate / cluster.accelerator.per_node
    rate = cluster.network_rate
    if rate != usual:  # the links that were given are those of a node
        rate *= cluster.devices_per_node / per_node
    return replace(cluster, num_devices=num_devices, devices_per_node=per_node, network_rate=rate)

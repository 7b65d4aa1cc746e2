"""Devices of a job's ranks: their locations, CUDA's errors, and the cores near each device.

``gather_topology`` collects the host and the device of every rank, and the links between them.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from boltmesh.errors import ConfigError
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.topology.links import Link, RankLocation, Topology, read_links, this_host
from boltmesh.telemetry.writer.device import uuid

PCI = Path("/sys/bus/pci/devices")
VISIBLE = "CUDA_VISIBLE_DEVICES"

_TASKS = Path("/proc/self/task")


def refuse_devices(
    devices: Sequence[torch.device], count: Callable[[], int], environment: Mapping[str, str]
) -> None:
    """Refuse devices of this host's ranks that do not exist or that ranks share by mistake.

    Args:
        devices: The device of each rank of this host.
        count: Returns the number of CUDA devices that torch sees.
        environment: Environment of this process.

    Raises:
        ConfigError: Naming the device.
    """
    indices = [each.index or 0 for each in devices if each.type == "cuda"]
    if not indices:
        return
    num_visible = count()
    if max(indices) >= num_visible:
        fitting = f"devices={num_visible}" if num_visible else "accelerator='cpu'"
        raise ConfigError(
            f"cuda:{max(indices)} does not exist: torch sees {_number(num_visible)}"
            f"{_shown(environment)}. Use {fitting}."
        )
    twice = next((each for each in indices if indices.count(each) > 1), None)
    # NCCL distinguishes ranks with host ids of their own.
    if twice is not None and "NCCL_HOSTID" not in environment:
        raise ConfigError(
            f"{indices.count(twice)} ranks of this host were given cuda:{twice}, and NCCL takes "
            f"one rank for each GPU. Use devices={len(set(indices))}, or give each rank a GPU of "
            f"its own."
        )


def explain_cuda(error: BaseException, environment: Mapping[str, str]) -> ConfigError | None:
    """Return an error that says what to change for one of CUDA's or NCCL's start; else None."""
    text = str(error)
    if "Duplicate GPU detected" in text:
        return ConfigError(
            f"two ranks of this host use the same GPU{_shown(environment)}, and NCCL takes one "
            f"rank for each. Start as many ranks as there are GPUs, and give each launcher's rank "
            f"its own device by LOCAL_RANK."
        )
    if "driver" in text and "too old" in text:
        return ConfigError(
            f"the NVIDIA driver is too old for this torch, which was built for CUDA "
            f"{torch.version.cuda}. Update the driver, install a torch for an older CUDA, or train "
            f"with accelerator='cpu'."
        )
    if "invalid device ordinal" in text:
        return ConfigError(
            f"a rank was given a GPU that CUDA does not offer{_shown(environment)}. Use as many "
            f"devices as nvidia-smi -L lists, or name one slice (MIG) in {VISIBLE}."
        )
    if "No CUDA GPUs are available" in text or "no CUDA-capable device" in text:
        return ConfigError(
            f"CUDA finds no GPU{_shown(environment)}. Name GPUs that nvidia-smi -L lists, or train "
            f"with accelerator='cpu'."
        )
    return None


def _number(count: int) -> str:
    return {0: "no CUDA device", 1: "one CUDA device"}.get(count, f"{count} CUDA devices")


def _shown(environment: Mapping[str, str]) -> str:
    visible = environment.get(VISIBLE)
    if visible is None:
        return ""
    slices = (
        "; a process uses one slice of a GPU (MIG) at most" if visible.startswith("MIG-") else ""
    )
    return f" ({VISIBLE}={visible}{slices})"


def cores_of(text: str) -> frozenset[int]:
    """Return the cores in a list such as ``0-3,8``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def near_cores(properties: Any, root: Path = PCI) -> frozenset[int]:
    """Return the cores on the same NUMA node as a device; empty if unknown.

    Args:
        properties: The result of ``torch.cuda.get_device_properties``.
        root: Folder in which the kernel lists devices.
    """
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        address += f":{properties.pci_device_id:02x}.0"
        return cores_of((root / address / "local_cpulist").read_text(encoding="ascii"))
    except (AttributeError, OSError, ValueError):
        return frozenset()


class CoreBinding:
    """Binds this process to the cores near its GPU, and stores how many it had before."""

    def __init__(self) -> None:
        self._num_before: int | None = None

    def bind(self, near: frozenset[int]) -> bool:
        """Bind all threads of this process to cores; return whether it was done.

        Nothing changes if a user or a batch system has already chosen cores, or if all cores
        are equally near.
        """
        if not sys.platform.startswith("linux"):
            return False
        before = os.sched_getaffinity(0)
        if len(before) != os.cpu_count() or not near & before or near >= before:
            return False
        self._num_before = len(before)
        for thread in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), near & before)
        return True

    def num_cores(self) -> int:
        """Return the number of cores that the ranks of this host share."""
        if self._num_before is not None:
            return self._num_before
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else (os.cpu_count() or 1)
        )


CORES = CoreBinding()


def gather_topology(device: torch.device) -> Topology:
    """Return the location of all ranks, and the links between GPUs of a host.

    Collective over all ranks.

    Args:
        device: Device of this rank.
    """
    rank = dist.get_rank()
    host, machine = this_host()
    places = gather_objects(RankLocation(host, machine, uuid(device), device.index))
    mine = places[rank]
    later: dict[str, int] = {
        each.device: other
        for other, each in enumerate(places)
        if other > rank and each.machine == machine and each.device is not None
    }
    links = read_links(mine.device, later) if mine.device is not None and later else {}
    own = {(rank, later[other]): link for other, link in links.items()}
    if all(each.device is None for each in places):
        return Topology(places)
    joined: dict[tuple[int, int], Link] = {}
    for each in gather_objects(own):
        joined |= each
    return Topology(places, joined)

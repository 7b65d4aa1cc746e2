"""Facts about this host that need no torch; each is None where it cannot be read."""

import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from boltmesh import __version__
from boltmesh.file_system import file_system_of
from boltmesh.host_memory import cgroup_limit
from boltmesh.process import describe_exit
from boltmesh.telemetry.redaction import redact_mapping

PACKAGES = ("torch", "lightning", "textual", "omegaconf")
OPTIONAL_PACKAGES = ("transformers", "datasets", "safetensors")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not a temporary file
SSHD = Path("/usr/sbin/sshd")
"""Often not on the PATH of users."""
KILL_S = 0.5
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")


@dataclass(frozen=True)
class Gpu:
    """A GPU that NVML shows."""

    name: str
    uuid: str
    memory_bytes: int | None
    memory_used_bytes: int | None


@dataclass(frozen=True)
class Gpus:
    """NVML's description of this host."""

    gpus: tuple[Gpu, ...] = ()
    links: Mapping[str, int] = field(default_factory=dict)
    """Pairs of GPUs by what joins them, the slowest first."""
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver runs."""
    error: str | None = None


@dataclass(frozen=True)
class HostMemory:
    """Host memory and the limits of this process."""

    total_bytes: int
    available_bytes: int
    cgroup_bytes: int | None
    """The limit of the container or job; None: there is none."""
    shared_bytes: int | None
    """Size of /dev/shm."""
    locked_bytes: int | None
    """Soft limit of memory that may be locked; None: unlimited."""


@dataclass(frozen=True)
class Disk:
    """The disk of a folder; of the nearest parent if the folder is missing."""

    folder: str
    purpose: str
    exists: bool
    is_writable: bool
    file_system: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class HostFacts:
    """Everything that the report states."""

    versions: Mapping[str, str | None]
    cores: int
    host: str
    gpus: Gpus
    memory: HostMemory
    open_files: int
    disks: tuple[Disk, ...]
    optional: Mapping[str, str | None]
    """Version or path of a package that is installed; None if it is not."""
    environment: Mapping[str, str]
    probe: Mapping[str, Mapping[str, Any]]
    """By part, as :mod:`boltmesh.doctor.torch_probe` prints it."""
    probe_problem: str | None
    """Why parts of the probe are missing."""


def read_facts(offload_path: Path | None, *, run_dir: Path, timeout_s: float) -> HostFacts:
    """Read everything; what torch knows within ``timeout_s`` from now."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        folders = [] if offload_path is None else [str(offload_path)]
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "boltmesh.doctor.torch_probe", *folders],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        end = time.monotonic() + timeout_s
        gpus = read_gpus()
        memory = read_memory()
        disks = [read_disk(run_dir, "runs")]
        if offload_path is not None:
            disks.append(read_disk(offload_path, "offload"))
        code = _wait(process, max(0.0, end - time.monotonic()))
        output.seek(0)
        errors.seek(0)
        probe = parse_probe(output.read().decode(errors="replace"))
        last_lines = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    if code is None:
        problem: str | None = f"not tested within {timeout_s:g} s; run it again"
    else:
        ended = f"the process that loads torch {describe_exit(code)}"
        problem = ": ".join([ended, *last_lines]) if code else None
    versions: dict[str, str | None] = {"boltmesh": __version__, "python": platform.python_version()}
    return HostFacts(
        versions=versions | {name: installed_version(name) for name in PACKAGES},
        cores=_num_cores(),
        host=platform.platform(),
        gpus=gpus,
        memory=memory,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disks=tuple(disks),
        optional=read_optional(),
        environment=read_environment(os.environ),
        probe=probe,
        probe_problem=problem,
    )


def _wait(process: subprocess.Popen[bytes], wait_s: float) -> int | None:
    """Return the exit code, or None for a process that took too long and was killed."""
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)  # a driver call may hold it for good
    return None


def parse_probe(text: str) -> dict[str, dict[str, Any]]:
    """Return the parts that were printed whole; libraries may print between them."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            facts = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(facts, dict) and "part" in facts:
            found[facts.pop("part")] = facts
    return found


def installed_version(package: str) -> str | None:
    """Return the version that is installed, without importing the package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_gpus(nvml: ModuleType | None = None) -> Gpus:
    """Return the GPUs that NVML reports. Loads the driver's library."""
    try:
        import pynvml

        from boltmesh.strategies.topology.links import read_links
        from boltmesh.tui.devices.gpu import Gpu as GpuReader
    except ImportError as error:
        return Gpus(error=str(error))
    nvml = pynvml if nvml is None else nvml
    gpus: list[Gpu] = []
    errors = []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(error=str(error))
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                uuid = str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(number)))
                reading = GpuReader(nvml, uuid).read(())
            except nvml.NVMLError as error:  # one that has fallen off the bus
                errors.append(f"GPU {number}: {error}")
                continue
            used, total = reading.memory_used_bytes, reading.memory_total_bytes
            gpus.append(Gpu(reading.name, uuid, total, used))
    except nvml.NVMLError as error:
        return Gpus(error=str(error))
    finally:
        nvml.nvmlShutdown()
    uuids = [gpu.uuid for gpu in gpus]
    links = {uuid: read_links(uuid, uuids[at + 1 :], nvml) for at, uuid in enumerate(uuids)}
    pairs = Counter(
        links[one][other] for one, other in combinations(uuids, 2) if other in links[one]
    )
    return Gpus(
        gpus=tuple(gpus),
        links={link.words: pairs[link] for link in sorted(pairs)},
        driver=driver,
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        error="; ".join(errors) or None,
    )


def read_memory() -> HostMemory:
    """Return host memory and its limits."""
    memory = psutil.virtual_memory()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None
    return HostMemory(
        total_bytes=memory.total,
        available_bytes=memory.available,
        cgroup_bytes=cgroup_limit(),
        shared_bytes=shared,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
    )


def read_disk(folder: Path, purpose: str) -> Disk:
    """Return what is known of the disk that ``folder`` is on, or would be on."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    return Disk(
        folder=str(folder.absolute()),
        purpose=purpose,
        exists=folder.is_dir(),
        is_writable=os.access(existing, os.W_OK),
        file_system=file_system_of(existing),
        free_bytes=usage.free,
        total_bytes=usage.total,
    )


def read_optional() -> dict[str, str | None]:
    """Return the version or the path of what boltmesh can use."""
    sshd = shutil.which("sshd") or (str(SSHD) if SSHD.exists() else None)
    return {name: installed_version(name) for name in OPTIONAL_PACKAGES} | {
        "ssh": shutil.which("ssh"),
        "sshd": sshd,
    }


def read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how ranks communicate or which devices they see.

    Without secrets.
    """
    return redact_mapping(
        {
            name: value
            for name, value in sorted(environment.items())
            if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
        }
    )


def _num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""What will and what will not work on a host: plain functions over its facts."""

from collections.abc import Iterator
from dataclasses import dataclass

from boltmesh.doctor.host import SHARED_MEMORY, HostFacts
from boltmesh.file_system import IN_MEMORY
from boltmesh.tui import units

ENOUGH_SHARED_BYTES = 1 << 30
"""Below this, a few batches of loader workers fill /dev/shm."""
ENOUGH_FILES = 1024
LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One conclusion."""

    subject: str
    works: bool | None
    """None: it works with a limit that the text names, or was not tested."""
    text: str


def conclude(facts: HostFacts) -> list[Finding]:
    """Return all conclusions, the basis of the others first."""
    return [
        *_torch(facts),
        *_devices(facts),
        *_offload(facts),
        *_host(facts),
        *_optional(facts),
    ]


def _error(facts: HostFacts, part: str) -> str | None:
    """Return why a part is not known to work; None if it is."""
    if part in facts.probe:
        error = facts.probe[part].get("error")
        return None if error is None else str(error)
    torch = facts.probe.get("torch", {})
    if "error" in torch:
        return "torch does not load"
    return facts.probe_problem or "not tested"


def _torch(facts: HostFacts) -> Iterator[Finding]:
    for name in ("torch", "lightning"):
        version = facts.versions[name]
        error = _error(facts, name)
        if version is None:
            yield Finding(name, False, f"not installed. Run: pip install {name}")
        elif error is None:
            yield Finding(name, True, f"{facts.probe[name].get('version', version)} loads")
        else:
            is_tested = name in facts.probe or "error" in facts.probe.get("torch", {})
            text = f"{version} does not load: {error}" if is_tested else f"{version}: {error}"
            yield Finding(name, False if is_tested else None, text)
    error = _error(facts, "gloo")
    yield Finding(
        "several processes",
        None if error is not None and "gloo" not in facts.probe else error is None,
        "works on the CPU over gloo" if error is None else f"gloo: {error}",
    )
    error = _error(facts, "telemetry")
    uncounted = facts.probe.get("telemetry", {}).get("uncounted")
    if error is not None:
        is_tested = "telemetry" in facts.probe
        text = f"collectives are not counted: {error}"
        yield Finding("telemetry", False if is_tested else None, text)
    elif uncounted:
        yield Finding("telemetry", None, f"works, but does not count {', '.join(uncounted)}")
    else:
        yield Finding("telemetry", True, "works, the self-test of the collective hook passes")


def _devices(facts: HostFacts) -> Iterator[Finding]:
    subject = "several GPUs"
    cuda = facts.probe.get("cuda", {})
    seen, shown = int(cuda.get("devices", 0)), len(facts.gpus.gpus)
    is_cpu_build = facts.probe.get("torch", {}).get("cuda") is None
    error = _error(facts, "cuda")
    if seen > 1:
        links = ", ".join(facts.gpus.links) or "links that NVML does not show"
        has_nccl = bool(facts.probe.get("backends", {}).get("nccl"))
        text = f"work, {seen} CUDA devices joined by {links}"
        yield Finding(subject, has_nccl, text if has_nccl else "this torch has no NCCL")
    elif seen == 1:
        yield Finding("GPU", True, f"works, {cuda['names'][0]}")
        yield Finding(subject, False, "one CUDA device is here")
    elif shown and is_cpu_build and "cuda" in facts.probe:
        yield Finding(
            subject,
            False,
            f"NVML shows {shown} and this torch is built for the CPU. Install torch for CUDA "
            f"{facts.gpus.cuda} or older (pytorch.org/get-started)",
        )
    elif shown and "cuda" not in facts.probe:
        yield Finding(subject, None, f"NVML shows {shown}; torch: {error}")
    elif shown:
        reason = error or "; ".join(cuda.get("warnings", [])) or "hidden from this process"
        yield Finding(subject, False, f"NVML shows {shown} and torch finds none: {reason}")
    else:
        yield Finding(subject, False, "no CUDA device found")


def _offload(facts: HostFacts) -> Iterator[Finding]:
    memory = facts.memory
    available = units.memory(memory.available_bytes)
    yield Finding("offload to host memory", True, f"works, {available} available")
    disk = next((disk for disk in facts.disks if disk.purpose == "offload"), None)
    subject = "offload to NVMe"
    if disk is None:
        yield Finding(subject, None, "not tested; --offload-path FOLDER tests one")
        return
    part = f"offload to {disk.folder}"
    error = _error(facts, part)
    free = f"{units.memory(disk.free_bytes)} free"
    if error is not None:
        yield Finding(subject, False if part in facts.probe else None, error)
    elif disk.file_system in IN_MEMORY:
        text = f"{disk.folder} is host memory ({disk.file_system}), not a disk"
        yield Finding(subject, None, f"works, but {text}")
    elif facts.probe[part]["is_direct"]:
        text = f"works, direct I/O on {disk.folder} ({disk.file_system}), {free}"
        yield Finding(subject, True, text)
    else:
        yield Finding(
            subject,
            None,
            f"works, but {disk.file_system} refuses direct I/O on {disk.folder}: transfers go "
            f"through the page cache and take host memory; {free}",
        )


def _host(facts: HostFacts) -> Iterator[Finding]:
    runs = next(disk for disk in facts.disks if disk.purpose == "runs")
    if not runs.is_writable:
        yield Finding("checkpoints", False, f"{runs.folder} cannot be written. Set run.dir")
    elif runs.free_bytes < LEAST_FREE_BYTES:
        free = units.memory(runs.free_bytes)
        yield Finding("checkpoints", None, f"{free} free in {runs.folder}. Set run.dir")
    shared = facts.memory.shared_bytes
    if shared is not None and shared < ENOUGH_SHARED_BYTES:
        yield Finding(
            "data loader workers",
            None,
            f"{SHARED_MEMORY} has {units.memory(shared)}, and large batches of workers end in a "
            f"bus error. Start the container with --shm-size=8g, or set num_workers to 0",
        )
    if 0 <= facts.open_files < ENOUGH_FILES:
        yield Finding(
            "open files", None, f"the limit is {facts.open_files}. Run: ulimit -n {ENOUGH_FILES}"
        )


def _optional(facts: HostFacts) -> Iterator[Finding]:
    extras = {
        "transformers": "examples/causal_lm.py",
        "datasets": "Hugging Face datasets in examples/text.py",
        "safetensors": "boltmesh import of safetensors files",
    }
    for name, use in extras.items():
        if facts.optional[name] is None:
            text = f"not installed: no {use}. Run: pip install 'boltmesh[{name}]'"
            yield Finding(name, False, text)
    if facts.optional["ssh"] is None:
        yield Finding("boltmesh top --ssh", False, "no ssh here: jobs of other hosts are not shown")
    if facts.optional["sshd"] is None:
        text = "no sshd here: other hosts cannot show its jobs"
        yield Finding("boltmesh top --ssh of this host", False, text)

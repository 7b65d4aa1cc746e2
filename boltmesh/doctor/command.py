"""The command: reads the facts of a host, and prints what will and will not work."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from boltmesh.doctor.host import SHARED_MEMORY, HostFacts, read_facts
from boltmesh.file_system import IN_MEMORY
from boltmesh.tui import units
from boltmesh.tui.commands.console import print_line, terminal_look, width
from boltmesh.tui.render.style import Style, sentence

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


RUN_DIR = Path("runs")
"""The default of run.dir."""
TORCH_S = 7.0
"""Time for torch to load and be tested, so that the whole takes less than ten seconds."""
_LABEL_WIDTH = 13


def doctor(*, offload_path: Path | None, as_json: bool, ascii_only: bool) -> int:
    """Print the report; always returns 0, for a fault of the host is a result."""
    folder = None if offload_path is None else offload_path.absolute()
    facts = read_facts(folder, run_dir=RUN_DIR, timeout_s=TORCH_S)
    findings = conclude(facts)
    if as_json:
        data = {"schema": 1} | asdict(facts) | {"findings": [asdict(item) for item in findings]}
        print_line(json.dumps(data))
    else:
        look = terminal_look(ascii_only=ascii_only)
        print_line("\n".join(report_lines(facts, findings, width(), look)))
    return 0


def report_lines(facts: HostFacts, findings: list[Finding], width: int, look: Style) -> list[str]:
    """Return the report, no line longer than ``width``."""
    rows = [*_rows(facts), ("", "")]
    for finding in findings:
        sign = {True: "ok", False: "no", None: "note"}[finding.works]
        rows.append((sign, f"{finding.subject}: {finding.text}."))
    return [
        line.plain.rstrip()
        for label, text in rows
        for line in sentence(text, width, look, mark=label.ljust(_LABEL_WIDTH), max_lines=6)
    ]


def _rows(facts: HostFacts) -> Iterator[tuple[str, str]]:
    versions = (f"{name} {found}" for name, found in facts.versions.items() if found)
    yield "versions", ", ".join(versions)
    yield "host", f"{facts.host}, {facts.cores} cores"
    yield "GPUs", _gpus(facts)
    if facts.gpus.links:
        pairs = (f"{words} {count}" for words, count in facts.gpus.links.items())
        yield "links", f"pairs of GPUs: {', '.join(pairs)}"
    yield "backends", _backends(facts)
    yield "memory", _memory(facts)
    yield "limits", _limits(facts)
    for disk in facts.disks:
        missing = "" if disk.exists else ", not there yet"
        free, total = units.memory(disk.free_bytes), units.memory(disk.total_bytes)
        text = f"{disk.folder} ({disk.file_system}{missing}), {free} free of {total}"
        yield f"{disk.purpose} disk", text
    optional = (f"{name} {found or '-'}" for name, found in facts.optional.items())
    yield "optional", ", ".join(optional)
    if facts.environment:
        yield "environment", " ".join(f"{key}={value}" for key, value in facts.environment.items())


def _gpus(facts: HostFacts) -> str:
    found = facts.gpus
    if not found.gpus:
        return f"none ({found.error})" if found.error else "none"
    gpus = ", ".join(
        f"{gpu.name} {units.memory(gpu.memory_bytes)} ({units.memory(gpu.memory_used_bytes)} used)"
        for gpu in found.gpus
    )
    lost = f"; {found.error}" if found.error else ""
    return f"{gpus}{lost}; driver {found.driver}, CUDA up to {found.cuda}"


def _backends(facts: HostFacts) -> str:
    found = facts.probe.get("backends", {})
    names = [name for name in ("gloo", "nccl", "mpi") if name in found]
    parts = [f"{name} {'yes' if found[name] else 'no'}" for name in names]
    if "nccl_version" in found:
        parts.append(f"NCCL {found['nccl_version']}")
    torch = facts.probe.get("torch", {})
    if "error" not in torch and torch:
        parts.append(f"torch for {'CUDA ' + torch['cuda'] if torch['cuda'] else 'the CPU'}")
    return ", ".join(parts) or f"not known: {facts.probe_problem or 'torch does not load'}"


def _memory(facts: HostFacts) -> str:
    memory = facts.memory
    limit = memory.cgroup_bytes
    text = f"{units.memory(memory.available_bytes)} available of {units.memory(memory.total_bytes)}"
    return f"{text}, cgroup limit {'none' if limit is None else units.memory(limit)}"


def _limits(facts: HostFacts) -> str:
    locked = facts.memory.locked_bytes
    return (
        f"locked memory {'unlimited' if locked is None else units.memory(locked)}, open files "
        f"{facts.open_files if facts.open_files >= 0 else 'unlimited'}, /dev/shm "
        f"{units.memory(facts.memory.shared_bytes)}"
    )

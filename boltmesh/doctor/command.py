"""The command: reads the facts, and prints them with what follows from them."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from boltmesh.doctor.findings import Finding, conclude
from boltmesh.doctor.host import HostFacts, read_facts
from boltmesh.tui import units
from boltmesh.tui.commands.console import print_line, terminal_look, width
from boltmesh.tui.render.style import Style, sentence

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

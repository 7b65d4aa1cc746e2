"""What one GPU can show of boltmesh, in parts of nine minutes at most.

``python -m tests.gpu.campaign [--part N] [--dry-run] --out DIR`` prints a table for each part and
writes ``DIR/part-N.json``. It needs no package index, see ``make gpu-bundle``. ``--dry-run`` runs
every part at tiny sizes with the CPU in place of the GPU.

Several ranks share the GPU: NCCL refuses that for ranks of one host, and a host id of its own for
each rank makes it send over sockets. A first trial of two ranks decides; where it fails, ranks use
gloo, and pipelines, whose messages gloo cannot send from a GPU, are left out.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PART_S = 540.0
"""Seconds that a part may take; what has not begun by then is left out, and said."""

NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}
"""Lets ranks on one GPU reach each other over sockets of the host alone."""

SMALL = {"width": 512, "layers": 8, "words": 4096, "heads": 8}
TINY = {"width": 32, "layers": 4, "words": 64, "heads": 2}
GPT_1B = {"width": 2048, "layers": 24, "words": 50304, "heads": 16}
GPT_7B = {"width": 4096, "layers": 32, "words": 32000, "heads": 32}
GPT_6B = {"width": 4096, "layers": 28, "words": 32000, "heads": 32}
GPT_4B = {"width": 3072, "layers": 32, "words": 32000, "heads": 24}
GPT_14B = {"width": 5120, "layers": 44, "words": 32000, "heads": 40}


@dataclass
class Row:
    """One line of the table."""

    name: str
    found: dict[str, Any]
    goal: str = ""
    is_met: bool | None = None
    """None: a figure without a goal."""


@dataclass
class Campaign:
    """Where and how the parts run.

    Args:
        out: Folder for files.
        is_dry: The CPU takes the place of the GPU, at tiny sizes.
    """

    out: Path
    is_dry: bool = False
    deadline: float = 0.0
    _backend: str | None = field(default=None, repr=False)

    def sizes(self, real: dict[str, int]) -> dict[str, int]:
        """Return the sizes of a model, tiny ones in a dry run."""
        return TINY if self.is_dry else real

    def environment(self, rank: int = 0, world_size: int = 1, port: int = 0) -> dict[str, str]:
        """Return the environment of a rank; on a GPU each is a host of its own to NCCL."""
        made = {**os.environ, "BOLTMESH_CAMPAIGN": "cpu" if self.is_dry else "cuda"}
        if world_size == 1:
            return made
        made.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size), NODE_RANK="0", GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="campaign",
            OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // world_size)),
        )  # fmt: skip
        if not self.is_dry:
            made.update(NCCL, NCCL_HOSTID=str(rank))
        return made

    def measure(self, name: str, arguments: dict[str, Any], world_size: int = 1) -> dict[str, Any]:
        """Run a measurement in ``world_size`` processes; return what the first one found.

        ``error`` is the reason where one failed or took too long.
        """
        seconds = self.deadline - time.monotonic()
        if seconds < 5.0:
            return {"error": "left out: the time of the part was over"}
        port = free_port()
        command = [sys.executable, "-m", "tests.gpu.measure", name, json.dumps(arguments)]
        ranks = [
            subprocess.Popen(
                command, env=self.environment(rank, world_size, port), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        found: list[dict[str, Any]] = []
        try:
            for each in ranks:
                left = max(1.0, self.deadline - time.monotonic())
                out, error = each.communicate(timeout=left)
                found.append(result_of(out, error, each.returncode))
        except subprocess.TimeoutExpired:
            found.append({"error": "took longer than the part may"})
        finally:
            for each in ranks:
                if each.poll() is None:
                    each.kill()
                each.wait()
        return next((each for each in found if "error" in each), found[0])

    def backend(self) -> str:
        """Return what several ranks communicate by, tried once."""
        if self._backend is None:
            wanted = "gloo" if self.is_dry else "nccl"
            tried = self.measure("smoke", {"backend": wanted}, 2)
            self._backend = wanted if tried.get("is_right") else "gloo"
        return self._backend


def result_of(out: str, error: str, code: int) -> dict[str, Any]:
    """Return what a measurement printed as its last line, or why it failed."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    last = next((each for each in reversed(error.splitlines()) if each.strip()), "no output")
    return {"error": f"exit code {code}: {last[:300]}"}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def the_machine(campaign: Campaign) -> Iterator[Row]:
    """Rates of memory, bus and disk, and whether ranks can share the GPU."""
    num_bytes = 1 << 20 if campaign.is_dry else 4 << 30
    yield Row(
        "machine",
        campaign.measure("machine", {"num_bytes": num_bytes, "folder": str(campaign.out)}),
    )
    yield Row("several ranks", {"backend": campaign.backend()})


def one_rank(campaign: Campaign) -> Iterator[Row]:
    """The tests of this folder."""
    chosen = ["tests/gpu/test_steps_gpu.py"] if campaign.is_dry else ["tests/gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    if campaign.is_dry:
        command += ["-k", "seed or keyword"]
    report = campaign.out / "one-rank.txt"
    left = max(1.0, campaign.deadline - time.monotonic())
    try:
        done = subprocess.run(
            command, env=campaign.environment(), capture_output=True, text=True, check=False,
            timeout=left,
        )  # fmt: skip
        report.write_text(done.stdout + done.stderr, encoding="utf-8")
        lines = [each for each in done.stdout.splitlines() if " in " in each]
        found: dict[str, Any] = {"result": lines[-1].strip("= ") if lines else "no result"}
        yield Row("pytest", found, "all pass", done.returncode == 0)
    except subprocess.TimeoutExpired:
        yield Row("pytest", {"error": f"took longer than {left:.0f} s"}, "all pass", is_met=False)


ZERO = {"name": "ZeROStrategy"}
PIPELINE = {"name": "PipelineParallelStrategy", "microbatches": 8}
TENSOR = {"name": "TensorParallelStrategy"}
CPU = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("ddp", 2, 2, {"name": "DDPStrategy"}),
    ("zero1", 2, 2, {**ZERO, "stage": 1}),
    ("zero2", 2, 2, {**ZERO, "stage": 2}),
    ("zero3", 2, 2, {**ZERO, "stage": 3}),
    ("zero3_cpu", 2, 2, {**ZERO, "stage": 3, **CPU}),
    ("1f1b", 2, 1, PIPELINE),
    ("zero_bubble", 2, 1, {**PIPELINE, "schedule": "zero_bubble"}),
    ("zbv", 2, 1, {**PIPELINE, "schedule": "zbv"}),
    ("1f1b of 4", 4, 1, PIPELINE),
    ("tensor", 2, 1, TENSOR),
    ("tensor of 4", 4, 1, TENSOR),
    ("3d", 8, 2, {"name": "Parallel3DStrategy", "pipeline": 2, "tensor": 2, "microbatches": 4}),
]
"""Name, ranks, ranks with batches of their own, and the strategy."""


def many_ranks(campaign: Campaign) -> Iterator[Row]:
    """Ranks on one GPU end with the parameters of one process."""
    common = {
        "sizes": campaign.sizes(SMALL), "length": 16 if campaign.is_dry else 128, "batch": 16,
        "steps": 4 if campaign.is_dry else 12, "precision": "32-true", "optimizer": "sgd",
        "backend": campaign.backend(), "on_host": True,
    }  # fmt: skip
    alone = campaign.measure("rank", {**common, "strategy": {"name": "plain"}})
    yield Row("one process", {key: alone[key] for key in alone if key != "norms"})
    cases = [each for each in CASES if each[0] in {"ddp", "1f1b"}] if campaign.is_dry else CASES
    for name, size, data, spec in cases:
        if not campaign.is_dry and campaign.backend() == "gloo" and "microbatches" in spec:
            yield Row(name, {"error": "left out: gloo sends nothing from a GPU to the next stage"})
            continue
        found = campaign.measure("rank", {**common, "data": data, "strategy": spec}, size)
        if "error" in found or "error" in alone:
            yield Row(name, found, "as one process", is_met=False)
            continue
        pairs = zip(found["norms"], alone["norms"], strict=True)
        apart = max(abs(one - other) / max(abs(other), 1e-6) for one, other in pairs)
        yield Row(name, {"apart": apart}, "apart <= 1e-3", apart <= 1e-3)


def speed(campaign: Campaign) -> Iterator[Row]:
    """GPT 1.3B: telemetry, compiled blocks and ZeRO-3 beside plain Lightning."""
    common = {
        "sizes": campaign.sizes(GPT_1B), "batch": 8, "length": 16 if campaign.is_dry else 2048,
        "steps": 6 if campaign.is_dry else 20,
    }  # fmt: skip
    ddp = {"name": "DDPStrategy"}
    cases: dict[str, dict[str, Any]] = {
        "plain Lightning": {"name": "plain"},
        "ddp without telemetry": {**ddp, "telemetry": False},
        "ddp": ddp,
        "ddp, compiled blocks": {**ddp, "compile_blocks": True},
        "zero3": {**ZERO, "stage": 3},
    }
    if campaign.is_dry:
        del cases["ddp, compiled blocks"]  # a minute of a C++ compiler
    found = {}
    for name, spec in cases.items():
        found[name] = campaign.measure("fit", {**common, "strategy": spec})
        yield Row(name, found[name])
    seconds = {name: each.get("step_s") for name, each in found.items()}
    yield ratio("telemetry", seconds, "ddp", "ddp without telemetry", 1.02)
    yield ratio("zero3 beside plain Lightning", seconds, "zero3", "plain Lightning", 1.02)
    mfu = found.get("ddp, compiled blocks", {}).get("mfu")
    if mfu is not None:
        yield Row("MFU with compiled blocks", {"mfu": mfu}, ">= 0.40", mfu >= 0.40)


def ratio(name: str, seconds: dict[str, float | None], one: str, other: str, most: float) -> Row:
    """Return the row of a ratio of two times."""
    first, second = seconds.get(one), seconds.get(other)
    if first is None or second is None:
        return Row(name, {"error": "not measured"}, f"<= {most}", is_met=False)
    return Row(name, {"ratio": first / second}, f"<= {most}", first / second <= most)


def offload(campaign: Campaign) -> Iterator[Row]:
    """6.7B with the optimizer on the host, beside FSDP2's own offload."""
    common = {
        "sizes": campaign.sizes(GPT_7B), "batch": 8, "length": 16 if campaign.is_dry else 2048,
        "steps": 6,
    }  # fmt: skip
    checkpointed = {"activation_checkpointing": "full"}
    spec = {**ZERO, "stage": 3, "offload_optimizer": "cpu", **checkpointed}
    ours = campaign.measure("fit", {**common, "strategy": spec})
    yield Row("zero3, optimizer on the host", ours)
    theirs = campaign.measure("fsdp2_offload", {**common, "steps": 4})
    yield Row("FSDP2 CPUOffloadPolicy", theirs)
    if "error" not in ours and "error" not in theirs:
        times = ours["tokens_per_s"] / theirs["tokens_per_s"]
        yield Row("beside FSDP2", {"ratio": times}, ">= 1.3", times >= 1.3)


def largest(campaign: Campaign) -> Iterator[Row]:
    """Models larger than the GPU's or the host's memory alone."""
    common = {
        "batch": 4, "length": 16 if campaign.is_dry else 2048, "folder": str(campaign.out),
        "steps": 6,
    }  # fmt: skip
    base = {**ZERO, "stage": 3, "activation_checkpointing": "full"}
    cases = [
        ("host alone, 5.8B", GPT_6B, {**base, **CPU}, 6),
        ("disk alone, 3.8B", GPT_4B,
         {**base, "offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_path": ""},
         5),
        ("three tiers, 14B", GPT_14B,
         {**base, "offload_optimizer": "nvme", "offload_path": "",
          "offload_fraction": {"host": 0.25, "disk": 0.33}}, 5),
    ]  # fmt: skip
    for name, sizes, spec, steps in cases:
        found = campaign.measure(
            "fit",
            {**common, "sizes": campaign.sizes(sizes), "strategy": spec, "steps": steps},
        )
        growth = found.get("growth_gb", 0.0)
        is_flat = "error" not in found and growth < 0.5
        yield Row(name, found, "trains, memory flat", is_flat)


PARTS: list[Callable[[Campaign], Iterator[Row]]] = [
    the_machine, one_rank, many_ranks, speed, offload, largest,
]  # fmt: skip


def run_part(number: int, campaign: Campaign) -> list[Row]:
    """Run a part, print its table and write its file. Numbers begin with 1."""
    part = PARTS[number - 1]
    begin = time.monotonic()
    campaign.deadline = begin + PART_S
    print(f"part {number}: {(part.__doc__ or '').strip()}", flush=True)
    rows = []
    for row in part(campaign):
        rows.append(row)
        print(described(row), flush=True)
    written = {
        "part": part.__name__,
        "is_dry": campaign.is_dry,
        "seconds": time.monotonic() - begin,
        "rows": [vars(row) for row in rows],
    }
    path = campaign.out / f"part-{number}.json"
    path.write_text(json.dumps(written, indent=1), encoding="utf-8")
    return rows


def described(row: Row) -> str:
    """Return a line of the table."""
    shown = "  ".join(f"{name}={_short(value)}" for name, value in row.found.items())
    mark = {None: " ", True: "+", False: "!"}[row.is_met]
    return f"{mark} {row.name:34} {row.goal:20} {shown}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"[{len(value)}]" if isinstance(value, list) else str(value)


def main() -> None:
    """Run the parts that the arguments name; the exit code is 1 where a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.campaign", description=__doc__)
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(given.out, is_dry=given.dry_run)
    numbers = [given.part] if given.part else range(1, len(PARTS) + 1)
    rows = [row for number in numbers for row in run_part(number, campaign)]
    sys.exit(any(row.is_met is False for row in rows))


if __name__ == "__main__":
    main()

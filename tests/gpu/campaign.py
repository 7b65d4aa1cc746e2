"""What one GPU can show of boltmesh, in parts of nine minutes at most.

``python -m tests.gpu.campaign [--part N] [--dry-run] --out DIR`` prints a table for each part and
writes ``DIR/part-N.json``. It needs no package index, see ``make gpu-bundle``. ``--dry-run`` runs
every part at tiny sizes with the CPU in place of the GPU.

Several ranks share the GPU: NCCL refuses that for ranks of one host, and a host id of its own for
each rank makes it send over sockets. A first trial of two ranks decides; where it fails, ranks use
gloo, and pipelines, whose messages gloo cannot send from a GPU, are left out.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PART_S = 540.0
"""Seconds that a part may take; what has not begun by then is left out, and said."""

CONCURRENT_CASES = 4
"""Cases of several ranks that run beside each other."""

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
    _prestarted: "list[Prestarted]" = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def sizes(self, real: dict[str, int]) -> dict[str, int]:
        """Return the sizes of a model, tiny ones in a dry run."""
        return TINY if self.is_dry else real

    def environment(self, rank: int = 0, world_size: int = 1, port: int = 0) -> dict[str, str]:
        """Return the environment of a rank; on a GPU each is a host of its own to NCCL."""
        made = {**os.environ, "BOLTMESH_CAMPAIGN": "cpu" if self.is_dry else "cuda"}
        if self.is_dry:
            made["CUDA_VISIBLE_DEVICES"] = ""
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
        ranks = [self._next() for _ in range(world_size)]
        for rank, each in enumerate(ranks):
            each.run(name, arguments, self.environment(rank, world_size, port))
        codes = [each.process.poll() for each in ranks]
        while None in codes and not any(codes) and time.monotonic() < self.deadline:
            time.sleep(0.1)  # where one has failed, others may wait for it
            codes = [each.process.poll() for each in ranks]
        is_late = None in codes and not any(codes)
        texts = [each.end() for each in ranks]
        for rank, (out, errors) in enumerate(texts):
            self._keep_log(f"{name} {arguments} rank {rank} of {world_size}", out + errors)
        if is_late:
            return {"error": "took longer than the part may"}
        failed = [number for number, code in enumerate(codes) if code]
        found = [
            result_of(*texts[number], ranks[number].process.returncode)
            for number in failed or range(world_size)
        ]
        return next((each for each in found if "error" in each), found[0])

    def prepare(self, count: int) -> None:
        """Start processes that import what measurements need before their turn comes."""
        with self._lock:
            self._prestarted += [Prestarted() for _ in range(count - len(self._prestarted))]

    def _next(self) -> "Prestarted":
        with self._lock:
            return self._prestarted.pop(0) if self._prestarted else Prestarted()

    def _keep_log(self, title: str, text: str) -> None:
        with self._lock, (self.out / "logs.txt").open("a", encoding="utf-8") as file:
            file.write(f"==== {title}\n{text[-20_000:]}\n")

    def close(self) -> None:
        """End processes that got no measurement."""
        while self._prestarted:
            self._prestarted.pop().end()

    def backend(self) -> str:
        """Return what several ranks communicate by, tried once."""
        if self._backend is None:
            wanted = "gloo" if self.is_dry else "nccl"
            tried = self.measure("smoke", {"backend": wanted}, 2)
            self._backend = wanted if tried.get("is_right") else "gloo"
        return self._backend


class Prestarted:
    """A process that imports ahead, and waits for the measurement that it shall run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._texts = Path(self._folder.name, "out"), Path(self._folder.name, "errors")
        with self._texts[0].open("w") as out, self._texts[1].open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.measure"], text=True,
                stdin=subprocess.PIPE, stdout=out, stderr=errors,
            )  # fmt: skip

    def run(self, name: str, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        """Let it run a measurement in an environment of its own."""
        asked = {"name": name, "arguments": arguments, "environment": environment}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked))
        self.process.stdin.close()

    def end(self) -> tuple[str, str]:
        """Kill it unless it has ended; return what it has printed, and its errors."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        out, errors = (each.read_text("utf-8", errors="replace") for each in self._texts)
        self._folder.cleanup()
        return out, errors


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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark",
               *chosen]  # fmt: skip
    command += ["-k", "seed or keyword"] if campaign.is_dry else ["-n", "8", "-rfE"]
    report = campaign.out / "one-rank.txt"
    left = max(1.0, campaign.deadline - time.monotonic())
    with report.open("w", encoding="utf-8") as file:
        tests = subprocess.Popen(
            command, env=campaign.environment(), stdout=file, stderr=subprocess.STDOUT
        )
        try:
            tests.wait(timeout=left)
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)  # prints what has failed so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                tests.wait(timeout=20)
            tests.kill()
            tests.wait()
    lines = [each for each in report.read_text("utf-8").splitlines() if " in " in each]
    found: dict[str, Any] = {"result": lines[-1].strip("= ") if lines else "no result"}
    yield Row("pytest", found, "all pass", tests.returncode == 0)


ZERO = {"name": "ZeROStrategy"}
PIPELINE = {"name": "PipelineParallelStrategy", "microbatches": 8}
TENSOR = {"name": "TensorParallelStrategy"}
MESH = {"name": "Parallel3DStrategy", "microbatches": 4}
CPU = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
NVME = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_path": ""}
ZERO1_CPU = {"zero_stage": 1, "offload_optimizer": "cpu"}
CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("ddp", 2, 2, {"name": "DDPStrategy"}),
    ("zero1", 2, 2, {**ZERO, "stage": 1}),
    ("zero2", 2, 2, {**ZERO, "stage": 2}),
    ("zero3", 2, 2, {**ZERO, "stage": 3}),
    ("zero3 of 4, shards of 2", 4, 4, {**ZERO, "stage": 3, "shard_size": 2}),
    ("zero3_cpu", 2, 2, {**ZERO, "stage": 3, **CPU}),
    ("zero3_nvme", 2, 2, {**ZERO, "stage": 3, **NVME}),
    ("1f1b", 2, 1, PIPELINE),
    ("interleaved_1f1b", 2, 1, {**PIPELINE, "schedule": "interleaved_1f1b"}),
    ("zero_bubble", 2, 1, {**PIPELINE, "schedule": "zero_bubble"}),
    ("zbv", 2, 1, {**PIPELINE, "schedule": "zbv"}),
    ("1f1b of 4", 4, 1, PIPELINE),
    ("zero_bubble of 4", 4, 1, {**PIPELINE, "schedule": "zero_bubble"}),
    ("zbv of 4", 4, 1, {**PIPELINE, "schedule": "zbv"}),
    ("tensor", 2, 1, TENSOR),
    ("tensor of 4", 4, 1, TENSOR),
    ("3d", 8, 2, {**MESH, "pipeline": 2, "tensor": 2}),
    ("3d, zero1_cpu", 8, 2, {**MESH, "pipeline": 2, "tensor": 2, **ZERO1_CPU}),
    ("context", 2, 1, {"name": "ContextParallelStrategy"}),
    ("context of 4, ring", 4, 1, {"name": "ContextParallelStrategy", "attention": "ring"}),
    ("context beside a pipeline", 4, 1, {**MESH, "pipeline": 2, "context": 2}),
    ("compiled blocks, zero3", 2, 2, {**ZERO, "stage": 3, "compile_blocks": True}),
    ("compiled blocks, tensor", 2, 1, {**TENSOR, "compile_blocks": True}),
    (
        "compiled blocks, 3d",
        4,
        2,
        {"name": "Parallel3DStrategy", "tensor": 2, "zero_stage": 3, "compile_blocks": True},
    ),
    ("experts", 2, 2, {**ZERO, "stage": 2, "expert": 2}),
    ("experts, zero3", 4, 4, {**ZERO, "stage": 3, "expert": 2}),
    ("experts beside a pipeline", 4, 2, {**MESH, "pipeline": 2, "expert": 2}),
    ("experts, compiled blocks", 2, 2, {**ZERO, "stage": 2, "expert": 2, "compile_blocks": True}),
    (
        "experts divided beside tensor",
        4,
        2,
        {"name": "Parallel3DStrategy", "tensor": 2, "expert": 2, "expert_tensor": "tensor"},
    ),
]
"""Name, ranks, ranks with batches of their own, and the strategy."""

IN_BF16 = {"zero3", "1f1b", "tensor", "3d", "context"}
"""Cases that are run in bf16-mixed too."""

DRY_CASES = {"ddp", "1f1b, bf16", "context", "experts"}

NUM_PRESTARTED = 15
"""Processes started ahead for cases of several ranks."""


def many_ranks(campaign: Campaign) -> Iterator[Row]:
    """Ranks on one GPU end with the parameters of one process, and move what is expected."""
    common: dict[str, Any] = {
        "length": 16 if campaign.is_dry else 128, "batch": 16,
        "steps": 4 if campaign.is_dry else 12, "optimizer": "sgd",
        "backend": campaign.backend(), "on_host": True,
    }  # fmt: skip
    cases = [(*each, "32-true") for each in CASES]
    cases += [(f"{each[0]}, bf16", *each[1:], "bf16-mixed") for each in CASES if each[0] in IN_BF16]
    chosen = [each for each in cases if each[0] in DRY_CASES or not campaign.is_dry]
    if campaign.backend() == "gloo" and not campaign.is_dry:
        left_out = [each for each in chosen if "microbatches" in each[3]]
        chosen = [each for each in chosen if each not in left_out]
        for name, *_ in left_out:
            yield Row(name, {"error": "left out: gloo sends nothing from a GPU to the next stage"})
    alone = {}
    for precision, experts in (("32-true", 0), ("32-true", 8), ("bf16-mixed", 0)):
        given = {**common, "sizes": sizes_with(experts, campaign), "precision": precision}
        found = campaign.measure("rank", {**given, "strategy": {"name": "plain"}})
        alone[precision, experts] = found
        shown = {key: found[key] for key in found if key not in {"norms", "traffic"}}
        yield Row(f"one process, {experts} experts, {precision}", shown)

    def case(name: str, size: int, data: int, spec: dict[str, Any], precision: str) -> Row:
        experts = 8 if "expert" in spec else 0
        given = {**common, "sizes": sizes_with(experts, campaign), "precision": precision}
        begin = time.monotonic()
        found = campaign.measure("rank", {**given, "data": data, "strategy": spec}, size)
        return compared(name, found, alone[precision, experts], time.monotonic() - begin)

    ahead = 0 if campaign.is_dry else NUM_PRESTARTED
    with ThreadPoolExecutor(1 if campaign.is_dry else CONCURRENT_CASES) as pool:
        campaign.prepare(ahead)
        for row in pool.map(lambda each: case(*each), chosen):
            campaign.prepare(ahead)
            yield row


def sizes_with(experts: int, campaign: Campaign) -> dict[str, int]:
    """Return the sizes of a small model whose blocks have so many experts."""
    return {**campaign.sizes(SMALL), "experts": experts}


def compared(name: str, found: dict[str, Any], one: dict[str, Any], seconds: float) -> Row:
    """Return the row of a case beside one process: parameters, and bytes of a step."""
    bound = 2e-2 if name.endswith("bf16") else 1e-3
    goal = f"apart <= {bound:g}, bytes as expected"
    if "error" in found or "error" in one:
        return Row(name, found if "error" in found else one, goal, is_met=False)
    pairs = zip(found["norms"], one["norms"], strict=True)
    apart = max(abs(one - other) / max(abs(other), 1e-6) for one, other in pairs)
    shown = {"apart": apart, "seconds": seconds}
    if found["traffic"] is None:
        return Row(name, {**shown, "bytes": "not counted"}, goal, is_met=False)
    others = {
        key: f"{counted:.0f} of {expected:.0f}"
        for key, (expected, counted) in found["traffic"].items()
        if abs(expected - counted) > 0.5
    }
    shown["bytes"] = sum(counted for _, counted in found["traffic"].values())
    return Row(name, {**shown, **others}, goal, apart <= bound and not others)


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
        "ddp, compiled blocks, float8": {**ddp, "compile_blocks": True, "float8": "tensorwise"},
    }
    if campaign.is_dry:  # a minute of a C++ compiler
        cases = {name: spec for name, spec in cases.items() if "compile_blocks" not in spec}
    found = {}
    campaign.prepare(2)
    for name, spec in cases.items():
        found[name] = campaign.measure("fit", {**common, "strategy": spec})
        yield Row(name, found[name])
    found["FSDP2"] = campaign.measure("fsdp2", {**common, "offload": False})
    yield Row("FSDP2 by hand", found["FSDP2"])
    seconds = {name: each.get("step_s") for name, each in found.items()}
    yield ratio("telemetry", seconds, "ddp", "ddp without telemetry", 1.02)
    yield ratio("zero3 beside plain Lightning", seconds, "zero3", "plain Lightning", 1.02)
    yield ratio("zero3 beside FSDP2", seconds, "zero3", "FSDP2", 1.0)
    compiled = found.get("ddp, compiled blocks", {})
    if (later := compiled.get("graphs_after_step_3")) is not None:
        yield Row("compiled again after step 3", {"graphs": later}, "none", later == 0)
    mfu = compiled.get("mfu")
    if mfu is not None:
        yield Row("MFU with compiled blocks", {"mfu": mfu}, ">= 0.40", mfu >= 0.40)


def ratio(name: str, seconds: dict[str, float | None], one: str, other: str, most: float) -> Row:
    """Return the row of a ratio of two times."""
    first, second = seconds.get(one), seconds.get(other)
    if first is None or second is None:
        return Row(name, {"error": "not measured"}, f"<= {most}", is_met=False)
    return Row(name, {"ratio": first / second}, f"<= {most}", first / second <= most)


def offload(campaign: Campaign) -> Iterator[Row]:
    """6.7B with the optimizer on the host, beside FSDP2's own offload.

    Steps of the host begin to overlap with the backward pass in the eleventh.
    """
    common = {
        "sizes": campaign.sizes(GPT_7B), "batch": 8, "length": 16 if campaign.is_dry else 2048,
        "steps": 14, "skip": 11,
    }  # fmt: skip
    checkpointed = {"activation_checkpointing": "full"}
    spec = {**ZERO, "stage": 3, "offload_optimizer": "cpu", **checkpointed}
    campaign.prepare(2)
    ours = campaign.measure("fit", {**common, "strategy": spec})
    yield Row("zero3, optimizer on the host", ours)
    theirs = campaign.measure("fsdp2", {**common, "steps": 4, "offload": True})
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
         {**base, **NVME},
         5),
        ("three tiers, 14B", GPT_14B,
         {**base, "offload_optimizer": "nvme", "offload_path": "",
          "offload_fraction": {"host": 0.5, "disk": 0.03}}, 4),
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
    campaign.close()
    sys.exit(any(row.is_met is False for row in rows))


if __name__ == "__main__":
    main()

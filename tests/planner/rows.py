"""Published runs as layouts: reads the columns of ``planner_rows.csv``."""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from boltmesh.planner.layout import Layout, Recompute
from boltmesh.planner.machine import Cluster, accelerators, parse_network
from boltmesh.planner.transformer import Transformer

ROWS = Path(__file__).with_name("planner_rows.csv")

SOURCES = ("Megatron-LM 2021", "Korthikanti", "BLOOM", "MosaicML", "Megatron-Bridge", "bigscience")
"""Beginnings of sources that are one stack, whatever follows."""


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        seconds: Of a step; None where the run has none.
        memory_gb: Of the fullest rank; None where it is not published.
        skipped: Why it cannot be predicted; empty where it can.
    """

    id: str
    source: str
    gpu: str
    model: Transformer
    cluster: Cluster
    layout: Layout
    seconds: float | None
    memory_gb: float | None
    memory_kind: str
    is_out_of_memory: bool
    is_known: bool
    """Whether what it recomputes is published, and it was run."""

    @property
    def cluster_key(self) -> tuple[str, str]:
        """What is calibrated together: one stack on one kind of accelerator."""
        return self.source, self.gpu

    @property
    def group_key(self) -> tuple[object, ...]:
        """What layouts are compared within: the same model, devices and batch."""
        model = self.model
        return (
            self.source, self.gpu, self.cluster.num_devices, self.layout.sequences,
            model.hidden, model.layers, model.seq, model.vocab,
        )  # fmt: skip


def read_runs(path: Path = ROWS) -> tuple[list[Run], int]:
    """Return the runs of a file, and how many rows could not be read as one."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    runs = [run for row in rows if (run := _run(row)) is not None]
    return runs, len(rows) - len(runs)


def _run(row: Mapping[str, str]) -> Run | None:
    try:
        model = Transformer(
            layers=int(row["layers"]),
            hidden=int(row["hidden"]),
            heads=int(row["heads"]),
            kv_heads=_integer(row, "kv_heads", int(row["heads"])),
            ffn=_integer(row, "ffn", 4 * int(row["hidden"])),
            vocab=int(row["vocab"]),
            seq=int(row["seq"]),
            is_gated=row.get("gated") == "1",
            is_tied=row.get("gated") != "1",
            has_flash=row.get("flash") != "0",
        )
        cluster = _cluster(row)
        layout = _layout(row, model, cluster)
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    if layout is None:
        return None
    return Run(
        id=row["id"],
        source=_source(row["source"]),
        gpu=row["gpu"],
        model=model,
        cluster=cluster,
        layout=layout,
        seconds=_seconds(row, model, layout, cluster),
        memory_gb=_float(row, "mem_gb"),
        memory_kind=row.get("mem_kind", ""),
        is_out_of_memory="oom" in row.get("status", "").lower(),
        is_known=row.get("recompute") != "unknown"
        and "model states" not in row.get("mem_kind", ""),
    )


def _source(name: str) -> str:
    return next((each for each in SOURCES if name.startswith(each)), name)


def _cluster(row: Mapping[str, str]) -> Cluster:
    text = re.sub(r"[^a-z0-9]+", "-", row["gpu"].lower()).removeprefix("dgx-")
    known = accelerators()
    same = [name for name in known if text.startswith(name)]
    kind = re.match(r"[a-z]+\d+[a-z]*", text)
    if not same and kind is not None:
        form = "pcie" if "pcie" in text else ""
        same = [name for name in known if name.startswith(kind[0]) and form in name]
    if not same:
        raise ValueError(row["gpu"])
    device = known[
        max(same) if same[0].startswith(("h100", "a100")) and len(same) > 1 else same[-1]
    ]
    if text == "h100":
        device = known["h100-80gb"]
    num_devices = int(row["n_gpus"])
    network = None
    notes = row.get("notes", "")
    if match := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", notes):
        network = parse_network(f"{match[1]}x{match[2]}")
    elif match := re.search(r"(\d+)\s*Gbps", notes):
        network = parse_network(match[1])
    per_node = device.per_node
    if per_node == 8:
        per_node = _integer(row, "gpus_per_node", 8)
    per_node = min(per_node, num_devices)
    usual = device.node_network_rate / device.per_node
    # Both sources of BigScience ran on Jean Zay, whose nodes have four links of Omni-Path.
    is_jean_zay = row["source"].startswith("bigscience")
    if is_jean_zay:
        network = parse_network("4x100")
    rate = usual if network is None else network / per_node
    is_onload = is_jean_zay or "omni-path" in notes.lower()
    return Cluster(device, num_devices, per_node, rate, is_onload)


def _layout(row: Mapping[str, str], model: Transformer, cluster: Cluster) -> Layout | None:
    tensor, pipeline = _integer(row, "tp", 1), _integer(row, "pp", 1)
    context = _integer(row, "cp", 1)
    if _integer(row, "ep", 1) > 1:
        return None
    data = cluster.num_devices // (tensor * pipeline * context)
    sequences, microbatch = int(row["gbs"]), _integer(row, "mbs", 1)
    if pipeline > 1 and sequences // (microbatch * data) < pipeline:
        microbatch = 1  # the column is the batch of a rank, cut into microbatches
    schedule = row.get("schedule", "")
    stages = _integer(row, "vpp", 1)
    if "interleaved" in schedule and stages == 1 and pipeline > 1:
        per_rank = model.layers // pipeline
        stages = next((each for each in (2, 3, 5, 7) if per_rank % each == 0), 1)
    precision = row.get("precision", "").lower()
    dtype = (
        "fp4" if "fp4" in precision else "fp8" if re.search(r"fp8|float8", precision) else "bf16"
    )
    zero = row.get("zero", "0")
    recompute = row.get("recompute", "none")
    notes = row.get("notes", "").lower()
    is_offloaded = "offload" in notes and not re.search(r"no offload|offload false", notes)
    framework = row.get("framework", "").lower()
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        microbatch=microbatch,
        sequences=sequences,
        schedule=schedule,
        stages_per_rank=stages,
        zero=3 if zero == "hsdp" else int(zero or 0),
        shard=cluster.devices_per_node if zero == "hsdp" else None,
        recompute=_RECOMPUTE.get(recompute, "none"),
        has_sequence_parallel=row.get("seq_parallel") == "1",
        offload="optimizer" if is_offloaded else "none",
        dtype=dtype,
        has_fp32_gradients="fp32 grad" in precision,
        state_bytes=_state_bytes(framework, precision),
        has_fused_kernels=bool(re.search("megatron|nemo|compile", f"{framework} {notes}")),
        attention_speed=_attention_speed(framework, cluster.accelerator.name),
        # Gathers run on a stream of their own since DeepSpeed 0.5.9.
        has_overlap=framework != "deepspeed" or zero != "3",
        has_async_tensor="megatron-core" in framework or "asynctp" in notes,
    )  # fmt: skip


_RECOMPUTE: dict[str, Recompute] = {
    "full": "full",
    "selective": "selective",
    "selective(op)": "alternate",
}


def _attention_speed(framework: str, accelerator: str) -> float:
    """Return the speed of a stack's attention over FlashAttention-2."""
    if "composer" in framework:  # the first FlashAttention, in Triton: planner_micro.csv M41
        return 0.5
    is_hopper = accelerator.startswith(("h100", "h200", "h800", "gh200"))
    # cuDNN: planner_micro.csv M37 and M38.
    return 1.6 if is_hopper and re.search("nemo|megatron-core", framework) else 1.0


def _state_bytes(framework: str, precision: str) -> tuple[float, float, float]:
    if "fsdp" in framework:
        return 4.0, 4.0, 8.0
    if "deepspeed" in framework:  # flat copies of gradients; with bf16 their sum in fp32 as well
        return 2.0, 8.4 if "bf16" in precision else 4.4, 12.0
    return 2.0, 2.0, 12.0


def _seconds(
    row: Mapping[str, str], model: Transformer, layout: Layout, cluster: Cluster
) -> float | None:
    if (value := _float(row, "iter_s")) is not None:
        return value
    sequences = layout.sequences
    if (value := _float(row, "tokens_s_gpu")) is not None:
        return sequences * model.seq / (value * cluster.num_devices)
    if (value := _float(row, "samples_s_gpu")) is not None:
        return sequences / (value * cluster.num_devices)
    flops = model.step_flops(sequences)
    if (value := _float(row, "reported_tflops_gpu")) is not None:
        convention = row.get("tflops_convention", "")
        if convention.startswith("96B") or "recompute counted" in convention:
            flops = _megatron_flops(model, sequences)
        elif convention:
            return None
        return flops / (value * 1e12 * cluster.num_devices)
    if (value := _float(row, "mfu_pct")) is not None:
        peak = cluster.accelerator.flops.get(layout.dtype, cluster.accelerator.flops["bf16"])
        flops = _megatron_flops(model, sequences) * 72 / 96
        return flops / (value / 100 * peak * cluster.num_devices)
    return None


def _megatron_flops(model: Transformer, sequences: int) -> float:
    """Return ``96 B S L h^2 (1 + s/6h + V/16Lh)``, recomputation counted."""
    layers, hidden, seq = model.layers, model.hidden, model.seq
    rest = 1 + seq / (6 * hidden) + model.vocab / (16 * layers * hidden)
    return 96.0 * sequences * seq * layers * hidden**2 * rest


def _integer(row: Mapping[str, str], key: str, default: int) -> int:
    value = row.get(key) or ""
    return int(float(value)) if re.fullmatch(r"\d+(\.0+)?", value) else default


def _float(row: Mapping[str, str], key: str) -> float | None:
    try:
        return float(row.get(key) or "") or None
    except ValueError:
        return None


def timed(runs: list[Run]) -> Iterator[Run]:
    """Yield the runs with a step time that did not run out of memory."""
    yield from (run for run in runs if run.seconds is not None and not run.is_out_of_memory)

"""Published runs as layouts: reads the columns of ``planner_rows.csv``."""

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from boltmesh.planner.layout import Layout, Recompute
from boltmesh.planner.machine import Accelerator, Cluster, accelerators, parse_network
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


class UnreadableRowError(ValueError):
    """A row cannot be read as a run; the text says why, in a few words."""


def read_runs(path: Path = ROWS) -> tuple[list[Run], Counter[str]]:
    """Return the runs of a file, and the reasons why other rows are none, with their counts."""
    runs: list[Run] = []
    skipped: Counter[str] = Counter()
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            cells = {
                str(key).strip().lower(): value.strip()
                for key, value in row.items()
                if key is not None and isinstance(value, str)
            }
            try:
                runs.append(_run(cells, f"row {len(runs) + skipped.total() + 1}"))
            except UnreadableRowError as error:
                skipped[str(error)] += 1
    return runs, skipped


def _run(row: Mapping[str, str], name: str) -> Run:
    model = _model(row)
    cluster = _cluster(row)
    layout = _layout(row, model, cluster)
    return Run(
        id=name,
        source=_source(row.get("source") or "unnamed"),
        gpu=row["gpu"],
        model=model,
        cluster=cluster,
        layout=layout,
        seconds=_seconds(row, model, layout, cluster),
        memory_gb=_float(row, "mem_gb"),
        memory_kind=row.get("mem_kind", ""),
        is_out_of_memory=bool(re.search("oom|out of memory", row.get("status", "").lower())),
        is_known=row.get("recompute") != "unknown"
        and "model states" not in row.get("mem_kind", ""),
    )


def _model(row: Mapping[str, str]) -> Transformer:
    hidden, heads = _needed(row, "hidden"), _needed(row, "heads")
    is_gated = _is(row, "gated", default=False)
    kv_heads = _integer(row, "kv_heads", heads)
    if kv_heads > heads:
        raise UnreadableRowError("kv_heads is more than heads")
    experts, active = _experts(row)
    return Transformer(
        layers=_needed(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=_integer(row, "ffn", 4 * hidden),
        vocab=_needed(row, "vocab"),
        seq=_needed(row, "seq"),
        is_gated=is_gated,
        is_tied=not is_gated,
        has_flash=_is(row, "flash", default=True),
        experts=experts,
        active=active,
    )


def _experts(row: Mapping[str, str]) -> tuple[int, int]:
    """Return experts and those of a token, which no column states: by the name of the model."""
    name = row.get("model", "").lower()
    if match := re.search(r"\b(\d+)x\d+(?:\.\d+)?b\b", name):  # Mixtral, of which two compute
        return int(match[1]), min(2, int(match[1]))
    if _integer(row, "ep", 1) > 1 or re.search(r"moe|mixtral|deepseek-?v[23]|-a\d+b|-\d+e\b", name):
        raise UnreadableRowError("a mixture, and rows state no sizes of experts")
    return 0, 0


def _source(name: str) -> str:
    return next((each for each in SOURCES if name.startswith(each)), name)


def _accelerator(name: str) -> Accelerator:
    text = re.sub(r"[^a-z0-9]+", "-", name.lower())
    text = re.sub(r"^((nvidia|amd|dgx|hgx|geforce)-)+", "", text)
    known = accelerators()
    same = [each for each in known if f"{text}-".startswith(f"{each}-")]
    kind = re.match(r"(?:rtx-)?[a-z]+\d+[a-z]*|rtx-?\d+", text)
    if not same and kind is not None:
        begin = kind[0].replace("rtx-", "rtx")
        form = "pcie" if "pcie" in text else ""
        same = [each for each in known if re.match(f"{begin}(-|$)", each) and form in each]
        if memory := re.search(r"(\d+)-?gb", text):
            size = float(memory[1]) * 1e9
            same.sort(key=lambda each: abs(known[each].memory_bytes - size))
    if not same:
        raise UnreadableRowError("gpu is not in the table" if name else "gpu is empty")
    return known[same[0]]


def _cluster(row: Mapping[str, str]) -> Cluster:
    device = _accelerator(row.get("gpu", ""))
    num_devices = _needed(row, "n_gpus")
    network = None
    notes = row.get("notes", "")
    links = r"(?:([1-9]\d?)\s*x\s*)?([1-9]\d*(?:\.\d+)?)\s*([GT])(?:b(?:it)?/s|bps|b\b|bit\b)"
    if match := re.search(links, notes):  # links of a node, or their sum
        gbit = float(match[2]) * (1000 if match[3] == "T" else 1)
        network = parse_network(f"{match[1] or 1}x{gbit}")
    per_node = device.per_node
    if per_node == 8:
        per_node = _integer(row, "gpus_per_node", 8)
    per_node = min(per_node, num_devices)
    usual = device.node_network_rate / device.per_node
    # Both sources of BigScience ran on Jean Zay, whose nodes have four links of Omni-Path.
    is_jean_zay = row.get("source", "").startswith("bigscience")
    if is_jean_zay and network is None:
        network = parse_network("4x100")
    rate = usual if network is None else network / per_node
    is_onload = is_jean_zay or "omni-path" in notes.lower()
    return Cluster(device, num_devices, per_node, rate, is_onload)


def _layout(row: Mapping[str, str], model: Transformer, cluster: Cluster) -> Layout:
    tensor, pipeline = _integer(row, "tp", 1), _integer(row, "pp", 1)
    context = _integer(row, "cp", 1)
    if cluster.num_devices % (tensor * pipeline * context):
        raise UnreadableRowError("tp x pp x cp does not divide n_gpus")
    if pipeline > model.layers:
        raise UnreadableRowError("pp is more than layers")
    data = cluster.num_devices // (tensor * pipeline * context)
    expert = _integer(row, "ep", 1) if model.experts else 1
    if expert > 1 and (model.experts % expert or cluster.num_devices // pipeline % expert):
        raise UnreadableRowError("ep does not divide the experts and the ranks of a stage")
    sequences = _needed(row, "gbs")
    if sequences < data:
        raise UnreadableRowError("gbs is less than the replicas")
    microbatch = min(_integer(row, "mbs", 1), sequences // data)
    if pipeline > 1 and sequences // (microbatch * data) < pipeline:
        microbatch = 1  # the column is the batch of a rank, cut into microbatches
    schedule = row.get("schedule", "").lower().replace("interleaved1f1b", "interleaved_1f1b")
    stages = _integer(row, "vpp", 1)
    if "interleaved" in schedule and stages == 1 and pipeline > 1:
        per_rank = model.layers // pipeline
        stages = next((each for each in (2, 3, 5, 7) if per_rank % each == 0), 1)
    precision = row.get("precision", "").lower()
    dtype = (
        "fp4" if "fp4" in precision else "fp8" if re.search(r"fp8|float8", precision) else "bf16"
    )
    zero = (row.get("zero") or "0").lower()
    zero = "3" if zero == "fsdp" else re.sub(r"^(zero[- ]?|stage[- ]?)|\.0+$", "", zero)
    if zero not in {"0", "1", "2", "3", "hsdp"}:
        raise UnreadableRowError("zero is none of 0, 1, 2, 3, hsdp")
    recompute = row.get("recompute", "").lower()
    notes = row.get("notes", "").lower()
    is_offloaded = "offload" in notes and not re.search(r"no offload|offload false", notes)
    framework = row.get("framework", "").lower()
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=expert,
        microbatch=microbatch,
        sequences=sequences,
        schedule=schedule,
        stages_per_rank=stages,
        zero=3 if zero == "hsdp" else int(zero),
        shard=min(data, cluster.devices_per_node) if zero == "hsdp" else None,
        recompute=_RECOMPUTE.get(recompute, "none"),
        has_sequence_parallel=_is(row, "seq_parallel", default=False),
        offload="optimizer" if is_offloaded else "none",
        dtype=dtype,
        has_fp32_gradients="fp32 grad" in precision,
        state_bytes=_state_bytes(framework, precision),
        has_context_overlap=True,
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


def _needed(row: Mapping[str, str], key: str) -> int:
    """Return a whole number of at least 1."""
    if not row.get(key):
        raise UnreadableRowError(f"{key} is empty")
    return _integer(row, key, 0)


def _integer(row: Mapping[str, str], key: str, default: int) -> int:
    value = row.get(key)
    if value == "0" and key in {"tp", "pp", "vpp", "cp", "ep"}:
        return default
    if not value or value.lower() in {"none", "nan", "na", "n/a", "-", "unknown", "auto"}:
        if default:
            return default
        raise UnreadableRowError(f"{key} is empty")
    number = _number(value)
    if number is None or number < 1 or number != int(number) or number > 1e12:
        raise UnreadableRowError(f"{key} is no whole number of 1 or more")
    return int(number)


def _is(row: Mapping[str, str], key: str, *, default: bool) -> bool:
    value = row.get(key, "").lower()
    if value in {"1", "1.0", "true", "yes"}:
        return True
    return default if value not in {"0", "0.0", "false", "no"} else False


def _float(row: Mapping[str, str], key: str) -> float | None:
    """Return a number above 0; None for anything else."""
    value = _number(row.get(key) or "")
    return value if value is not None and value > 0 else None


def _number(text: str) -> float | None:
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def timed(runs: Sequence[Run], skipped: Counter[str] | None = None) -> list[Run]:
    """Return the runs with a step time that did not run out of memory; count the others."""
    found = []
    for run in runs:
        if run.is_out_of_memory:
            reason = "ran out of memory"
        elif run.seconds is None:
            reason = "no time that can be read as seconds of a step"
        else:
            found.append(run)
            continue
        if skipped is not None:
            skipped[reason] += 1
    return found

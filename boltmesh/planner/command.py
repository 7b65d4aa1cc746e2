"""``boltmesh plan auto``: the best layouts of a model on a cluster, with reasons.

``report_lines`` prints the best layouts of a search, and what would change the choice.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from boltmesh.axes import ALL_AXES
from boltmesh.errors import ConfigError
from boltmesh.planner.layout import Layout
from boltmesh.planner.machine import (
    GB,
    accelerator_named,
    build_cluster,
    more_devices,
    parse_network,
)
from boltmesh.planner.search import Candidate, Search, on_network, search, smallest_cluster
from boltmesh.planner.step_time import TERMS, model_flops_utilization
from boltmesh.planner.transformer import transformer_named
from boltmesh.strategies.registry import STRATEGIES

EXPECTED_ERROR = (
    "Expected error of a time: 7 % in the median, 16 % for one in ten, on clusters that the rates "
    "never saw (published runs, one source left out at a time); the faster of two "
    "layouts is found in six of seven pairs. Measure the first three before a long run."
)
SHOWN_TERMS = 0.01
"""Terms below this share of a step are not printed."""


def best(found: Search, count: int = 3) -> list[Candidate]:
    """Return the fastest layouts that differ in kind, the fastest first."""
    chosen: dict[object, Candidate] = {}
    for each in found.candidates:
        chosen.setdefault(each.layout.division[:6], each)
    return list(chosen.values())[:count]


def strategy_of(layout: Layout) -> str:
    """Return the arguments for ``Trainer`` that make this layout."""
    name, given = layout.strategy
    if layout.pipeline > 1:
        given["microbatches"] = layout.num_microbatches
    accumulated = 1 if layout.pipeline > 1 else layout.num_microbatches
    batch = layout.sequences // (layout.data * accumulated)
    text = f"{strategy_text(name, given)}, batch_size={batch}"
    return text + (f", accumulate_grad_batches={accumulated}" if accumulated > 1 else "")


def strategy_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a strategy as an argument of ``Trainer`` in Python."""
    entry = STRATEGIES[name]
    given = {**entry.arguments, **arguments}
    text = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return f"strategy={entry.class_name}({text})"


def flow_sentence(found: Search, fastest: Candidate) -> str:
    """Return the proposal of the usual decision flow, and whether the numbers agree."""
    cluster, budget = found.cluster, found.cluster.accelerator.memory_bytes
    state = 16.0 * found.model.numel
    layout = fastest.layout
    if cluster.num_devices == 1:
        rule = "one device: train if it fits, else ZeRO with offload to the host"
        agrees = layout.offload != "none" or state < budget
    elif state < 0.6 * budget:
        rule = "the model fits into one device: replicate it, with DDP or ZeRO"
        agrees = layout.tensor == layout.pipeline == 1
    elif cluster.num_nodes == 1:
        rule = "one node with a fast link: ZeRO, tensor or pipeline"
        agrees = True
    else:
        rule = "several nodes: ZeRO-3, or tensor within a node with a pipeline and replicas across"
        agrees = layout.zero == 3 or layout.tensor * layout.pipeline > 1
    return f"{rule}; the numbers {'agree' if agrees else 'say otherwise'}."


def report_lines(found: Search, count: int = 3) -> list[str]:
    """Return the report as lines of text."""
    return [*_head(found), *(_nothing(found) if not found.candidates else _found(found, count))]


def _head(found: Search) -> Iterator[str]:
    model, cluster = found.model, found.cluster
    yield (
        f"{model.numel / 1e9:,.1f} billion parameters on {cluster.num_devices:,} x "
        f"{cluster.accelerator.name} ({cluster.num_nodes:,} x {cluster.devices_per_node}, "
        f"{cluster.network_rate * 8 / 1e9:,.0f} Gbit/s between nodes for each), {found.dtype}"
    )
    yield (
        f"a step: {found.sequences:,} sequences of {model.seq:,} tokens; "
        f"{found.num_layouts:,} layouts tried, {len(found.candidates):,} fit"
    )


def _nothing(found: Search) -> Iterator[str]:
    have = found.cluster.accelerator.memory_bytes
    yield ""
    yield (
        f"No layout fits: the least memory that one needs is {found.least_memory / GB:,.0f} GB a "
        f"device, and {found.cluster.accelerator.name} has {have / GB:,.0f} GB."
    )
    if (devices := smallest_cluster(found)) is not None:
        yield f"{devices:,} of these devices are enough."
    yield "Shards, tiles, and offload to host memory and to a disk are among those tried."


def _found(found: Search, count: int) -> Iterator[str]:
    chosen = best(found, count)
    yield ""
    yield "     step    tokens/s  MFU   memory  tensor pipeline context data"
    for place, each in enumerate(chosen, start=1):
        layout = each.layout
        yield (
            f"{place}. {each.seconds:6.2f} s {tokens_per_second(found, each):>10,.0f}  "
            f"{100 * utilization(found, each):3.0f} % {each.memory.device / GB:6.0f} GB  "
            f"{layout.tensor:6} {layout.pipeline:8} {layout.context:7} {layout.data:4}  "
            f"{_described(each)}"
        )
    for place, each in enumerate(chosen, start=1):
        yield ""
        yield f"{place}. {strategy_of(each.layout)}"
        parts = [f"{name}: {text}" for name, text in each.layout.dimensions.items()]
        yield f"   divides {'; '.join(parts)}"
        yield f"   time    {terms_text(each.time.terms())}"
        yield f"   memory  {_memory(each)}"
        if place == 1:
            yield f"   rule    {flow_sentence(found, each)}"
        else:
            yield f"   behind  {behind_text(chosen[0].time.terms(), each.time.terms())}"
    yield ""
    yield from (f"With {change}: {outcome}" for change, outcome in changes(found, chosen[0]))
    yield ""
    yield EXPECTED_ERROR


def tokens_per_second(found: Search, candidate: Candidate) -> float:
    """Return tokens per second of the whole cluster."""
    return found.sequences * found.model.seq / candidate.seconds


def utilization(found: Search, candidate: Candidate) -> float:
    """Return the share of the peak that model FLOPs take (MFU)."""
    return model_flops_utilization(
        found.model, found.cluster.accelerator, candidate.layout, candidate.seconds
    )


def _described(candidate: Candidate) -> str:
    layout = candidate.layout
    words = [f"{layout.num_microbatches} x {layout.microbatch}"]
    if layout.schedule:
        words.append(layout.schedule)
        if layout.stages_per_rank > 1:
            words.append(f"{layout.stages_per_rank} stages per rank")
    words.append(f"ZeRO-{layout.zero}" if layout.zero else "replicas")
    if layout.expert > 1:
        words.append(f"experts over {layout.expert} ranks")
    if layout.offload != "none":
        what = "everything" if layout.offload == "all" else "optimizer"
        if layout.offload_fraction < 1:
            what = f"{100 * layout.offload_fraction:.0f} % of the optimizer"
        words.append(f"{what} on {'the host' if layout.tier == 'cpu' else 'a disk'}")
    if layout.shard is not None:
        words.append(f"shards over {layout.shard} ranks")
    if layout.tile_bytes is not None:
        words.append("tiles")
    if layout.recompute != "none":
        part = "" if layout.recompute_share == 1 else f" {100 * layout.recompute_share:.0f} %"
        words.append(f"recompute {layout.recompute}{part}")
    if candidate.is_tight:
        words.append("TIGHT")
    return ", ".join(words)


def terms_text(time: Mapping[str, float], *, digits: int = 2) -> str:
    """Return the larger parts of a step with their shares.

    Args:
        time: Seconds of each part.
        digits: Digits behind the point.
    """
    total = sum(time.values())
    return ", ".join(
        f"{TERMS[name]} {value:.{digits}f} s ({100 * value / total:.0f} %)"
        for name, value in time.items()
        if value > SHOWN_TERMS * total
    )


def _memory(candidate: Candidate) -> str:
    terms = candidate.memory.terms()
    return (
        ", ".join(f"{name} {value / GB:.1f}" for name, value in terms.items() if value > 5e7)
        + " GB"
    )


def behind_text(first: Mapping[str, float], other: Mapping[str, float], *, digits: int = 2) -> str:
    """Return by how much a layout is slower than the first, and which part of its step most of all.

    Args:
        first: Seconds of each part of the first one's step.
        other: Seconds of each part of the other one's.
        digits: Digits behind the point.
    """
    slower = 100 * (sum(other.values()) / sum(first.values()) - 1)
    if slower < 1:
        return f"equal within the error of the prediction ({slower:+.1f} %)"
    name = max(TERMS, key=lambda each: other[each] - first[each])
    return f"{slower:.0f} % slower: {TERMS[name]} takes {other[name] - first[name]:+.{digits}f} s"


def changes(found: Search, first: Candidate) -> Iterator[tuple[str, str]]:
    """Yield the effect of another cluster or batch, each as the change and the outcome."""
    cluster = found.cluster
    if cluster.num_nodes > 1:
        faster = on_network(found, 2 * cluster.network_rate)
        yield "a network of twice the rate", _outcome(found, first, faster)
    wider = more_devices(cluster, 2 * cluster.num_devices)
    yield "twice the devices", _outcome(found, first, _again(found, cluster=wider))
    if found.model.seq >= 1024:
        shorter = replace(found.model, seq=found.model.seq // 2)
        yield (
            "half the sequence length, twice the sequences",
            _outcome(found, first, _again(found, model=shorter, sequences=2 * found.sequences)),
        )


def _again(found: Search, **changes: Any) -> Search:
    other = replace(found, **changes)
    return search(other.model, other.cluster, sequences=other.sequences, dtype=other.dtype)


def _outcome(found: Search, first: Candidate, again: Search) -> str:
    if not again.candidates:
        return "no layout divides the batch."
    candidate = again.candidates[0]
    factor = tokens_per_second(again, candidate) / tokens_per_second(found, first)
    layout = candidate.layout
    same = layout.division[:4] == first.layout.division[:4]
    axes = ", ".join(
        f"{name} {size}"
        for name in ALL_AXES
        if (size := getattr(layout, name, 1)) > 1 or name in {"tensor", "data"}
    )
    return f"{factor:.2f} x the tokens/s, {'the same kind of layout' if same else axes}."


def as_data(found: Search, count: int = 3) -> dict[str, Any]:
    """Return the report as data for JSON; times in seconds, memory in bytes."""
    chosen = best(found, count)
    return {
        "parameters": found.model.numel,
        "devices": found.cluster.num_devices,
        "accelerator": found.cluster.accelerator.name,
        "sequences": found.sequences,
        "layouts": found.num_layouts,
        "fit": len(found.candidates),
        "expected_error": {"median": 0.07, "p90": 0.16},
        "best": [
            {
                "strategy": strategy_of(each.layout),
                "layout": vars(each.layout),
                "dimensions": each.layout.dimensions,
                "step_s": each.seconds,
                "tokens_per_s": tokens_per_second(found, each),
                "mfu": utilization(found, each),
                "time_s": each.time.terms(),
                "memory_bytes": {**each.memory.terms(), "device": each.memory.device},
                "is_tight": each.is_tight,
            }
            for each in chosen
        ],
    }


TOKENS = 2**22
"""Tokens of a step where no batch is given, as large models are trained with."""


def plan_auto(
    *,
    model: str,
    gpu: str,
    devices: int,
    nodes: int | None,
    network: str | None,
    batch: int | None,
    seq: int | None,
    dtype: str,
    count: int,
    as_json: bool,
) -> int:
    """Print the best layouts; return the exit code, 1 if none fits.

    Raises:
        ConfigError: For a name that is not known, and sizes that contradict each other.
    """
    sizes = transformer_named(model, seq=seq)
    accelerator = accelerator_named(gpu)
    if dtype not in accelerator.flops:
        raise ConfigError(
            f"--dtype {dtype}: {accelerator.name} has no matrix products in {dtype}. "
            f"Use {' or '.join(accelerator.flops)}."
        )
    rate = None if network is None else parse_network(network)
    cluster = build_cluster(accelerator, num_devices=devices, num_nodes=nodes, network_rate=rate)
    if batch is None:
        batch = devices * max(1, round(TOKENS / sizes.seq / devices))
    found = search(sizes, cluster, sequences=batch, dtype=dtype)
    if not found.num_layouts:
        raise ConfigError(
            f"--batch {batch} is divided by no layout of {devices} devices: every replica gets the "
            f"same number of sequences. Use a multiple of {devices}."
        )
    print(json.dumps(as_data(found, count)) if as_json else "\n".join(report_lines(found, count)))
    return 0 if found.candidates else 1

"""``boltmesh plan auto``: layouts that can be run, in the right order, with reasons."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from boltmesh.advisor.machine import of_cluster
from boltmesh.cli import run_command
from boltmesh.errors import ConfigError
from boltmesh.planner.command import best, flow_sentence, strategy_of
from boltmesh.planner.layout import Layout, groups_of
from boltmesh.planner.layout_memory import CONTEXT_BYTES, estimate_layout_memory
from boltmesh.planner.machine import accelerator_named, accelerators, build_cluster, more_devices
from boltmesh.planner.rates import default_rates
from boltmesh.planner.search import FULL, search
from boltmesh.planner.step_time import StepTimeModel
from boltmesh.planner.transformer import KNOWN, Transformer, transformer_named
from boltmesh.strategies import Parallel3DStrategy, ZeROStrategy
from boltmesh.strategies.cost_model.memory import estimate_memory
from boltmesh.strategies.cost_model.model import (
    JobShape,
    ShardingLayout,
    describe_gpt,
    size_named,
    widths_of,
)
from boltmesh.strategies.ddp import DDPStrategy
from boltmesh.strategies.pipeline.schedules.registry import check_schedule

LLAMA = KNOWN["llama3-70b"]
H100 = accelerator_named("h100")
NODES = build_cluster(H100, num_devices=64, num_nodes=8)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(["plan", "auto", *arguments])
    out, error = capsys.readouterr()
    return code, out, error


def test_the_width_of_heads_is_that_of_attention() -> None:
    usual = replace(LLAMA, head_dim=LLAMA.hidden // LLAMA.heads)
    wide = replace(usual, head_dim=2 * usual.head_dim)
    # Half as many heads of twice the width are the same work.
    same = replace(wide, heads=wide.heads // 2, kv_heads=wide.kv_heads // 2)
    layout = Layout(data=8, zero=3, sequences=64)
    found = [
        (
            model.numel,
            model.step_flops(64),
            predicted(layout, model),
            estimate_layout_memory(model, layout).activations,
        )
        for model in (LLAMA, usual, same, wide)
    ]
    assert found[0] == found[1] == found[2]
    assert all(more > less for more, less in zip(found[3], found[0], strict=True))
    sizes = "layers=2 hidden=100 heads=3 ffn=64 vocab=64 seq=8"
    assert transformer_named(f"{sizes} head_dim=8").query_width == 24
    with pytest.raises(ConfigError, match="unless head_dim is given"):
        transformer_named(sizes)


@pytest.mark.parametrize("name", accelerators())
def test_every_accelerator_is_complete(name: str) -> None:
    device = accelerator_named(name)
    assert device.flops.keys() == device.matmul.keys()
    assert 0 < device.matmul_rate("bf16") < device.flops["bf16"]
    assert device.memory_bytes > 1e9
    assert device.node_network_rate > 1e9


def test_axes_lie_over_nodes_from_the_inside() -> None:
    groups = groups_of(Layout(tensor=4, data=4, pipeline=4), NODES)
    lie = {name: (group.in_node, group.num_nodes) for name, group in groups.items()}
    assert lie == {
        "tensor": (4, 1), "context": (1, 1), "data": (2, 2), "pipeline": (1, 4), "expert": (1, 1),
        "replicas": (2, 2),
    }  # fmt: skip


def predicted(layout: Layout, model: Transformer = LLAMA) -> float:
    return StepTimeModel(model, NODES, default_rates()).predict(layout).seconds


BASE = Layout(tensor=8, pipeline=2, data=4, sequences=512, schedule="1f1b", recompute="full")


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"microbatch": 32}),  # a longer bubble
        ({"recompute": "none"}, {}),
        ({"schedule": "zbv", "stages_per_rank": 2}, {}),
        ({"has_sequence_parallel": True}, {}),
        ({"has_fp32_gradients": False}, {"has_fp32_gradients": True}),
        ({"zero": 1}, {"zero": 1, "offload": "optimizer"}),
        ({"has_async_tensor": True}, {}),
        ({"recompute": "full", "recompute_share": 0.5}, {}),
        (
            {"zero": 1, "offload": "optimizer", "offload_fraction": 0.25},
            {"zero": 1, "offload": "optimizer"},
        ),
        (
            {"zero": 3, "offload": "all"},
            {"zero": 3, "offload": "all", "tier": "nvme"},
        ),
        ({"zero": 3}, {"zero": 3, "tile_bytes": 2**20}),
    ],
    ids=str,
)
def test_what_costs_more_is_predicted_to_take_longer(
    better: dict[str, object], worse: dict[str, object]
) -> None:
    assert predicted(replace(BASE, **better)) < predicted(replace(BASE, **worse))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"recompute": "full"}, {"recompute": "none"}),
        ({"zero": 1}, {"zero": 0}),
        ({"zero": 3}, {"zero": 2}),
        ({"zero": 3, "offload": "all"}, {"zero": 3, "offload": "optimizer"}),
        ({"has_sequence_parallel": True}, {}),
        ({"schedule": "1f1b"}, {"schedule": "gpipe"}),
        ({"recompute": "full"}, {"recompute": "full", "recompute_share": 0.5}),
        ({"recompute": "full", "recompute_share": 0.5}, {"recompute": "none"}),
        (
            {"zero": 1, "offload": "optimizer"},
            {"zero": 1, "offload": "optimizer", "offload_fraction": 0.5},
        ),
        ({"zero": 3}, {"zero": 3, "shard": 2}),
        ({"zero": 3, "tile_bytes": 2**20}, {"zero": 3}),
    ],
    ids=str,
)
def test_what_keeps_less_is_predicted_to_need_less(
    less: dict[str, object], more: dict[str, object]
) -> None:
    def needed(changes: dict[str, object]) -> float:
        return estimate_layout_memory(LLAMA, replace(BASE, **changes)).device  # type: ignore[arg-type]

    assert needed(less) < needed(more)


def built(layout: Layout) -> object:
    """Return the strategy that the report names."""
    strategies = {
        "Parallel3DStrategy": Parallel3DStrategy,
        "ZeROStrategy": ZeROStrategy,
        "DDPStrategy": DDPStrategy,
    }
    text = strategy_of(layout).partition(", batch_size")[0].removeprefix("strategy=")
    return eval(text, strategies)


@pytest.mark.parametrize(
    ("model", "devices", "nodes", "sequences"),
    [("llama3-8b", 8, 1, 512), ("llama3-70b", 64, 8, 512), ("gpt3-175b", 1024, 128, 1536)],
)
def test_layouts_fit_and_are_those_that_strategies_take(
    model: str, devices: int, nodes: int, sequences: int
) -> None:
    cluster = build_cluster(accelerator_named("a100"), num_devices=devices, num_nodes=nodes)
    found = search(transformer_named(model), cluster, sequences=sequences)
    assert found.candidates
    with_context = [each for each in found.candidates if each.layout.context > 1][:2]
    assert with_context
    for candidate in best(found, 8) + with_context:
        layout = candidate.layout
        assert layout.num_devices == devices
        assert candidate.memory.device <= FULL * cluster.accelerator.memory_bytes
        assert layout.num_microbatches * layout.microbatch * layout.data == sequences
        if layout.schedule:
            check_schedule(
                layout.schedule,
                num_ranks=layout.pipeline,
                num_microbatches=layout.num_microbatches,
                stages_per_rank=layout.stages_per_rank,
            )
        assert built(layout) is not None


def test_a_long_sequence_is_divided_over_a_context_axis(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model llama3-8b --seq 131072 --gpu h100-80gb --devices 8 --batch 8"
    run_command(["plan", "auto", *options.split()])
    text = capsys.readouterr().out
    assert "1. strategy=Parallel3DStrategy(pipeline=1, data=1, tensor=1, context=8" in text
    sizes = replace(LLAMA, seq=131072)
    whole = Layout(data=8, sequences=8, zero=3, recompute="full")
    halves = replace(whole, data=4, context=2, sequences=8)
    cluster = build_cluster(accelerator_named("h100"), num_devices=8)
    model = StepTimeModel(sizes, cluster, default_rates())
    assert model.predict(whole).context == 0.0
    # Keys and values of 2 sequences a rank, gathered in three passes and scattered in one.
    moved = 4 * 2 * 131072 * sizes.kv_width * 2 / 2 * sizes.layers * 2
    link = cluster.accelerator.link_rate
    assert model.predict(halves).context == pytest.approx(moved / link, rel=0.15)
    kept = [estimate_layout_memory(sizes, each).activations for each in (whole, halves)]
    assert kept[1] == pytest.approx(kept[0] / 2)


def test_experts_are_divided_over_ranks() -> None:
    sizes = transformer_named("mixtral-8x7b")
    assert sizes.numel == pytest.approx(46.7e9, rel=0.01)
    cluster = build_cluster(accelerator_named("b200"), num_devices=16)
    found = search(sizes, cluster, sequences=64)
    divided = [each for each in found.candidates if each.layout.expert > 1]
    sizes_whole = {each.layout.expert for each in divided if each.layout.pipeline == 1}
    assert sizes_whole == {8}  # a quarter is too much for a rank; not beside a pipeline
    beside = {(each.layout.pipeline > 1, each.layout.context > 1) for each in divided}
    assert beside == {(False, False), (True, False), (False, True), (True, True)}
    assert "expert=" in strategy_of(divided[0].layout)
    assert all(each.layout.num_devices == 16 for each in divided)
    assert all(each.layout.zero in {1, 2, 3} for each in divided)
    whole = Layout(data=16, sequences=64, microbatch=1, zero=3)
    eighths = replace(whole, expert=8)
    before, after = (estimate_layout_memory(sizes, each) for each in (whole, eighths))
    experts = sizes.layers * sizes.expert_numel  # one of eight in each block
    rest = sizes.numel - 8 * experts
    assert before.optimizer == pytest.approx(8 * sizes.numel / 16)
    assert after.optimizer == pytest.approx(8 * (experts + rest / 16))
    assert after.other < before.other  # experts are not gathered
    # Of 8 experts one is here: 1 - C(7, 2) / C(8, 2) of the rows go to each of the 7 others,
    # and back, in both passes.
    rows = 4 * sizes.seq * 7 * (1 - 21 / 28) * sizes.layers * 4
    moved = rows * sizes.hidden * 2 / cluster.accelerator.link_rate
    model = StepTimeModel(sizes, cluster, default_rates())
    assert model.predict(whole).expert == 0.0
    assert model.predict(eighths).expert == pytest.approx(moved, rel=0.25)
    assert model.predict(eighths).gather < model.predict(whole).gather


def test_a_bubble_is_that_of_the_schedule() -> None:
    found = search(LLAMA, NODES, sequences=512)
    shares = {
        each.layout.num_microbatches: each.time.bubble / each.seconds
        for each in found.candidates
        if each.layout.schedule == "1f1b" and each.layout.pipeline == 8
    }
    for count, share in shares.items():
        # (p - 1) / (m + p - 1) of the passes; the step has other parts, and messages.
        ideal = 7 / (count + 7)
        assert 0.7 * ideal < share < 1.3 * ideal
    assert shares


def test_a_thousand_devices_are_searched_without_torch() -> None:
    """The limit is far above what it takes: the machine may be busy."""
    script = (
        "import sys, time; began = time.process_time();"
        "from boltmesh.cli import run_command;"
        "run_command('plan auto --model llama3-405b --gpu h100 --devices 1024'.split());"
        "assert 'torch' not in sys.modules, 'torch is loaded';"
        "assert time.process_time() - began < 20, time.process_time() - began"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1. " in done.stdout


def test_the_report_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--model", "llama3-70b", "--gpu", "h100-80gb", "--devices", "64", "--nodes", "8",
        "--network", "8x400",
    )  # fmt: skip
    assert code == 0
    assert out.count("\n   time ") == out.count("\n   memory ") == 3
    for said in ("   rule    ", "   behind  ", "With twice the devices: ", "Expected error"):
        assert said in out
    assert "optimal" not in out


@pytest.mark.parametrize(
    ("devices", "nodes", "wanted", "shape"),
    [
        (4, None, 8, (8, 1)),
        (8, None, 16, (8, 2)),
        (6, None, 12, (6, 2)),
        (16, 1, 32, (16, 2)),
        (8, 2, 16, (4, 4)),
    ],
)
def test_more_devices_fill_a_node_before_there_are_several(
    devices: int, nodes: int | None, wanted: int, shape: tuple[int, int]
) -> None:
    cluster = build_cluster(H100, num_devices=devices, num_nodes=nodes)
    larger = more_devices(cluster, wanted)
    assert (larger.devices_per_node, larger.num_nodes) == shape
    assert larger.num_devices == wanted
    machine = of_cluster(cluster, "bf16-mixed", "highest").doubled()
    assert machine is not None
    assert (machine.ranks_per_node, machine.num_nodes) == shape
    assert machine.cluster == larger


def test_links_that_are_given_are_those_of_a_node() -> None:
    cluster = build_cluster(H100, num_devices=4, network_rate=8e9)
    assert cluster.network_rate == 2e9
    assert more_devices(cluster, 8).network_rate == 1e9


def test_twice_the_devices_are_predicted_as_if_they_were_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["--model", "llama3-8b", "--gpu", "h100-80gb", "--batch", "512", "--json"]
    per_second = []
    for devices in (4, 8):
        code, out, _ = run(capsys, *line, "--devices", str(devices))
        assert code == 0
        per_second.append(json.loads(out)["best"][0]["tokens_per_s"])
    _, out, _ = run(capsys, *line[:-1], "--devices", "4")
    factor = per_second[1] / per_second[0]
    assert f"With twice the devices: {factor:.2f} x the tokens/s" in out


@pytest.mark.parametrize(
    ("layout", "agrees"),
    [
        (Layout(data=64, zero=3), True),
        (Layout(data=64, zero=1, tensor=8), True),
        (Layout(data=64, zero=1), False),
    ],
    ids=["zero3", "tensor", "zero1"],
)
def test_the_usual_rule_is_compared_with_the_choice(layout: Layout, agrees: bool) -> None:
    found = search(LLAMA, NODES, sequences=64)
    chosen = replace(found.candidates[0], layout=layout)
    sentence = flow_sentence(found, chosen)
    assert sentence.endswith("the numbers agree." if agrees else "the numbers say otherwise.")


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama3-8b", "--gpu", "h100", "--devices", "8", "--json", "--top", "2"]
    code, out, _ = run(capsys, *arguments)
    found = json.loads(out)
    assert code == 0
    assert len(found["best"]) == 2
    for each in found["best"]:
        assert sum(each["time_s"].values()) == pytest.approx(each["step_s"])
        tokens = found["sequences"] * 8192
        assert each["tokens_per_s"] == pytest.approx(tokens / each["step_s"])
        assert 0.1 < each["mfu"] < 0.7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "lama3-8b", "--gpu", "h100", "--devices", "8"], "Did you mean 'llama3-8b'"),
        (["--model", "llama3-8b", "--gpu", "h10", "--devices", "8"], "Did you mean 'h100"),
        (["--model", "layers=3", "--gpu", "h100", "--devices", "8"], "lacks hidden, heads"),
        (["--model", "layer=3", "--gpu", "h100", "--devices", "8"], "Did you mean 'layers'"),
        (["--model", "llama3-8b"], "add --gpu h100-80gb --devices 8"),
        (["--model", "llama3-8b", "--gpu", "h100"], "named: add --devices 8"),
        (["--model", "", "--gpu", "h100", "--devices", "8"], "There is no model ''"),
        (["--model", "configs", "--gpu", "h100", "--devices", "8"], "without a config.json"),
        (["--model", "gpt2 seq=9", "--gpu", "h100", "--devices", "8"], "'gpt2' is no size"),
        (["--model", "gpt2", "seq=9", "--gpu", "h100", "--devices", "8"], "seq=9 changes a CONFIG"),
        (
            [
                "--model",
                "layers=2 hidden=64 heads=4 vocab=9 seq=8 experts=4",
                "--gpu",
                "h100",
                "--devices",
                "8",
            ],
            "give both, as experts=8 active=2",
        ),
        (
            ["--model", "gpt2", "--gpu", "h100", "--devices", "8", "--network", "0x400"],
            "write 8x400",
        ),
        (["--model", "gpt2", "--gpu", "h100", "--devices", "1000000000000"], "is not in the range"),
        (
            ["--model", "llama3-8b", "--gpu", "h100", "--devices", "8", "--nodes", "3"],
            "does not divide",
        ),
        (
            ["--model", "llama3-8b", "--gpu", "h100", "--devices", "8", "--network", "fast"],
            "write 8x400",
        ),
        (
            ["--model", "llama3-8b", "--gpu", "a100", "--devices", "8", "--dtype", "fp8"],
            "Use bf16",
        ),
        (
            ["--model", "gpt2", "--gpu", "h100", "--devices", "64", "--batch", "3"],
            "Use a multiple of 64",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert said in error
    assert error.count("\n") == 1


def test_what_cannot_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--model", "llama3-405b", "--gpu", "rtx4090", "--devices", "8", "--batch", "8"
    )
    assert code == 1
    assert "No layout fits: the least memory that one needs is " in out
    assert "of these devices are enough" in out


TILE = 64 * 2**20
WIDE = "layers=2 hidden=16384 heads=128 vocab=256000 seq=512"
DISK = {"disk": 1.0}


@pytest.mark.parametrize(
    ("changes", "shares", "place"),
    [
        ({}, {}, "device"),
        ({"zero": 1}, {}, "device"),
        ({"zero": 2}, {}, "device"),
        ({"zero": 3}, {}, "device"),
        ({"zero": 3, "shard": 2}, {}, "device"),
        ({"zero": 3, "tile_bytes": TILE}, {}, "device"),
        ({"zero": 1, "offload": "optimizer"}, {"host": 1.0}, "device"),
        ({"zero": 1, "offload": "optimizer", "offload_fraction": 0.5}, {"host": 0.5}, "device"),
        ({"zero": 3, "offload": "optimizer", "offload_fraction": 0.5}, {"host": 0.5}, "device"),
        ({"zero": 3, "offload": "all"}, {"host": 1.0}, "host"),
        ({"zero": 1, "offload": "optimizer", "tier": "nvme"}, DISK, "device"),
        ({"zero": 3, "offload": "all", "tier": "nvme"}, DISK, "disk"),
        ({"zero": 3, "offload": "all", "tier": "nvme", "tile_bytes": TILE}, DISK, "disk"),
    ],
    ids=str,
)
def test_memory_is_what_boltmesh_plan_counts(
    changes: dict[str, Any], shares: dict[str, float], place: str
) -> None:
    """Tensors alone, without what the driver takes; buckets and the largest unit are estimates."""
    model = transformer_named("layers=32 hidden=4096 heads=32 vocab=50257 seq=2048")
    layout = Layout(data=8, sequences=8, **changes)
    found = estimate_layout_memory(model, layout)
    widths = widths_of("bf16-mixed")
    sharing = ShardingLayout("", layout.zero, shares, place, layout.tile_bytes)
    shape = describe_gpt(size_named("6.7B"), batch=(1, 2048), widths=widths)
    job = JobShape(8, widths, shard_size=layout.shard)
    counted = estimate_memory(shape.in_tiles(layout.tile_bytes), sharing, job).peak
    near = 0.17 if layout.tile_bytes and layout.offload != "none" else 0.07
    assert found.device - CONTEXT_BYTES == pytest.approx(counted.device, rel=near)
    assert found.disk == pytest.approx(counted.disk, rel=0.02)
    rings = 1.1e9 if counted.disk else 0.2e9  # what is on its way from and to a disk
    assert found.host == pytest.approx(counted.host, abs=rings)


def of_search(model: str, gpu: str, devices: int, sequences: int) -> list[Layout]:
    cluster = build_cluster(accelerator_named(gpu), num_devices=devices)
    found = search(transformer_named(model), cluster, sequences=sequences)
    return [each.layout for each in found.candidates if not each.is_tight]


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (("llama3-8b", "h100", 64, 64), {"zero": 3, "shard": 8}),
        (("llama3-8b", "a100-80gb", 16, 128), {"recompute": "full", "recompute_share": 0.5}),
        (("llama3-70b", "h100", 64, 512), {"offload": "optimizer", "offload_fraction": 0.75}),
        (("llama3-8b", "rtx4090", 1, 8), {"offload": "all", "tier": "nvme"}),
        ((WIDE, "rtx4090", 1, 8), {"zero": 3, "tile_bytes": TILE}),
        (("llama3-8b", "h100", 64, 64), {"tensor": 2, "context": 2}),
        (("mixtral-8x7b", "b200", 16, 512), {"tensor": 2, "expert": 8}),
        (("mixtral-8x7b", "b200", 16, 512), {"pipeline": 2, "context": 2, "expert": 4}),
        (("llama3-70b", "h100", 64, 512), {"pipeline": 2, "tensor": 4, "context": 2}),
        (("llama3-70b", "h100", 32, 64), {"pipeline": 2, "offload": "optimizer"}),
    ],
    ids=str,
)
def test_what_saves_memory_is_searched_where_it_is_needed(
    case: tuple[str, str, int, int], wanted: dict[str, Any]
) -> None:
    found = of_search(*case)
    same = [each for each in found if wanted.items() <= vars(each).items()]
    assert same
    assert built(same[0]) is not None


def test_nothing_is_recomputed_or_offloaded_where_all_fits() -> None:
    found = of_search("gpt2", "h100", 8, 8)
    assert {each.recompute for each in found if each.microbatch == 1} == {"none"}
    assert {each.offload for each in found if each.microbatch == 1} == {"none"}


def test_each_dimension_of_a_layout_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(
        tensor=8, pipeline=2, data=4, zero=1, schedule="zbv", stages_per_rank=2,
        has_sequence_parallel=True,
    )  # fmt: skip
    assert layout.dimensions == {
        "sample": "data 4",
        "operator": "pipeline 2 by zbv, 2 stages per rank",
        "attribute": "sequence parallel over 8",
        "parameter": "tensor 8 and ZeRO-1 over 4",
    }
    assert set(Layout().dimensions.values()) == {"whole"}
    _, out, _ = run(capsys, "--model", "gpt2", "--gpu", "h100", "--devices", "8")
    assert "   divides sample: data 8; operator: whole; attribute: whole; parameter: whole" in out

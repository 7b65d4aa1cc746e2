"""A schedule is one module: what it registers is drawn, simulated, refused, planned, trained."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from boltmesh import cli
from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import ConfigError
from boltmesh.planner.layout_memory import estimate_layout_memory
from boltmesh.planner.machine import accelerator_named, build_cluster
from boltmesh.planner.search import search
from boltmesh.planner.transformer import transformer_named
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.schedules import orders, registry
from boltmesh.strategies.pipeline.schedules.registry import closed_form_bubble, simulate_ideal
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.pipelines import pipeline
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

MODULE = Path(__file__).parents[2] / "support" / "toy_schedule.py"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module in a folder of orders, which other tests do not see."""
    monkeypatch.setattr(registry, "_kinds", dict(registry.schedules()))
    shutil.copy(MODULE, tmp_path / "toy.py")
    monkeypatch.setattr(orders, "__path__", [*orders.__path__, str(tmp_path)])
    name = f"{orders.__name__}.toy"
    importlib.invalidate_caches()
    importlib.import_module(name)
    yield
    del sys.modules[name], orders.toy  # type: ignore[attr-defined]


def test_a_module_among_the_orders_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(MODULE, tmp_path / "toy.py")
    monkeypatch.setattr(orders, "__path__", [*orders.__path__, str(tmp_path)])
    imported: list[str] = []
    monkeypatch.setattr(registry, "import_module", _importer(imported))
    registry._import_orders.__wrapped__()
    names = ("gpipe_1f1b", "pipedream_2bw", "toy", "zero_bubble")
    assert imported == [orders.__name__, *(f"{orders.__name__}.{name}" for name in names)]


def _importer(imported: list[str]) -> object:
    def import_module(name: str) -> object:
        imported.append(name)
        return orders

    return import_module


def blocks(text: str) -> str:
    """Draw each block with the 8 cells that 100 columns give to each of 10 times."""
    return "".join(block.ljust(8, block[1]) for block in text.split())


@pytest.mark.usefixtures("toy")
def test_it_is_drawn_and_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    sizes = ["--stages", "2", "--microbatches", "2"]
    assert cli.run_command(["schedule", "toy", *sizes, "--ascii"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("rank")] == [
        f"rank 0  stage 0 {blocks('0- .. .. 0+ 0# 1- .. .. 1+ 1#')}",
        f"rank 1  stage 1 {blocks('.. 0- 0+ 0# .. .. 1- 1+ 1# ..')}",
    ]
    assert "bubble       40.0% of total, 66.7% of ideal" in "\n".join(lines)
    assert cli.run_command(["schedule"]) == 0
    assert "toy               one microbatch after the other\n" in capsys.readouterr().out


@pytest.mark.usefixtures("toy")
def test_its_sizes_its_bubble_and_its_split_backward_are_known() -> None:
    table = registry.schedule_table("toy", num_ranks=3, num_microbatches=4)
    bubble = closed_form_bubble("toy", num_ranks=3, num_microbatches=4, stages_per_rank=1)
    assert simulate_ideal(table).bubble == pytest.approx(bubble)
    with pytest.raises(ConfigError, match=r"it wants pairs\. Set microbatches=2 or 4\."):
        PipelineOptions(stages=2, schedule="toy", microbatches=3)
    with pytest.raises(ConfigError, match="or schedule=interleaved_1f1b for 2"):
        registry.schedule_table("toy", num_ranks=2, num_microbatches=4, stages_per_rank=2)
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        pipeline(schedule="toy", activation_checkpointing="full")


@pytest.mark.usefixtures("toy")
def test_it_is_planned() -> None:
    cluster = build_cluster(accelerator_named("a100"), num_devices=16)
    model = transformer_named("llama2-13b")
    found = search(model, cluster, sequences=32)
    layouts = [each.layout for each in found.candidates if each.layout.schedule == "toy"]
    assert {layout.pipeline for layout in layouts} >= {2, 4, 8}
    for layout in layouts:
        assert layout.stages_per_rank == 1
        assert layout.num_microbatches % 2 == 0  # it wants pairs
        assert layout.recompute == "none"  # it splits backward passes
    layout = next(each for each in layouts if each.pipeline == 4 and each.num_microbatches >= 4)
    kept = estimate_layout_memory(model, layout).activations
    usual = estimate_layout_memory(model, layout.changed(schedule="1f1b")).activations
    assert usual == pytest.approx(4 * kept)


PROBLEM = Problem(
    module=partial(Stack, depth=4),
    train=partial(token_data, 24, 8),
    validation=partial(token_data, 9, 8),
    prediction=partial(token_data, 7, 8),
    steps=3,
    accumulate=1,
    trainer={"accelerator": "cpu"},
)


def one_process(rank: int, world_size: int) -> Trace:
    return trace_one_process(PROBLEM, data_size=1, is_dealt=False)


def toy_pipeline(rank: int, world_size: int) -> Trace:
    importlib.import_module("tests.support.toy_schedule")
    strategy = PipelineParallelStrategy(telemetry=False, schedule="toy", microbatches=4)
    return trace_layout(PROBLEM, strategy, devices=world_size)


@pytest.mark.full
@pytest.mark.ranks
def test_it_trains_as_one_process_does() -> None:
    reference = run_ranks(one_process, 1)[0]
    assert len(reference.losses) == 3
    assert reference.losses[-1] != reference.losses[0]
    for trace in run_ranks(toy_pipeline, 2):
        assert find_differences(reference, trace) == []

"""Plans of models with many equal blocks, of which few are run in place of all."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from boltmesh.configs.load import load
from boltmesh.plan import equal_blocks as module_of_blocks
from boltmesh.plan import mesh_stage
from boltmesh.plan.dry_model import describe_model
from boltmesh.plan.dry_step import DryStep
from boltmesh.plan.equal_blocks import equal_blocks
from boltmesh.plan.mesh_plan import MeshPlan, plan_mesh
from boltmesh.plan.mesh_rank import over_layers
from boltmesh.strategies.cost_model.step_time import Machine

BLOCKS = 9
GPT = ("zero3", "model.init_args.n_embd=32", f"model.init_args.n_layer={BLOCKS}")
LLAMA = ("tensor_hf", f"model.init_args.config.num_hidden_layers={BLOCKS}")


@pytest.fixture
def all_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes plans run all blocks."""
    return lambda: monkeypatch.setattr(module_of_blocks, "MANY", 10**6)


@pytest.mark.sample("llama-selective")
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("line", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_step_with_a_few_of_the_equal_blocks_counts_as_one_with_all(
    line, recompute, all_run
) -> None:
    config = load(line[0], [*line[1:], "precision=bf16-mixed", "data.init_args.batch_size=2"])
    assert config is not None
    few = describe_model(config, None, source="", recompute=recompute)[0]
    all_run()
    assert few == describe_model(config, None, source="", recompute=recompute)[0]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            {"pipeline": 1, "data": 2, "tensor": 2, "zero_stage": 1}, marks=pytest.mark.full
        ),
        {"pipeline": 2, "data": 2, "tensor": 1, "zero_stage": 1},
        pytest.param(
            {"pipeline": 1, "data": 2, "context": 2, "tensor": 1, "zero_stage": 3},
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_a_brief_plan_has_the_figures_of_the_whole_one(given, all_run) -> None:
    config = load(GPT[0], [*GPT[1:], "data.init_args.batch_size=8", "precision=bf16-mixed"])

    def plan() -> MeshPlan:
        return plan_mesh(config, 4, given, Machine(), source="", is_brief=True)

    few = plan()
    all_run()
    whole = plan()
    assert few.parameters == whole.parameters
    assert few.num_microbatches == whole.num_microbatches
    for one, other in zip(few.places, whole.places, strict=True):
        if whole.pipeline is None:
            assert one == other
        else:  # stages of a few blocks each are cut at other places than nine blocks
            both = (
                (one.parameters, other.parameters),
                (one.memory.peak.host, other.memory.peak.host),
            )
            assert all(abs(a / b - 1) < 0.2 for a, b in both)


def test_ranks_that_have_equal_blocks_are_counted_once(monkeypatch) -> None:
    line = [*GPT[1:2], "model.init_args.n_layer=16", "data.init_args.batch_size=8"]
    config = load(GPT[0], [*line, "precision=bf16-mixed"])
    given = {"pipeline": 4, "data": 1, "tensor": 2, "zero_stage": 0}
    counted: list[object] = []

    def count(*args: Any) -> Any:
        counted.append(args)
        return over_layers(*args)

    monkeypatch.setattr(mesh_stage, "over_layers", count)
    once = plan_mesh(config, 8, given, Machine(), source="", is_brief=True)
    assert len(counted) == 2 * 3  # the first, the last and both others, with one and two blocks
    monkeypatch.setattr(mesh_stage, "_kind_of_rank", lambda *_: object())
    assert plan_mesh(config, 8, given, Machine(), source="", is_brief=True) == once
    assert len(counted) == 2 * 3 + 2 * 4


class Ladder(LightningModule):
    """A chain of blocks.

    Args:
        kind: In what its blocks differ.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Rung(at, kind) for at in range(BLOCKS))
        if kind == "shared":
            self.blocks = nn.ModuleList([self.blocks[0]] * BLOCKS)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for each in self.blocks:
            batch = each(batch)
        return batch.square().mean()


class Rung(nn.Module):
    """A block that knows its number."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        self.number = number
        self.kind = kind
        self.scale = 2.0 if kind == "setting" and number == 3 else 1.0
        self.layer = nn.Linear(8, 8, bias=not (kind == "bias" and number == 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * self.layer(x)
        return x.tanh() if self.kind == "number" and self.number % 2 else x


@pytest.mark.parametrize(
    ("kind", "are_equal"),
    [("none", True), ("setting", False), ("bias", False), ("shared", False), ("number", True)],
)
def test_blocks_that_differ_are_all_run(kind, are_equal, all_run) -> None:
    module = Ladder(kind)
    assert (equal_blocks(module) is not None) == are_equal
    counted = []
    for _ in range(2):
        step = DryStep()
        assert step.run(module, torch.ones(4, 8), None) is None
        counted.append(step.counts)
        for each in module.parameters():
            each.grad = None
        all_run()
    few, whole = counted
    assert few == replace(whole, saved_by=few.saved_by)

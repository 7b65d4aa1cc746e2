"""Layers in tiles, and models that are built block by block, compute what one process computes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import DDPStrategy, ZeROStrategy, deferred_init
from boltmesh.strategies.deferred_initialization.deferred import is_deferred
from boltmesh.strategies.tiling.apply import EmbeddingFunction, LinearFunction
from tests.support.cases import CLIP, ROUGH, SGD, Case
from tests.support.ranks import run_ranks
from tests.support.stack import Stack

pytestmark = pytest.mark.ranks

WIDE = {"width": 101, "hidden": 103, "depth": 2}
TILES = {"tile_linear_bytes": 4096}
"""Ten rows of the blocks' Linears; embedding and head are larger than that, too."""
HOST = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
DISK = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_path": "here"}

CASES = [
    Case("plain", model=WIDE, strategy=TILES),
    Case("one rank", ranks=1, model=WIDE, strategy=TILES),
    Case("tied weights, clipping, 4 ranks", ranks=4, model={**WIDE, "ties": True},
         trainer=CLIP, strategy=TILES),
    Case("frozen layers, accumulation", model={**WIDE, "freezes": True}, accumulate=3,
         strategy=TILES),
    Case("two parameter groups", model={**WIDE, "groups": True}, trainer=CLIP, strategy=TILES),
    Case("bf16-mixed", model={**WIDE, **SGD}, trainer={"precision": "bf16-mixed"}, tolerance=ROUGH,
         strategy=TILES),
    Case("copies of shards", ranks=4, accumulate=2, model=WIDE,
         strategy={**TILES, "shard_size": 2}),
    Case("offloaded to the host", model=WIDE, trainer=CLIP, strategy={**TILES, **HOST}),
    Case("offloaded optimizer", model=WIDE, accumulate=2,
         strategy={**TILES, "offload_optimizer": "cpu"}),
    Case("offloaded to a disk", model=WIDE, trainer=CLIP, strategy={**TILES, **DISK}),
]  # fmt: skip


def one_process(rank: int, world_size: int, case: Case) -> Trace:
    return trace_one_process(case.problem(), data_size=case.ranks)


def layout(rank: int, world_size: int, case: Case, folder: str) -> tuple[Trace, int]:
    """The trace, and how often a layer ran in tiles."""
    runs = 0
    for function in (EmbeddingFunction, LinearFunction):
        forward = function.forward

        def counted(*args: Any, _forward: Any = forward) -> Tensor:
            nonlocal runs
            runs += 1
            return _forward(*args)

        function.forward = staticmethod(counted)  # type: ignore[assignment]
    arguments = dict(case.strategy)
    if "offload_path" in arguments:
        arguments["offload_path"] = folder
    strategy = ZeROStrategy(telemetry=False, **arguments)
    return trace_layout(case.problem(), strategy, devices=world_size), runs


@pytest.mark.sample("tied weights, clipping, 4 ranks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tiles_equal_one_process(case: Case, tmp_path: Path) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    results = run_ranks(layout, case.ranks, case, str(tmp_path))
    assert len(reference.losses) == case.steps
    assert reference.losses[-1] != reference.losses[0]
    for trace, runs in results:
        assert runs >= 6 * case.steps  # embedding, head, and two Linears in each of two blocks
        assert [str(e) for e in find_differences(reference, trace, case.tolerance)] == []


class Configured(Stack):
    """Makes its layers when Lightning says so."""

    def __init__(self, **options: Any) -> None:
        LightningModule.__init__(self)
        self.options = options
        self.parts: Any = None

    def configure_model(self) -> None:
        if self.parts is None:
            torch.manual_seed(11)
            self.parts = nn.ModuleDict({"stack": Stack(**self.options)})
            self.was_deferred = any(map(is_deferred, self.parts.parameters()))

    def loss(self, batch: Any) -> Tensor:
        return self.parts.stack.loss(batch)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.parts.stack(tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def under_deferred_init(**options: Any) -> Stack:
    with deferred_init(min_bytes=64):
        return Stack(**options)


LARGE = {"width": 131, "hidden": 133, "depth": 2, "ties": True}
"""Linears of more than 64 KiB."""


def with_ddp(rank: int, world_size: int) -> Trace:
    problem = replace(Case("ddp").problem(), module=partial(under_deferred_init, **LARGE))
    return trace_layout(problem, DDPStrategy(telemetry=False), devices=2)


@pytest.mark.full
def test_a_deferred_model_is_made_by_ddp_too() -> None:
    reference = run_ranks(built, 1, "deferred_init", True, {})[0]
    for trace in run_ranks(with_ddp, 2):
        assert [str(each) for each in find_differences(reference, trace)] == []


def built(rank: int, world_size: int, kind: str, is_reference: bool, tiles: Any) -> Any:
    case = Case(kind, model=LARGE)
    module: Any = Configured if kind == "configure_model" else Stack
    if kind == "deferred_init" and not is_reference:
        module = under_deferred_init
    problem: Problem = replace(case.problem(), module=partial(module, **LARGE))
    if is_reference:
        return trace_one_process(problem, data_size=2)
    seen: list[LightningModule] = []

    def make() -> LightningModule:
        seen.append(module(**LARGE))
        return seen[0]

    strategy = ZeROStrategy(telemetry=False, **tiles)
    trace = trace_layout(replace(problem, module=make), strategy, devices=2)
    return trace, getattr(seen[0], "was_deferred", None)


@pytest.mark.full
@pytest.mark.parametrize("tiles", [{}, TILES], ids=["whole", "tiled"])
@pytest.mark.parametrize("kind", ["configure_model", "deferred_init"])
def test_a_model_built_block_by_block_equals_one_process(kind: str, tiles: Any) -> None:
    reference = run_ranks(built, 1, kind, True, {})[0]
    for trace, was_deferred in run_ranks(built, 2, kind, False, tiles):
        assert was_deferred is (True if kind == "configure_model" else None)
        assert [str(each) for each in find_differences(reference, trace)] == []

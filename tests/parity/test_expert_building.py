"""Mixtures of experts that are built block by block equal one process, in less than their memory.

``deferred_init`` makes nothing until the model is divided; experts are found and proven before.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies import deferred_init
from boltmesh.strategies.deferred_initialization.deferred import is_deferred
from tests.benchmarks.peers.resident import resident_bytes
from tests.support.expert_models import Mixture, MoeModule, tokens
from tests.support.expert_runs import (
    Outcome,
    Watch,
    differences,
    loader,
    strategy_of,
    train_alone,
    trainer,
    whole_of,
)
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


def deferred(kind: str) -> MoeModule:
    with deferred_init(min_bytes=64):
        return MoeModule(kind)


def drawn_by_rank(kind: str) -> MoeModule:
    """Return a model with other values on each rank."""
    module = MoeModule(kind)
    if torch.distributed.is_initialized() and (rank := torch.distributed.get_rank()):
        with torch.no_grad():
            for each in module.parameters():
                each.add_(rank / 7)
    return module


def train(
    rank: int,
    world_size: int,
    kind: str,
    options: dict[str, Any],
    build: Callable[[str], MoeModule],
) -> Outcome:
    module = build(kind)
    if build is deferred:
        assert any(map(is_deferred, module.parameters()))
    strategy = strategy_of(telemetry=False, **options)
    watch = Watch()
    watch.outcome.data_rank = strategy.layout_of(world_size).coordinates(rank)["data"]
    run = trainer(world_size, strategy, max_steps=3, callbacks=[watch], gradient_clip_val=0.5)
    run.fit(module, loader(watch.outcome.data_rank, 3))
    watch.outcome.parameters = whole_of(module)
    return watch.outcome


STAGES = {"expert": 2, "pipeline": 2, "zero_stage": 1}
BUILDS: dict[str, tuple[str, int, dict[str, Any], Callable[[str], MoeModule]]] = {
    "zero3": ("mixtral", 2, {"stage": 3, "expert": 2}, deferred),
    "zero3, 2 of 4": ("mixtral:grouped_mm", 4, {"stage": 3, "expert": 2}, deferred),
    "zero3, list": ("list", 2, {"stage": 3, "expert": 2}, deferred),
    "zero1": ("gpt_oss", 2, {"stage": 1, "expert": 2}, deferred),
    "zero2, list": ("masked", 2, {"stage": 2, "expert": 2}, deferred),
    "offload": (
        "mixtral",
        2,
        {"stage": 3, "expert": 2, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        deferred,
    ),
    "tensor": ("mixtral", 2, {"expert": 2, "tensor": 2, "zero_stage": 1}, deferred),
    "layers": (
        "mixtral",
        4,
        {"expert": 2, "tensor": 2, "zero_stage": 1, "expert_tensor": "tensor"},
        deferred,
    ),
    "zero3, LoRA": ("mixtral, LoRA", 2, {"stage": 3, "expert": 2}, deferred),
    "pipeline": ("stacked", 4, {**STAGES, "microbatches": 2}, deferred),
    "pipeline, aux": ("mixtral", 4, {**STAGES, "microbatches": 1, "schedule": "gpipe"}, deferred),
    "context": ("mixtral", 4, {"expert": 4, "context": 2, "zero_stage": 1}, deferred),
    "zero3, drawn by rank": ("mixtral", 2, {"stage": 3, "expert": 2}, drawn_by_rank),
    "zero1, list, drawn by rank": ("list", 2, {"stage": 1, "expert": 2}, drawn_by_rank),
}


@pytest.mark.sample("zero3, 2 of 4", "zero2, list", "zero3, drawn by rank")
@pytest.mark.parametrize("case", BUILDS)
def test_a_model_that_is_built_block_by_block_equals_one_process(case: str) -> None:
    kind, world_size, options, build = BUILDS[case]
    ranks = run_ranks(train, world_size, kind, options, build)
    data_size = 1 + max(each.data_rank for each in ranks)
    gaps = differences(ranks, train_alone(data_size, kind))
    assert max(gaps.values()) < 2e-6, gaps


WIDTH, EXPERTS, BLOCKS = 1024, 32, 40


class Large(LightningModule):
    """Blocks of 6 MiB each, nearly all of it experts."""

    def __init__(self, *, is_late: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList()
        if not is_late:
            self.configure_model()

    @override
    def configure_model(self) -> None:
        if not self.blocks:
            self.blocks.extend(Mixture(WIDTH, EXPERTS, 2) for _ in range(BLOCKS))
            assert is_deferred(self.blocks[0].get_parameter("experts.up"))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    @override
    def on_train_start(self) -> None:
        self.peak = resident_bytes("VmHWM")

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def peak_of_building(rank: int, world_size: int, is_late: bool) -> tuple[int, int]:
    def fit(module: LightningModule) -> None:
        strategy = strategy_of(stage=3, expert=world_size, telemetry=False)
        run = trainer(world_size, strategy, max_steps=1)
        run.fit(module, loader(rank, 1))

    fit(MoeModule("stacked"))  # loads code and makes groups
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    with nullcontext() if is_late else deferred_init():
        module = Large(is_late=is_late)
    fit(module)
    return module.peak - before, sum(each.nbytes for each in module.blocks[0].parameters())


@pytest.mark.sample("configure_model")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("is_late", [True, False], ids=["configure_model", "deferred_init"])
def test_building_takes_few_blocks_beside_the_shards(is_late: bool) -> None:
    for peak, block in run_ranks(peak_of_building, 2, is_late):
        assert block > 6 << 20
        # Before that the proof has several copies of one block, and their gradients.
        assert peak <= BLOCKS * block / 2 + 4 * block, peak / block


class Plain(nn.Module):
    """A block in which a router leaves its loss, and a norm that other blocks share."""

    def __init__(self, norm: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.norm, self.mixture = norm, Mixture(width, 8, 2)
        self.scale = nn.Parameter(torch.ones(width))
        self.read: Tensor | None = None
        self.gates = [self.mixture.gate.weight]

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.read = self.mixture.gate(x).logsumexp(-1).square().mean()
        return self.norm(x + self.mixture(x) * self.scale)


class Around(LightningModule):
    """Reads what blocks have left, and calls a part of them itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList(Plain(norm) for _ in range(3))
        self.losses: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        blocks: Any = self.blocks
        x = blocks[0].norm(self.embed(batch))
        for block in blocks:
            x = block(x)
        loss: Tensor = x.square().mean() + sum(each.read for each in blocks)
        self.losses.append(float(loss.detach()))
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses(rank: int, world_size: int, is_deferred: bool) -> tuple[list[float], bool]:
    with deferred_init(min_bytes=64) if is_deferred else nullcontext():
        module = Around()
    strategy = strategy_of(stage=1, expert=world_size, telemetry=False)
    trainer(world_size, strategy, max_steps=3).fit(module, loader(rank, 3))
    # The step by which experts were found has left no copy in the place of a parameter.
    block: Any = module.blocks[0]
    return module.losses[-3:], block.gates[0] is block.mixture.gate.weight


@pytest.mark.full
def test_what_blocks_leave_and_share_is_there_when_they_are_built_late() -> None:
    built, late = (run_ranks(losses, 2, each) for each in (False, True))
    assert late == built
    assert all(is_same for _, is_same in late)


def whole_alive(rank: int, world_size: int, is_deferred: bool) -> int:
    with deferred_init(min_bytes=64) if is_deferred else nullcontext():
        module = MoeModule("stacked")
    shapes = {tuple(each.shape) for each in module.parameters() if each.ndim == 3}
    strategy = strategy_of(stage=3, expert=world_size, telemetry=False)
    run = trainer(world_size, strategy, max_steps=1)
    run.fit(module, loader(rank, 1))
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in {Tensor, nn.Parameter}]
    return sum(tuple(each.shape) in shapes and not each.is_meta for each in tensors)


@pytest.mark.parametrize("is_deferred", [False, True], ids=["built", "deferred"])
def test_no_expert_stays_whole(is_deferred: bool) -> None:
    assert run_ranks(whole_alive, 2, is_deferred) == [0, 0]


class Manual(Large):
    """Goes backward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Bias(Around):
    """Has a buffer on ``meta``, as of a model that was made there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(8, device="meta"))


def refuse(rank: int, world_size: int, kind: type[LightningModule], more: dict[str, Any]) -> None:
    with deferred_init() if kind is Manual else nullcontext():
        module = kind()
    strategy = strategy_of(stage=3, expert=2, telemetry=False, **more)
    trainer(world_size, strategy, max_steps=1).fit(module, [tokens(0, rank)])


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (Manual, {}, "Build the model without deferred_init"),
        (Bias, {"expert_bias": "update"}, "'bias' has no values yet, and expert_bias= finds"),
    ],
)
def test_what_needs_values_is_refused(
    kind: type[LightningModule], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankFailure, match=message) as failed:
        run_ranks(refuse, 2, kind, more)
    assert ConfigError.__name__ in str(failed.value)

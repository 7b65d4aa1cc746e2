"""Experts that get rows on some ranks alone train under ZeRO as in one process.

Switch Transformers of Hugging Face run an expert only if a token was sent to it.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from boltmesh.strategies import ZeROStrategy, gathered_parameters
from boltmesh.strategies.offload import gradient_handler, stores
from tests.support.cases import CLIP
from tests.support.offloaded import full
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, EXPERTS, ROWS, BATCHES = 8, 6, 3, 16
"""So few rows that experts get none on one rank, and on all of them."""


class Expert(nn.Module):
    """Of ``scale`` the last rank's shard has no rows; ``parts.1`` has a sibling and no use."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.parts[0](x)) * self.scale(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router: nn.Module = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gain = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, is_large: bool) -> Tensor:
        share, chosen = self.router(x).softmax(-1).max(-1)
        output = self.gain(x) if is_large else x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                given = expert(x[rows]) * share[rows, None]
                output = output.index_add(0, rows, given.to(output.dtype))
        return x + output


class Routed(LightningModule):
    """Behind the first step, only large batches use ``gain``, which has no siblings."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Mixture() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.losses: list[Tensor] = []
        self.limit = 5.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_large = self.global_step == 0 or bool(batch.norm() > self.limit)
        for block in self.blocks:
            batch = block(batch, is_large)
        loss: Tensor = self.head(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        # A gradient of zeros and none at all differ, by weight decay and momentum.
        if self.kind == "Muon":
            matrices = [each for each in self.parameters() if each.ndim == 2]
            return torch.optim.Muon(matrices, lr=0.05, weight_decay=0.3)
        if self.kind == "NAdam":
            return torch.optim.NAdam(self.parameters(), lr=0.02, weight_decay=0.3, eps=1e-4)
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.3, eps=1e-4)


class Full(Routed):
    """Uses all parameters of a block where both of its experts get rows on some rank."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.limit = 0.0
        for block in self.blocks:
            assert isinstance(block, Mixture)
            block.router, block.experts = nn.Linear(WIDTH, 2), block.experts[:2]
            del block.unused
            for expert in block.experts:
                assert isinstance(expert, Expert)
                expert.parts = expert.parts[:1]


class Unfreezing(Full):
    """Trains one more expert of each block from a step on, which is never used."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.late = [Expert().requires_grad_(False) for _ in self.blocks]
        for block, expert in zip(self.blocks, self.late, strict=True):
            assert isinstance(block, Mixture)
            block.experts.append(expert)
            expert.parts = expert.parts[:1]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.global_step == int(self.kind) and self.late:
            late, self.late = self.late, []
            added = [each.requires_grad_() for expert in late for each in expert.parameters()]
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": added})

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=0.05, weight_decay=0.3, eps=1e-4)


class Reading(Routed):
    """Reads gradients before each step."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.given: list[str] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.given += [name for name, each in self.named_parameters() if each.grad is not None]


@dataclass(frozen=True)
class Case:
    """What differs from 16 batches on two ranks, one in each step."""

    strategy: dict[str, Any]
    ranks: int = 2
    micro_batches: int = 1
    kind: str = "AdamW"
    precision: Any = "32-true"
    module: type[Routed] = Routed
    trainer: dict[str, Any] = field(default_factory=dict)
    batches: int = BATCHES


@dataclass
class Trained:
    """What a run leaves; ``state`` by parameter."""

    losses: list[Tensor]
    values: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    given: list[str]
    counts: Counter[str]


def train(rank: int, world_size: int, case: Case) -> Trained:
    stores.SMALL_NUMEL = 0
    vars(stores)["CHUNK_NUMEL"] = 50
    gradient_handler.WARMUP_STEPS = 4
    is_one = world_size == 1
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(case.batches)]
    module, watching = case.module(case.kind), Watching()
    Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
        strategy="auto" if is_one else ZeROStrategy(telemetry=False, **case.strategy),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=case.micro_batches * (case.ranks if is_one else 1),
        precision=case.precision, use_distributed_sampler=False, callbacks=watching,
        **case.trainer,
    ).fit(module, DataLoader(batches[rank::world_size], batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    optimizer = module.optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    names: dict[Any, str] = {each: name for name, each in module.named_parameters()}
    state = {
        names[each]: {key: full(value) for key, value in of_one.items()}
        for each, of_one in optimizer.state.items()
    }
    with gathered_parameters(module) as whole:
        values = {name: each.detach().clone() for name, each in whole.items()}
    return Trained(module.losses, values, state, getattr(module, "given", []), watching.counts)


class Watching(Callback):
    """Counts chunks by how they were stepped, and buckets that were stepped in backward passes."""

    reads_gradients = False

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for engine in self.engines_of(trainer):
            begun = map(engine._arrivals.early.begun, engine.kept.buckets)
            self.counts["in backward"] += sum(each is not None for each in begun)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        for engine in self.engines_of(trainer):
            self.counts += engine.counts

    def engines_of(self, trainer: Any) -> list[Any]:
        axes = getattr(trainer.strategy, "axes", ())
        return [each._offload for each in axes if getattr(each, "_offload", None)]


def check(case: Case) -> list[Trained]:
    """Compare losses, parameters, optimizer state and which gradients there were."""
    (one,) = run_ranks(train, 1, case)
    found = run_ranks(train, case.ranks, case)
    close = partial(
        torch.testing.assert_close,
        rtol=1e-5,
        atol=1e-6 if case.precision == "32-true" else 3e-2,
    )
    for rank, run in enumerate(found):
        close(torch.stack(run.losses), torch.stack(one.losses[rank :: case.ranks]), msg="losses")
        assert run.given == one.given
        for name, value in one.values.items():
            close(run.values[name], value, msg=name)
        for name, value in found[0].values.items():  # also where ranks keep copies of shards
            assert torch.equal(run.values[name], value), name
        if case.kind == "Muon":  # a rank steps the matrices that it owns
            continue
        assert run.state.keys() == one.state.keys()  # none of what no step uses
        for name, of_one in one.state.items():
            for key, value in of_one.items():
                if rank and key not in run.state[name]:
                    continue  # of a shard without rows
                close(run.state[name][key], value, msg=f"{key} of {name}", check_dtype=False)
    assert len({run.counts["in backward"] for run in found}) == 1
    return found


@pytest.mark.sample("3", "1, accumulating in bf16")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case({"stage": 1}), id="1"),
        pytest.param(Case({"stage": 2}), id="2"),
        pytest.param(Case({"stage": 3}), id="3"),
        pytest.param(Case({"stage": 2}, kind="Muon"), id="2, whole matrices"),
        pytest.param(Case({"stage": 2}, micro_batches=2), id="2, accumulating"),
        pytest.param(
            Case({"stage": 1}, micro_batches=2, precision="bf16-mixed"),
            id="1, accumulating in bf16",
        ),
        pytest.param(Case({"stage": 3}, micro_batches=2), id="3, accumulating"),
        pytest.param(Case({"stage": 3, "shard_size": 2}, ranks=4), id="replicated"),
        pytest.param(
            Case({"stage": 3, "shard_size": 2}, ranks=4, micro_batches=2),
            id="replicated, accumulating",
        ),
    ],
)
def test_experts_without_rows_on_some_ranks_train_as_in_one_process(case: Case) -> None:
    check(case)


SELDOM = {"gradient_clip_val": 20.0}
CPU: dict[str, Any] = {"offload_optimizer": "cpu"}
ON_HOST: dict[str, Any] = {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}
ON_DISK: dict[str, Any] = {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}


@pytest.mark.sample("3, on a disk", "2, clipped late")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case({"stage": 1, **CPU}), id="1"),
        pytest.param(Case({"stage": 2, **CPU}), id="2"),
        pytest.param(Case({"stage": 3, **CPU}), id="3"),
        pytest.param(Case(ON_HOST), id="3, parameters too"),
        pytest.param(Case(ON_DISK), id="3, on a disk"),
        pytest.param(Case({"stage": 1, "offload_optimizer": "nvme"}), id="1, on a disk"),
        pytest.param(
            Case({"stage": 2, **CPU}, trainer=SELDOM, batches=3 * BATCHES), id="2, clipped late"
        ),
        pytest.param(
            Case(ON_DISK, trainer=SELDOM, batches=3 * BATCHES), id="3, on a disk, clipped late"
        ),
        pytest.param(Case(ON_HOST, batches=3 * BATCHES), id="3, never clipped"),
        pytest.param(Case({"stage": 1, **CPU}, micro_batches=2), id="1, accumulating"),
        pytest.param(Case({"stage": 2, **CPU}, micro_batches=2), id="2, accumulating"),
        pytest.param(Case(ON_DISK, micro_batches=2), id="3, on a disk, accumulating"),
        pytest.param(
            Case({"stage": 1, **CPU}, micro_batches=2, precision="bf16-mixed"),
            id="1, accumulating in bf16",
        ),
        pytest.param(Case(ON_DISK, precision="bf16-mixed"), id="3, on a disk, in bf16"),
        pytest.param(Case({"stage": 2, **CPU}, module=Reading), id="2, gradients are read"),
        pytest.param(
            Case(ON_DISK, module=Reading, micro_batches=2, trainer=CLIP),
            id="3, on a disk, gradients are read",
        ),
        pytest.param(Case({"stage": 2, **CPU}, kind="Muon"), id="2, whole matrices"),
        pytest.param(Case(ON_HOST, kind="NAdam"), id="3, not Adam"),
        pytest.param(
            Case(
                {**ON_HOST, "shard_size": 2}, ranks=4, micro_batches=2, trainer=CLIP,
                batches=4 * BATCHES,
            ),
            id="replicated, accumulating",
        ),
        pytest.param(
            Case(
                {"stage": 2, **CPU, "shard_size": 2}, ranks=4, module=Full, batches=6 * BATCHES
            ),
            id="replicated, never clipped",
        ),
        pytest.param(
            Case({**ON_DISK, "shard_size": 2}, ranks=4, batches=4 * BATCHES),
            id="replicated, on a disk",
        ),
        *(
            pytest.param(Case(ON_HOST, module=Unfreezing, kind=step), id=f"3, unfrozen at {step}")
            for step in "35"  # one rank then uses both experts of a block, the other one does not
        ),
    ],
)  # fmt: skip
def test_with_offload_they_train_as_in_one_process(case: Case, tmp_path: Path) -> None:
    if case.strategy["offload_optimizer"] == "nvme":
        case = replace(case, strategy={**case.strategy, "offload_path": tmp_path})
    check(case)


def test_on_a_disk_blocks_are_stepped_in_the_backward_pass_on_all_ranks(tmp_path: Path) -> None:
    case = Case({**ON_DISK, "offload_path": tmp_path}, module=Full, batches=2 * BATCHES)
    assert check(case)[0].counts["in backward"] > case.batches / case.ranks  # not the head alone


class Turns(LightningModule):
    """Runs each block twice in reentrant checkpoints; odd batches use ``right`` in one turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Branches() for _ in range(2))

    def training_step(self, batch: tuple[Tensor, int], batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        for turn in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, batch[1] > turn, use_reentrant=True)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, goes_right: bool) -> Tensor:
        x = x + torch.tanh(self.experts[0](x))
        return x + torch.tanh(self.experts[1](x)) if goes_right else x


def train_in_turns(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    stores.SMALL_NUMEL = 0
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(ROWS, WIDTH, generator=generator), number % 2) for number in range(8)]
    module = Turns()
    Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
        strategy="auto" if world_size == 1 else ZeROStrategy(telemetry=False, **options),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, accumulate_grad_batches=2 // world_size,
    ).fit(module, DataLoader(batches[rank::world_size], batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    with gathered_parameters(module) as whole:
        return {name: each.detach().clone() for name, each in whole.items()}


@pytest.mark.sample("3")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stage": 1}, id="1"),
        pytest.param({"stage": 3}, id="3"),
        pytest.param({"stage": 1, **CPU}, id="1, offloaded"),
        pytest.param(ON_DISK, id="3, on a disk"),
    ],
)
def test_blocks_that_reentrant_checkpoints_run_again_twice_in_a_step(
    options: dict[str, Any], tmp_path: Path
) -> None:
    if options.get("offload_optimizer") == "nvme":
        options = {**options, "offload_path": tmp_path}
    (one,) = run_ranks(train_in_turns, 1, options)
    for found in run_ranks(train_in_turns, 2, options):
        for name, value in one.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)

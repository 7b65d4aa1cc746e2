"""Parameters that a module writes to, as momentum encoders do, equal those of one process."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies import ZeROStrategy
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET, whole_parameters
from tests.support.stack import Block
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks

MOMENTUM, WIDTH, QUEUE = 0.6, 7, 8
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_cpu": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_cpu": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "zero3_nvme": {"offload_optimizer": "nvme", "offload_parameters": "nvme"},
}


class Encoder(nn.Module):
    """Blocks, which are units, and layers of the root, with rows that 2 ranks share unevenly."""

    def __init__(self, *, has_scalar: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(WIDTH, 11) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5)) if has_scalar else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return x if self.scale is None else x * self.scale


@torch.no_grad()
def replace_data(ema: Tensor, param: Tensor) -> None:  # lightly, update_momentum
    ema.data = ema.data * MOMENTUM + param.data * (1.0 - MOMENTUM)


@torch.no_grad()
def write_data(ema: Tensor, param: Tensor) -> None:  # DINO
    ema.data.mul_(MOMENTUM).add_((1 - MOMENTUM) * param.detach().data)


@torch.no_grad()
def copy_in_place(ema: Tensor, param: Tensor) -> None:
    ema.copy_(torch.lerp(param, ema, MOMENTUM))


@torch.no_grad()
def foreach(ema: Tensor, param: Tensor) -> None:  # torch.optim.swa_utils
    torch._foreach_lerp_([ema.detach()], [param.detach()], 1 - MOMENTUM)


class MomentumEncoder(LightningModule):
    """BYOL: a target that follows the encoder, before the forward passes of a step."""

    write: Callable[[Tensor, Tensor], None] = staticmethod(replace_data)

    def __init__(self, *, has_scalar: bool = False) -> None:
        super().__init__()
        self.net = Encoder(has_scalar=has_scalar)
        self.ema = copy.deepcopy(self.net).requires_grad_(False)
        self.losses: list[float] = []

    def follow(self) -> None:
        for ema, param in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            self.write(ema, param)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - self.ema(batch + 1)).square().mean()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        self.follow()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class AtEndOfStep(MomentumEncoder):
    """Writes when stages 1 and 2 have gathered all parameters, and stage 3 those of the root."""

    write = staticmethod(write_data)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.follow()
        self.losses.append(loss.item())
        return loss


class BeforeZeroGrad(MomentumEncoder):
    """Writes between forward and backward pass."""

    write = staticmethod(copy_in_place)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.follow()


class Dino(BeforeZeroGrad):
    """Writes between steps, and centres its targets by a buffer."""

    write = staticmethod(write_data)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("center", torch.zeros(1, 3))

    @override
    def loss(self, batch: Tensor) -> Tensor:
        targets = self.ema(batch + 1)
        loss = functional.cross_entropy(self.net(batch), (targets - self.center).softmax(-1))
        self.center = self.center * 0.9 + targets.mean(0, keepdim=True) * 0.1
        return loss

    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()


class Averaged(Dino):
    write = staticmethod(foreach)


class Moco(MomentumEncoder):
    """A queue of the keys of former batches, in a buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("queue", functional.normalize(torch.randn(3, QUEUE), dim=0))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @override
    def loss(self, batch: Tensor) -> Tensor:
        queries = functional.normalize(self.net(batch), dim=1)
        self.between()
        with torch.no_grad():
            keys = functional.normalize(self.ema(batch + 1), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone()], 1) / 0.2
        start = int(self.pointer)
        self.queue[:, start : start + len(keys)] = keys.T
        self.pointer.fill_((start + len(keys)) % QUEUE)
        return functional.cross_entropy(logits, logits.new_zeros(len(batch), dtype=torch.long))

    def between(self) -> None:
        pass


class MocoOrder(Moco):
    """The target follows when the encoder has run and the target has not."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    @override
    def between(self) -> None:
        self.follow()


class Clamped(MomentumEncoder):
    """WGAN: trained parameters are clamped after the optimizer's step, within the training step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.follow()
        optimizer.step()
        for param in self.net.parameters():
            param.data.clamp_(-0.2, 0.2)


@dataclass(frozen=True)
class Run:
    """What a fit leaves."""

    losses: list[float]
    parameters: dict[str, Tensor]


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(torch.randn(24, 5, generator=generator), batch_size=4)


def fit(
    rank: int,
    world_size: int,
    kind: type[MomentumEncoder],
    name: str,
    folder: str,
    options: dict[str, Any],
) -> Run:
    """Train for four optimizer steps; with ``resumes`` the strategy does so in two runs."""
    arguments = dict(options)
    resumes = arguments.pop("resumes", False) and bool(name)
    has_scalar = arguments.pop("has_scalar", False)
    losses: list[float] = []
    checkpoint = None
    for max_steps in (2, 4) if resumes else (4,):
        seed_everything(1)
        module = kind(has_scalar=has_scalar)
        strategy: Any = "auto"
        if name:
            where: dict[str, Any] = {"offload_path": folder} if "nvme" in name else {}
            strategy = ZeROStrategy(telemetry=False, **STRATEGIES[name], **where)
        trainer = Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_steps=max_steps,
            use_distributed_sampler=False, **{**QUIET, **arguments},
        )  # fmt: skip
        trainer.fit(module, data(), ckpt_path=checkpoint)
        losses += module.losses
        if resumes:
            checkpoint = f"{folder}/{name}-{max_steps}.ckpt"
            trainer.save_checkpoint(checkpoint)
    return Run(losses, whole_parameters(module))


def compare(kind: type[Any], names: list[str], folder: Path, **options: Any) -> None:
    (wanted,) = run_ranks(fit, 1, kind, "", str(folder), options)
    start = kind(has_scalar=options.get("has_scalar", False)).ema
    assert all(
        not torch.equal(wanted.parameters[f"ema.{name}"], param)
        for name, param in start.named_parameters()
    )
    calls = [(kind, name, str(folder), options) for name in names]
    for rank_results in run_ranks(in_turn, 2, fit, calls):
        for name, found in zip(names, rank_results, strict=True):
            assert found.losses == pytest.approx(wanted.losses, rel=1e-5), name
            torch.testing.assert_close(
                found.parameters, wanted.parameters, rtol=1e-5, atol=1e-6,
                msg=partial("{}: {}".format, name),
            )  # fmt: skip


KINDS: list[type[Any]] = [
    MomentumEncoder,
    AtEndOfStep,
    BeforeZeroGrad,
    Dino,
    Averaged,
    Moco,
    MocoOrder,
    Clamped,
]


@pytest.mark.sample("Dino")
@pytest.mark.parametrize("kind", KINDS)
def test_written_parameters_equal_those_of_one_process(
    kind: type[MomentumEncoder], tmp_path: Path
) -> None:
    compare(kind, list(STRATEGIES), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", [MomentumEncoder, Dino])
def test_they_do_in_an_accumulation_window(kind: type[MomentumEncoder], tmp_path: Path) -> None:
    compare(kind, ["zero1", "zero2", "zero3", "zero3_cpu"], tmp_path, accumulate_grad_batches=2)


@pytest.mark.full
def test_scalars_are_written_too(tmp_path: Path) -> None:
    compare(MomentumEncoder, ["zero1", "zero3"], tmp_path, has_scalar=True)


@pytest.mark.full
@pytest.mark.parametrize("kind", [MomentumEncoder, Moco])
def test_checkpoints_hold_what_was_written(kind: type[MomentumEncoder], tmp_path: Path) -> None:
    compare(kind, ["zero1", "zero3", "zero3_nvme"], tmp_path, resumes=True)


def refused(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(rank, world_size, AtEndOfStep, "zero1", folder, {"precision": "bf16-mixed"})
    return str(caught.value)


@pytest.mark.full
def test_a_write_to_a_copy_of_lower_precision_is_refused_by_name(tmp_path: Path) -> None:
    for message in run_ranks(refused, 2, str(tmp_path)):
        assert message.startswith("'ema.blocks.")
        assert "gathered_parameters(module, writes=True)" in message

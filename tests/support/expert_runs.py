"""Runs of mixtures of experts: on ranks with a Trainer, and in one process with all batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from boltmesh.strategies import Parallel3DStrategy, ZeROStrategy, gathered_parameters
from tests.support.expert_models import MoeModule, tokens
from tests.support.shard_runs import QUIET

Starve = Callable[[MoeModule], None]


@dataclass
class Outcome:
    """What a run gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, clipped."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    data_rank: int = 0


class Watch(Callback):
    """Keeps losses, norms and the first gradients.

    Args:
        reads: Whether it looks at gradients, which keeps them where they are until the step.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self.outcome = Outcome()
        self.reads_gradients = reads

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        batches = trainer.accumulate_grad_batches
        self.outcome.losses.append(float(args[1]["loss"]) * batches)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        self.outcome.norms.append(float(strategy.gradient_norm(args[1])))
        if self.reads_gradients and not self.outcome.gradients:
            module = trainer.lightning_module
            self.outcome.gradients = {
                name: _whole(strategy, name, each.grad)
                for name, each in module.named_parameters()
                if each.grad is not None
            }


def _whole(strategy: Any, name: str, tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    axis = getattr(strategy, "tensor_axis", None)
    is_part = axis is not None and axis.division(name) is not None
    made: Tensor = axis._joined(name, whole) if is_part else whole.clone()
    return made


EVEN_STREAM = 6
"""Between ranks whose batches have the same size."""


def loader(rank: int, count: int) -> DataLoader[Any]:
    """Return batches of one rank."""
    batches: Any = [tokens(number, rank) for number in range(count)]
    return DataLoader(batches, batch_size=None)


def starve(module: LightningModule) -> None:
    """Make every token want the first experts, so that other ranks get no row."""
    for name, each in module.named_modules():
        is_router = name.endswith(("gate", "router")) and ".experts." not in name
        if is_router and hasattr(each, "weight"):
            with torch.no_grad():
                each.weight.mul_(0.01)
                each.weight[:3] += 0.2 * torch.arange(3, 0, -1)[:, None].to(each.weight)
            each.register_forward_pre_hook(lambda _, given: (given[0].abs(), *given[1:]))


def trainer(world_size: int, strategy: Any, **options: Any) -> Trainer:
    """Return a quiet Trainer on the CPU."""
    arguments = {**QUIET, "use_distributed_sampler": False, **options}
    return Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **arguments)


def strategy_of(**options: Any) -> ZeROStrategy | Parallel3DStrategy:
    """Return the strategy that has these options."""
    if "zero_stage" in options:
        return Parallel3DStrategy(**options)
    return ZeROStrategy(**options)


def whole_of(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters whole. Collective."""
    with gathered_parameters(module):
        return {name: each.detach().clone() for name, each in module.named_parameters()}


def train(
    rank: int,
    world_size: int,
    kind: str,
    optimizer: str = "sgd",
    is_starved: bool = False,
    accumulate: int = 1,
    steps: int = 3,
    strategy: dict[str, Any] | None = None,
    reads_gradients: bool = True,
    is_even: bool = False,
    **options: Any,
) -> Outcome:
    """Train some steps on a rank."""
    module = MoeModule(kind, optimizer)
    if is_starved:
        starve(module)
    chosen = strategy_of(**{"expert": world_size, "telemetry": False, **(strategy or {})})
    watch = Watch(reads=reads_gradients)
    watch.outcome.data_rank = chosen.layout_of(world_size).coordinates(rank)["data"]
    run = trainer(
        world_size,
        chosen,
        max_steps=steps,
        callbacks=[watch],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        **options,
    )
    stream = watch.outcome.data_rank * (EVEN_STREAM if is_even else 1)
    run.fit(module, loader(stream, steps * accumulate))
    watch.outcome.parameters = whole_of(module)
    return watch.outcome


def train_alone(
    world_size: int,
    kind: str,
    optimizer: str = "sgd",
    is_starved: bool = False,
    accumulate: int = 1,
    steps: int = 3,
    precision: str = "32",
    is_even: bool = False,
) -> Outcome:
    """Train in one process with the batches of all ranks; losses are those of all in turn."""
    module = MoeModule(kind, optimizer)
    if is_starved:
        starve(module)
    stepper = module.configure_optimizers()
    outcome = Outcome()
    for step in range(steps):
        stepper.zero_grad()
        for part in range(accumulate):
            for rank in range(world_size):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    batch = tokens(step * accumulate + part, rank * (EVEN_STREAM if is_even else 1))
                    loss = module.training_step(batch, 0)
                (loss / world_size / accumulate).backward()
                outcome.losses.append(float(loss.detach()))
        own = [each for each in module.parameters() if each.grad is not None]
        norm = torch.stack([each.grad.double().norm() for each in own]).norm()
        outcome.norms.append(float(norm))
        if not outcome.gradients:
            outcome.gradients = {
                n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
            }
        for each in own:
            each.grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        stepper.step()
    outcome.parameters = {name: each.detach().clone() for name, each in module.named_parameters()}
    return outcome


def differences(ranks: list[Outcome], alone: Outcome) -> dict[str, float]:
    """Return the largest relative difference of losses and norms, the largest of values."""
    size = 1 + max(each.data_rank for each in ranks)
    gaps = [
        abs(found - expected) / abs(expected)
        for each in ranks
        for found, expected in zip(each.losses, alone.losses[each.data_rank :: size], strict=True)
    ]
    return {
        "loss": max(gaps),
        "norm": max(
            abs(a - b) / abs(b)
            for each in ranks
            for a, b in zip(each.norms, alone.norms, strict=True)
        ),
        "gradient": _largest(ranks, alone, "gradients"),
        "parameter": _largest(ranks, alone, "parameters"),
    }


def _largest(ranks: list[Outcome], alone: Outcome, what: str) -> float:
    expected: dict[str, Tensor] = getattr(alone, what)
    gaps, names = [0.0], set[str]()
    for each in ranks:
        found: dict[str, Tensor] = getattr(each, what)
        names |= found.keys()
        gaps += [float((found[name] - expected[name]).detach().abs().max()) for name in found]
    # Of stages each rank has its own gradients; they may not have been looked at.
    assert names == expected.keys() or (what == "gradients" and not names), names ^ expected.keys()
    return max(gaps)

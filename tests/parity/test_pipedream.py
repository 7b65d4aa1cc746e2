"""PipeDream-2BW computes what one process computes that applies each gradient one step late."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn import Parameter, functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.strategies.telemetry import tensors_by_kind
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

STEPS = 9
CLIP = 0.3


class Trained(Stack):
    """Keeps the loss of each step, and the norm of the gradients that it is to apply."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.memory: dict[str, tuple[int, int | None]] = {}

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.trainer.world_size > 1 and batch_idx == 3:
            self.memory = memory(self.trainer.strategy)

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if self.trainer.world_size > 1:
            self.norms.append(strategy.gradient_norm(optimizer))


def memory(strategy: Any) -> dict[str, tuple[int, int | None]]:
    """Bytes held and expected, by kind, between two steps."""
    held: Any = tensors_by_kind(strategy)
    return {
        each.kind: (
            sum(one.numel() * one.element_size() for one in held[each.kind]),
            each.predicted_bytes,
        )
        for each in strategy.expected_memory()
        if each.kind in held
    }


def data() -> Any:
    """9 batches, the last of which has fewer rows than a batch has microbatches."""
    return token_data(8 * (STEPS - 1) + 3, 8)


def late(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train in a loop of a few lines, without Lightning."""
    seed_everything(1, verbose=False)
    module = Trained(depth=4, **options)
    made = module.configure_optimizers()
    optimizer, scheduler = (
        (made[0][0], made[1][0]["scheduler"]) if options.get("groups") else (made, None)
    )
    pending: dict[Parameter, Tensor] = {}
    for batch in data():
        parameters = list(module.parameters())
        loss = module.loss(batch)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter in parameters:
            parameter.grad = pending.get(parameter)
        found = [each.grad for each in parameters if each.grad is not None]
        module.losses.append(loss.item())
        module.norms.append(float(torch.nn.utils.get_total_norm(found)) if found else 0.0)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        pending = dict(zip(parameters, gradients, strict=True))
    return told(module, lambda _: True)


def told(module: Trained, holds: Any) -> dict[str, Any]:
    named = module.named_parameters()
    return {
        "losses": module.losses,
        "norms": module.norms,
        "parameters": {name: each.detach().clone() for name, each in named if holds(name)},
    }


def staged(
    rank: int, world_size: int, options: dict[str, Any], trainer: dict[str, Any]
) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    module = Trained(depth=4, **options)
    strategy = pipeline(schedule="pipedream_2bw")
    fitted = quiet_trainer(world_size, strategy, gradient_clip_val=CLIP, **trainer)
    fitted.fit(module, data(), token_data(11, 4) if "val_check_interval" in trainer else None)
    own = sum(each.numel() * each.element_size() for each in strategy.held_parameters())
    assert module.memory["parameters"] == module.memory["gradients"] == (2 * own, 2 * own)
    assert module.memory["optimizer"][0] == module.memory["optimizer"][1]
    return told(module, strategy.holds)


@pytest.mark.sample("AdamW, a learning rate that changes, tied weights")
@pytest.mark.parametrize(
    ("ranks", "options", "trainer"),
    [
        (2, {"optimizer": "sgd"}, {}),
        (4, {"groups": True, "ties": True}, {}),
        (2, {"groups": True, "ties": True}, {"val_check_interval": 2}),
    ],
    ids=["SGD", "AdamW, a learning rate that changes, tied weights", "drained every other step"],
)
def test_each_gradient_is_applied_one_step_late(
    ranks: int, options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    wanted = run_ranks(late, 1, options)[0]
    found = run_ranks(staged, ranks, options, trainer)
    assert wanted["norms"][0] == 0.0
    assert min(wanted["norms"][1:]) > CLIP
    assert wanted["losses"][-1] < 0.95 * wanted["losses"][0]
    names = set()
    for each in found:
        assert each["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert each["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        names |= each["parameters"].keys()
        for name, parameter in each["parameters"].items():
            torch.testing.assert_close(
                parameter, wanted["parameters"][name], rtol=1e-4, atol=1e-6, msg=name
            )
    assert names == wanted["parameters"].keys()


class Save(Callback):
    """Saves after a step in the middle."""

    def __init__(self, path: str) -> None:
        self.path = path

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def resumed(
    rank: int, world_size: int, schedule: str, epochs: int, source: str | None, target: str | None
) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    module = Trained(depth=4, optimizer="sgd", ties=True)
    strategy = pipeline(schedule=schedule)
    callbacks: list[Callback] = [] if target is None else [Save(target)]
    trainer = quiet_trainer(world_size, strategy, max_epochs=epochs, callbacks=callbacks)
    with pytest.warns(match="drops it") if schedule == "1f1b" else nullcontext():
        trainer.fit(module, data(), ckpt_path=source)
    if target is not None:
        trainer.save_checkpoint(f"{target}-end")
    for each in trainer.optimizers[0].state.values():
        assert each.keys() == {"momentum_buffer"}
    return told(module, strategy.holds)


@pytest.mark.full
def test_a_run_goes_on_to_the_bit_with_the_gradient_that_was_pending(tmp_path: Path) -> None:
    path = str(tmp_path / "middle")
    whole = run_ranks(resumed, 2, "pipedream_2bw", 2, None, None)
    run_ranks(resumed, 2, "pipedream_2bw", 1, None, path)
    for steps, source in ((4, path), (STEPS, f"{path}-end")):
        found = run_ranks(resumed, 2, "pipedream_2bw", 2, source, None)
        for one, other in zip(found, whole, strict=True):
            assert one["losses"] == other["losses"][steps:]
            assert one["parameters"].keys() == other["parameters"].keys()
            for name, each in other["parameters"].items():
                assert torch.equal(one["parameters"][name], each), name
    # A schedule that applies gradients at once drops it, and says so.
    found = run_ranks(resumed, 2, "1f1b", 1, path, None)
    assert found[0]["losses"][0] == pytest.approx(whole[0]["losses"][4])
    assert found[0]["losses"][1] != pytest.approx(whole[0]["losses"][5])


class Recomputed(torch.nn.Module):
    """Runs what is in it again in its backward pass."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @override
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return made


def refused(rank: int, world_size: int) -> list[str]:
    """Run what cannot be; return what is said."""

    def fit(module: Trained, **trainer: Any) -> str:
        fitted = quiet_trainer(world_size, pipeline(schedule="pipedream_2bw"), **trainer)
        with pytest.raises(BoltMeshError) as caught:
            fitted.fit(module, data())
        return str(caught.value)

    recomputing = Trained(depth=4)
    recomputing.blocks = torch.nn.ModuleList(map(Recomputed, recomputing.blocks))
    hooked = Trained(depth=4)
    for each in hooked.parameters():
        each.register_hook(lambda gradient: gradient)
    astray = Trained(depth=4)
    for block in astray.blocks:
        kept: Any = block.up
        kept.forward = partial(functional.linear, weight=kept.weight, bias=kept.bias)
    scheduled = GradientAccumulationScheduler({0: 2})
    return [
        fit(Trained(depth=4), accumulate_grad_batches=3),
        fit(Trained(depth=4), callbacks=[scheduled]),
        fit(recomputing),
        fit(hooked),
        fit(astray),
    ]


@pytest.mark.full
def test_what_cannot_be_is_refused_by_name() -> None:
    said = [
        "accumulate_grad_batches=3 .* batches 3 times as large",
        "accumulate_grad_batches=2 ",
        "a Linear runs again|a Block runs again.*gradient_checkpointing_disable",
        "has a hook on its gradient",
        "by a reference of its own",
    ]
    for told_on_rank in run_ranks(refused, 2):
        for found, wanted in zip(told_on_rank, said, strict=True):
            assert re.search(wanted, found, flags=re.DOTALL), found

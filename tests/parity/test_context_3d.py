"""The context axis beside data, tensor and pipeline axes, compared with one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies import Parallel3DStrategy
from tests.parity.test_context import AdamW, loader, values_of
from tests.support.context_models import built
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow(20)]


class Norms(Callback):
    """Keeps the norm of all gradients before each optimizer step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, _: Any, optimizer: Optimizer) -> None:
        strategy: Any = trainer.strategy
        if isinstance(strategy, Parallel3DStrategy):
            norm = strategy.gradient_norm(optimizer)
            assert norm is not None
            self.found.append(float(norm))
            return
        rows = [each.grad for group in optimizer.param_groups for each in group["params"]]
        given = [each.norm() for each in rows if each is not None]
        self.found.append(float(torch.stack(given).norm()))


def trained(
    name: str, strategy: Any, devices: int, texts: Any, options: dict[str, Any]
) -> tuple[AdamW, Trainer, list[float]]:
    torch.manual_seed(1)
    module, norms = AdamW(built(name)), Norms()
    trainer = quiet_trainer(devices, strategy, callbacks=[norms], **options)
    trainer.fit(module, texts, texts)
    return module, trainer, norms.found


def fit_beside(
    rank: int, size: int, name: str, sizes: dict[str, Any], options: dict[str, Any]
) -> dict[str, float]:
    """Train on all ranks, then in one process; return how far apart they are."""
    strategy = Parallel3DStrategy(**{"telemetry": False, "timeout_s": 60.0, **sizes})
    layout = strategy.layout_of(size)
    data, own = layout.data, layout.coordinates(rank)["data"]
    texts, whole = loader(own, data), loader(0, 0 if data > 1 else 1)
    divided, trainer, norms = trained(name, strategy, size, texts, options)
    values = values_of(divided)
    one, reference, expected = trained(name, "auto", 1, whole, options)
    pairs = zip(values, one.parameters(), strict=True)
    found = {"parameters": max(float((a - b).abs().max()) for a, b in pairs)}
    found["norms"] = max(abs(a - b) / b for a, b in zip(norms, expected, strict=True))
    if data == 1:
        metrics = [float(each.callback_metrics["val_loss"]) for each in (trainer, reference)]
        found["val_loss"] = abs(metrics[0] - metrics[1])
        losses = zip(divided.losses, one.losses, strict=True)
        found["losses"] = max(abs(a - b) for a, b in losses)
    return found


def check(ranks: int, name: str, sizes: dict[str, Any], **options: Any) -> None:
    for found in run_ranks(fit_beside, ranks, name, sizes, options):
        assert max(found.values()) < 2e-5, found


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_data_and_context_axes_train_as_one_process(stage: int) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    check(4, "gpt", {"data": 2, "context": 2, "zero_stage": stage}, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 1, "offload_optimizer": "cpu"},
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"zero_stage": 3, "balance": "zigzag"},
    ],
    ids=str,
)
def test_data_and_context_axes_with_each_zero_stage_and_offload(sizes: dict[str, Any]) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    check(4, "gpt", {"data": 2, "context": 2, **sizes}, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 0}, "context=0 holds no rank"),
        ({"balance": "zigzag"}, "the context axis, which context=1 switches off"),
        ({"context": 2, "attention": "rings"}, "attention='rings' does not exist"),
        (
            {"context": 2, "tensor": 2, "loss_parallel": True},
            "auto', or set context=1",
        ),
        ({"context": 2, "zero_stage": 3, "tile_linear_bytes": 1 << 20}, "or set context=1"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=said):
        Parallel3DStrategy(**options)


@pytest.mark.sample("gpt-{'tensor': 2, 'context': 2, 'zero_stage': 3, 'sequence_parallel': True}")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"tensor": 2, "context": 2, "zero_stage": 0}),
        ("gpt", {"tensor": 2, "context": 2, "zero_stage": 3, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_tensor_and_context_axes_train_as_one_process(name: str, sizes: dict[str, Any]) -> None:
    check(4, name, sizes, gradient_clip_val=0.5)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        {"sequence_parallel": True, "balance": "zigzag", "activation_checkpointing": "full"},
        {"sequence_parallel": True, "attention": "heads", "zero_stage": 2},
        {"loss_parallel": False, "attention": "ring", "activation_checkpointing": "selective"},
        {"offload_optimizer": "cpu"},
    ],
    ids=str,
)
def test_tensor_and_context_axes_with_each_attention_and_recomputation(
    sizes: dict[str, Any],
) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    check(4, "llama", {"tensor": 2, "context": 2, **sizes}, **options)


@pytest.mark.full
def test_data_tensor_and_context_axes_train_together() -> None:
    check(8, "gpt", {"data": 2, "tensor": 2, "context": 2, "zero_stage": 3})

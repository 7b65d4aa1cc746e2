"""The context axis beside data, tensor and pipeline axes, compared with one process."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies import Parallel3DStrategy, deferred_init
from tests.parity.test_context import AdamW, loader, values_of
from tests.support.context_models import built
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow(20)]


class Kept(Callback):
    """Keeps the norm of all gradients before each optimizer step, and losses of batches."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Trainer, _: Any, optimizer: Optimizer) -> None:
        strategy: Any = trainer.strategy
        if isinstance(strategy, Parallel3DStrategy):
            norm = strategy.gradient_norm(optimizer)
            assert norm is not None
            self.norms.append(float(norm))
            return
        rows = [each.grad for group in optimizer.param_groups for each in group["params"]]
        given = [each.norm() for each in rows if each is not None]
        self.norms.append(float(torch.stack(given).norm()))


def trained(
    name: str,
    strategy: Any,
    devices: int,
    texts: Any,
    options: dict[str, Any],
    defers: bool = False,
) -> tuple[AdamW, Trainer, Kept]:
    torch.manual_seed(1)
    with deferred_init(min_bytes=1) if defers else nullcontext():
        module = AdamW(built(name))
    kept = Kept()
    trainer = quiet_trainer(devices, strategy, callbacks=[kept], **options)
    trainer.fit(module, texts, texts)
    return module, trainer, kept


def fit_beside(
    rank: int, size: int, name: str, sizes: dict[str, Any], options: dict[str, Any]
) -> dict[str, float]:
    """Train on all ranks, then in one process; return how far apart they are."""
    defers = sizes.pop("defers", False)
    strategy = Parallel3DStrategy(**{"telemetry": False, "timeout_s": 600.0, **sizes})
    layout = strategy.layout_of(size)
    data, own = layout.data, layout.coordinates(rank)["data"]
    rows = 4 if layout.pipeline > 1 < layout.tensor else 2  # microbatches of two rows at least
    texts, whole = loader(own, data, rows), loader(0, 1, rows * data)
    divided, trainer, kept = trained(name, strategy, size, texts, options, defers)
    values = values_of(divided)
    one, reference, expected = trained(name, "auto", 1, whole, options)
    pairs = zip(values, one.parameters(), strict=True)
    found = {"parameters": max(float((a - b).abs().max()) for a, b in pairs)}
    norms = zip(kept.norms, expected.norms, strict=True)
    found["norms"] = max(abs(a - b) / b for a, b in norms)
    if data == 1:
        metrics = [float(each.callback_metrics["val_loss"]) for each in (trainer, reference)]
        found["val_loss"] = abs(metrics[0] - metrics[1])
        losses = zip(kept.losses, expected.losses, strict=True)
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
        ({"context": 2, "tensor": 2, "tile_tokens": 8}, "tile_tokens out, or set tensor=1"),
        ({"context": 2, "pipeline": 2, "balance": "documents"}, "'zigzag', or set pipeline=1"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=said):
        Parallel3DStrategy(**options)


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.slow(90)
def test_four_axes_train_together() -> None:
    sizes = {"pipeline": 2, "data": 2, "tensor": 2, "context": 2, "microbatches": 2}
    check(16, "gpt", {**sizes, "zero_stage": 1}, limit_train_batches=2, limit_val_batches=1)


@pytest.mark.sample("gpt-{'schedule': '1f1b', 'activation_checkpointing': 'selective'}")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("masked", {"schedule": "1f1b", "defers": True}),
        ("llama", {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "balance": "zigzag"}),
        ("gpt", {"schedule": "1f1b", "activation_checkpointing": "selective"}),
    ],
    ids=str,
)
def test_pipeline_and_context_axes_train_as_one_process(name: str, sizes: dict[str, Any]) -> None:
    """With losses that microbatches, and the ranks of a microbatch, divide unevenly."""
    options = {"limit_train_batches": 2, "limit_val_batches": 1, "gradient_clip_val": 0.5}
    check(
        4,
        name,
        {"pipeline": 2, "context": 2, "microbatches": 2, "zero_stage": 3, **sizes},
        **options,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        {"schedule": "1f1b", "zero_stage": 3, "activation_checkpointing": "full"},
        {"schedule": "gpipe", "activation_checkpointing": "full"},
        {
            "schedule": "zero_bubble",
            "attention": "ring",
            "zero_stage": 1,
            "offload_optimizer": "cpu",
        },
        {"schedule": "looped_bfs", "stages_per_rank": 2, "attention": "heads", "zero_stage": 2},
        {"schedule": "zbv", "stages_per_rank": 2},
    ],
    ids=str,
)
def test_pipeline_and_context_axes_with_each_schedule_and_attention(sizes: dict[str, Any]) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    check(4, "llama", {"pipeline": 2, "context": 2, "microbatches": 2, **sizes}, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (6, {"pipeline": 2, "context": 3, "balance": "zigzag"}),
        (8, {"pipeline": 2, "tensor": 2, "context": 2, "zero_stage": 0}),
        (8, {"pipeline": 2, "data": 2, "context": 2, "zero_stage": 3, "stages_per_rank": 2,
             "schedule": "interleaved_1f1b"}),
        (16, {"pipeline": 2, "data": 2, "tensor": 2, "context": 2, "zero_stage": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_all_axes_train_together(ranks: int, sizes: dict[str, Any]) -> None:
    options = {"limit_train_batches": 2, "limit_val_batches": 1}
    check(ranks, "gpt", {"microbatches": 2, "timeout_s": 200.0, **sizes}, **options)


def saved(rank: int, size: int, path: str, sizes: dict[str, Any]) -> None:
    """Train an epoch and save."""
    strategy = Parallel3DStrategy(telemetry=False, timeout_s=600.0, **sizes)
    options = {"limit_train_batches": 2, "limit_val_batches": 0}
    _, trainer, _ = trained("llama", strategy, size, loader(0, 1), options)
    trainer.save_checkpoint(path)


def resumed(rank: int, size: int, path: str, sizes: dict[str, Any]) -> float:
    """Train a second one on other axes; compare with one process that was never stopped."""
    options = {"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 2}
    strategy = Parallel3DStrategy(telemetry=False, timeout_s=600.0, **sizes)
    module = AdamW(built("llama"))
    trainer = quiet_trainer(size, strategy, **options)
    trainer.fit(module, loader(0, 1), ckpt_path=path)
    values = values_of(module)
    one, _, _ = trained("llama", "auto", 1, loader(0, 1), options)
    pairs = zip(values, one.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_go_on_between_context_sizes_and_pipelines(tmp_path: Any, stage: int) -> None:
    path = str(tmp_path / "epoch.ckpt")
    wide = {"context": 4, "zero_stage": stage}
    staged = {"pipeline": 2, "context": 2, "microbatches": 2, "zero_stage": stage}
    run_ranks(saved, 4, path, staged)
    assert max(run_ranks(resumed, 4, path, wide)) < 2e-5
    run_ranks(saved, 4, path, wide)
    assert max(run_ranks(resumed, 4, path, staged)) < 2e-5

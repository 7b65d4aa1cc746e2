"""Strategies can be pickled, and ranks started by ``spawn`` get them that way."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from boltmesh.strategies.registry import STRATEGIES, build_strategy
from tests.support.stack import Stack, token_data

ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in STRATEGIES),
    ("bolt_ddp", {"gradient_compression": "powersgd", "powersgd_start_step": 9, "timeout_s": 7.0}),
    ("bolt_zero3", {"blocks": ["layers.*"], "tile_linear_bytes": 1 << 20, "shard_size": "node"}),
    ("bolt_zero3_nvme", {"offload_fraction": {"host": 0.3, "disk": 0.5}, "offload_path": "away"}),
    ("bolt_pipeline", {"stages": 2, "schedule": "zbv", "split": ["blocks.1"], "seed": 3}),
    ("bolt_tensor", {"size": 2, "plan": {"*.up": "column"}, "sequence_parallel": True}),
    ("bolt_3d", {"data": 2, "zero_stage": 3, "offload_optimizer": "cpu", "async_save": True}),
    ("bolt_3d", {"data": 2, "pipeline": 2, "tensor": 2, "microbatches": 4, "zero_stage": 0}),
]

LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("bolt_ddp", 2, {}),
    ("bolt_zero3", 2, {}),
    ("bolt_pipeline", 2, {"stages": 2, "microbatches": 2}),
    ("bolt_tensor", 2, {"size": 2}),
    ("bolt_3d", 2, {"data": 1, "pipeline": 2, "microbatches": 2, "zero_stage": 1}),
    ("bolt_3d", 4, {"pipeline": 2, "tensor": 2, "microbatches": 2, "zero_stage": 0}),
]
"""With how many ranks."""

ROWS = 8
"""Of the one batch, over all ranks."""


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_a_pickled_strategy_has_every_argument(name, arguments):
    strategy = build_strategy(name, **arguments)
    copy = pickle.loads(pickle.dumps(strategy))
    assert describe(copy) == describe(strategy)
    other = build_strategy(name, **{"timeout_s": 7.5, **arguments, "seed": 17})
    assert describe(other) != describe(strategy)  # it sees what a strategy was given


def describe(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The types of an object and of all that it holds, with every plain value that is not None."""
    if id(value) in above:
        return "(above)"
    inside = partial(describe, above=(*above, id(value)))
    if isinstance(value, dict):
        return {str(key): inside(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [type(value).__name__, *map(inside, value)]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    slots = getattr(type(value), "__slots__", ())
    fields = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
    if fields or type(value).__repr__ is object.__repr__:  # type: ignore[comparison-overlap]
        return [type(value).__qualname__, inside(fields)]
    return repr(value)


@pytest.fixture(scope="module")
def one_process():
    return train("auto", devices=1, batch_size=ROWS)


@pytest.mark.ranks
@pytest.mark.slow(60)
@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks", "arguments"), LAYOUTS)
def test_spawned_ranks_compute_what_one_process_does(name, ranks, arguments, one_process):
    strategy = build_strategy(
        name, telemetry=False, start_method="spawn", timeout_s=600, **arguments
    )
    replicas = 2 if name in {"bolt_ddp", "bolt_zero3"} else 1
    loss, parameters = train(strategy, devices=ranks, batch_size=ROWS // replicas)
    wanted_loss, wanted = one_process
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    torch.testing.assert_close(parameters, wanted, rtol=1e-5, atol=1e-6)


def train(strategy: Any, *, devices: int, batch_size: int) -> tuple[float, dict[str, Any]]:
    """The loss of one optimizer step and the parameters after it, as ranks give them back."""
    seed_everything(1, verbose=False)
    module = Stack(depth=2, width=8, hidden=12, optimizer="sgd")
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, token_data(ROWS, batch_size), token_data(ROWS, batch_size))
    loss = float(trainer.callback_metrics["train_synced"])
    return loss, {name: each.detach() for name, each in module.named_parameters()}

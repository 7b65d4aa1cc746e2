"""``verify_replicas_every``: what ranks hold alike is compared, and the rank that differs named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.distributed.tensor import DTensor

from boltmesh.errors import ConfigError
from boltmesh.strategies import (
    DDPStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.engine.replica_check import Differing, _Key, find_differing, hash_of
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import RankFailure, run_ranks


class FlipBit(Callback):
    """Flips the lowest bit of one element on one rank after the third step, as faulty memory."""

    def __init__(self, rank: int, part: str) -> None:
        self.rank, self.part = rank, part

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step != 3 or trainer.global_rank != self.rank:
            return
        strategy: Any = trainer.strategy
        held = strategy.held_parameters()
        for name, parameter in module.named_parameters():
            if self.part in name and any(parameter is each for each in held):
                local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                local.detach().view(-1).view(torch.int32)[-1] ^= 1


def fit(strategy: Any, module: LightningModule, data: Any, *callbacks: Callback) -> int:
    trainer = Trainer(
        accelerator="cpu", devices=strategy_size(), max_steps=6, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=strategy, num_sanity_val_steps=0, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer.global_step


def strategy_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else SIZE[0]


SIZE = [1]
"""Ranks of this job, which a worker sets before it makes a Trainer."""
MADE: dict[str, Callable[..., Any]] = {
    "ddp": DDPStrategy,
    "tensor": TensorParallelStrategy,
    "pipeline": lambda **more: PipelineParallelStrategy(stages=2, microbatches=2, **more),
    "groups": lambda **more: ZeROStrategy(stage=3, shard_size=2, **more),
    "zero": lambda **more: ZeROStrategy(stage=2, **more),
}


def run(rank: int, world_size: int, kind: str, every: int, flipped: tuple[int, str] | None) -> int:
    SIZE[0] = world_size
    seed_everything(1, verbose=False)
    strategy = MADE[kind](telemetry=False, verify_replicas_every=every)
    callbacks = [] if flipped is None else [FlipBit(*flipped)]
    model = TinyGPT(optimizer="adamw", ties=kind == "pipeline")
    return fit(strategy, model, text_data(48, 4), *callbacks)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("ddp", 2),
        ("tensor", 2),
        ("pipeline", 2),
        pytest.param("groups", 4, marks=pytest.mark.full),
    ],
)
def test_ranks_that_hold_the_same_pass(kind: str, ranks: int) -> None:
    assert run_ranks(run, ranks, kind, 1, None) == [6] * ranks


SAID_OF_THREE = (
    r"after step 4 rank 1 holds other values of \S*norm\S* than ranks 0, 2, which has to be equal "
    r"on them, along the data axis\. .* equal at step 2: resume from"
)


@pytest.mark.sample("ddp-3-flipped0-said0")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "ranks", "flipped", "said"),
    [
        (
            "ddp",
            3,
            (1, "norm"),
            SAID_OF_THREE,
        ),
        (
            "tensor",
            2,
            (0, "norm"),
            r"after step 4 ranks 0, 1 hold different values of \S+, .* along the tensor axis",
        ),
        (
            "pipeline",
            2,
            (1, "tokens"),
            r"after step 4 ranks 0, 1 hold different values of tokens.weight, .* the pipeline axis",
        ),
        pytest.param(
            "groups",
            4,
            (2, "norm"),
            r"after step 4 ranks 0, 2 hold different values of \S*norm\S*, ",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_rank_that_differs_is_named(
    kind: str, ranks: int, flipped: tuple[int, str], said: str
) -> None:
    with pytest.raises(RankFailure, match=said):
        run_ranks(run, ranks, kind, 2, flipped)


@pytest.mark.full
@pytest.mark.ranks
def test_a_layout_without_anything_alike_is_refused() -> None:
    with pytest.raises(RankFailure, match="verify_replicas_every=2 has nothing to compare"):
        run_ranks(run, 2, "zero", 2, None)


@pytest.mark.parametrize("every", [0, -1, True, 2.5])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no number of optimizer steps\. Use 100"):
        DDPStrategy(verify_replicas_every=every)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_a_hash_tells_each_element_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(6).reshape(2, 3).to(dtype)
    seen = {hash_of(values)}
    assert hash_of(values.clone()) in seen
    for at in range(6):
        changed = values.clone()
        flat = changed.view(-1).view(torch.uint8)
        flat[at * values.element_size()] ^= 1
        seen.add(hash_of(changed))
    assert len(seen) == 7
    assert dtype == torch.bool or hash_of(values.t()) != hash_of(values)
    assert hash_of(torch.zeros(0, dtype=dtype)) == 0
    assert hash_of(torch.tensor(float("nan"))) == hash_of(torch.tensor(float("nan")))


def test_a_majority_names_the_other_rank() -> None:
    one, other = _Key("a", ()), _Key("b", (1,))
    alike = {one: 1, other: 5}
    assert find_differing({0: alike, 1: alike, 2: {one: 1}}) is None
    assert find_differing({0: alike, 1: {**alike, other: 6}}) == Differing("b", None, [0, 1])
    told = {0: alike, 1: {**alike, one: 2}, 2: alike, 3: alike}
    assert find_differing(told) == Differing("a", 1, [0, 2, 3])

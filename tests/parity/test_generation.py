"""Text that Hugging Face's ``generate`` writes, compared token by token with one process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from boltmesh.errors import ConfigError
from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.support.generation import PLACES, WAYS, Tokens, generated
from tests.support.ranks import run_ranks

Build = Callable[[], Any]
QUIET: dict[str, Any] = {"telemetry": False}
OFFLOAD: dict[str, Any] = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}

DATA: dict[str, Build] = {
    "ddp": lambda: DDPStrategy(**QUIET),
    "zero1": lambda: ZeROStrategy(stage=1, **QUIET),
    "zero1_cpu": lambda: ZeROStrategy(stage=1, offload_optimizer="cpu", **QUIET),
    "zero2": lambda: ZeROStrategy(stage=2, **QUIET),
    "zero3": lambda: ZeROStrategy(stage=3, **QUIET),
    "zero3, gathered": lambda: ZeROStrategy(stage=3, gather_for_generation=True, **QUIET),
    "zero3_cpu": lambda: ZeROStrategy(stage=3, **OFFLOAD, **QUIET),
    "zero3_cpu, gathered": lambda: ZeROStrategy(
        stage=3, gather_for_generation=True, **OFFLOAD, **QUIET
    ),
    "3d": lambda: Parallel3DStrategy(data=2, **QUIET),
}
"""With texts and prompts of each rank's own."""

MODEL: dict[str, Build] = {
    "tensor": lambda: TensorParallelStrategy(size=2, **QUIET),
    "sequence": lambda: TensorParallelStrategy(size=2, sequence_parallel=True, **QUIET),
    "context": lambda: ContextParallelStrategy(size=2, **QUIET),
    "pipeline": lambda: PipelineParallelStrategy(stages=2, **QUIET),
    "interleaved": lambda: PipelineParallelStrategy(schedule="interleaved_1f1b", **QUIET),
}
"""With ranks that have the same ones."""

FOUR: dict[str, Build] = {
    "data 2 x tensor 2": lambda: Parallel3DStrategy(data=2, tensor=2, zero_stage=3, **QUIET),
    "data 2 x pipeline 2": lambda: Parallel3DStrategy(data=2, pipeline=2, zero_stage=3, **QUIET),
    "pipeline 2 x tensor 2": lambda: Parallel3DStrategy(
        data=1, pipeline=2, tensor=2, zero_stage=0, **QUIET
    ),
}


@cache
def alone(family: str, place: str) -> Tokens:
    """Return what one process writes."""
    made: Tokens = run_ranks(_generate, 1, family, place, None)[0]
    return made


def _generate(rank: int, world_size: int, family: str, place: str, name: str | None) -> Tokens:
    torch.set_num_threads(1)
    if name is None:
        return generated(family, list(WAYS), place, "auto")
    replicas = 2 if name in DATA or name.startswith(("data", "expert")) else 1
    ways = [*WAYS]
    if place == "predict alone" and name in MODEL | FOUR and name != "context":
        # The step is planned as a whole: with all ways in one step it takes minutes.
        ways = ["greedy", "sampling"]
    strategy = ({**DATA, **MODEL, **FOUR, "expert": _expert})[name]()
    return generated(family, ways, place, strategy, replicas=replicas)


def _expert() -> ZeROStrategy:
    return ZeROStrategy(stage=1, expert=2, **QUIET)


def check(family: str, place: str, name: str, num_ranks: int = 2) -> None:
    wanted = alone(family, place)
    found = run_ranks(_generate, num_ranks, family, place, name)
    for tokens in found:
        assert tokens
        assert {key: wanted[key] for key in tokens} == tokens
    prompts = {number for _, _, number in wanted}
    assert {number for tokens in found for _, _, number in tokens} == prompts


@pytest.mark.sample("gpt2-zero3-on_train_epoch_end")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*DATA, *MODEL])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tokens_are_those_of_one_process(family: str, name: str, place: str) -> None:
    check(family, place, name)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_tokens_of_divided_experts_are_those_of_one_process(place: str) -> None:
    check("mixtral", place, "expert")


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FOUR)
def test_tokens_of_several_axes_are_those_of_one_process(name: str, place: str) -> None:
    check("llama", place, name, num_ranks=4)


def test_prompts_are_written_on_differently() -> None:
    tokens = alone("llama", "predict_step")
    texts = {str(each) for each in tokens.values()}
    assert len(texts) > len(tokens) / 2


@pytest.mark.parametrize("options", [{"stage": 2}, {"tile_linear_bytes": 4096}, {"expert": 2}])
def test_gathering_for_generation_where_it_does_nothing_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"gather_for_generation=True .* Leave"):
        ZeROStrategy(gather_for_generation=True, **options)

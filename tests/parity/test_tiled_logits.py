"""With logits in tiles every strategy computes what one process computes with all of them."""

from functools import partial
from typing import Any

import pytest
import torch

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import ConfigError
from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.tiling import logits
from tests.support.causal_training import CausalTraining
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

HOST: dict[str, Any] = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "zero2": partial(ZeROStrategy, stage=2),
    "zero3": ZeROStrategy,
    "zero3, offloaded": partial(ZeROStrategy, **HOST),
    "context": ContextParallelStrategy,
    "context, zero3": partial(ContextParallelStrategy, zero_stage=3),
}
MODULES: dict[str, Any] = {
    "by hand": TinyGPT,
    "by hand, tied": partial(TinyGPT, ties=True),
    "Hugging Face": CausalTraining,
}


def problem(module: str, **trainer: Any) -> Problem:
    return Problem(
        module=MODULES[module],
        train=partial(text_data, 32, 8),
        validation=partial(text_data, 8, 8),
        steps=2,
        accumulate=2,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.5, **trainer},
    )


def one_process(rank: int, world_size: int, module: str, data_size: int) -> Trace:
    return trace_one_process(problem(module), data_size=data_size, is_dealt=data_size > 1)


def traces(rank: int, world_size: int, name: str, module: str) -> tuple[Trace, int, int]:
    """The trace, the most logits that existed at a time, and how often heads were called."""
    sizes: list[int] = []
    compute = logits.Projection.logits

    def watched(self: Any, inputs: Any, dtype: torch.dtype) -> Any:
        outputs = compute(self, inputs, dtype)
        local = getattr(outputs, "local", outputs)
        sizes.append(local.numel() // local.shape[-1])
        return outputs

    logits.Projection.logits = watched
    strategy = STRATEGIES[name](telemetry=False, tile_logits=5)
    trace = trace_layout(problem(module), strategy, devices=world_size)
    return trace, max(sizes), len(sizes)


@pytest.mark.sample("zero3-by hand, tied")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_tiled_logits_equal_one_process(name: str, module: str) -> None:
    reference = run_ranks(one_process, 1, module, 1 if "context" in name else 2)[0]
    for trace, largest, calls in run_ranks(traces, 2, name, module):
        assert [str(each) for each in find_differences(reference, trace)] == []
        assert largest == 5
        assert calls > 8


def refused(rank: int, world_size: int, name: str) -> str:
    strategies: dict[str, Any] = {
        "pipeline": PipelineParallelStrategy,
        "tensor": TensorParallelStrategy,
    }
    with pytest.raises(ConfigError) as caught:
        trace_layout(problem("by hand"), strategies[name](tile_logits=5), devices=world_size)
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_it_is_refused_where_the_head_is_divided(name: str) -> None:
    for text in run_ranks(refused, 2, name):
        assert text.startswith("tile_logits=5 needs the whole head")

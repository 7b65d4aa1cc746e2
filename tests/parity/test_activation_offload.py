"""With activation offload every strategy computes, to the bit, what it computes without."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout
from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.offload import activations
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

HOST: dict[str, Any] = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "zero3": ZeROStrategy,
    "zero3, offloaded": partial(ZeROStrategy, **HOST),
    "1f1b": partial(PipelineParallelStrategy, microbatches=4),
    "interleaved": partial(PipelineParallelStrategy, microbatches=4, schedule="interleaved_1f1b"),
    "tensor": TensorParallelStrategy,
    "sequence parallel": partial(TensorParallelStrategy, sequence_parallel=True),
    "context": ContextParallelStrategy,
    "3d": partial(Parallel3DStrategy, tensor=2, zero_stage=1),
}

EXACT = Tolerance(0.0, 0.0, 0.0)


def problem() -> Problem:
    return Problem(
        module=partial(TinyGPT, depth=6),
        train=partial(text_data, 32, 8),
        validation=partial(text_data, 8, 8),
        steps=2,
        accumulate=2,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.5},
    )


def traces(rank: int, world_size: int, name: str, folder: Path) -> tuple[list[Trace], list[int]]:
    """Without offload, to host memory and to a file; and bytes that left in the last two."""
    activations.MIN_BYTES = 1
    spaces: list[Any] = []
    made = activations.OffloadSpace.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        spaces.append(self)

    activations.OffloadSpace.__init__ = noted
    found = [
        trace_layout(
            problem(),
            STRATEGIES[name](
                telemetry=False, activation_checkpointing="full", activation_offload=offload
            ),
            devices=world_size,
        )
        for offload in (False, True, folder)
    ]
    return found, [each.host_bytes if each.swap is None else each.disk_bytes for each in spaces]


@pytest.mark.full
@pytest.mark.parametrize("name", STRATEGIES)
def test_offloaded_inputs_change_no_bit(name: str, tmp_path: Path) -> None:
    for (plain, *offloaded), num_bytes in run_ranks(traces, 2, name, tmp_path):
        assert len(num_bytes) == 2
        assert min(num_bytes) > 0
        for trace in offloaded:
            assert [str(each) for each in find_differences(plain, trace, EXACT)] == []
    assert not any(tmp_path.iterdir())

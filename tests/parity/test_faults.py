"""The comparison sees what is wrong: faults planted on purpose are found, each by its name."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.data_parallel.ddp import DdpAxis
from boltmesh.strategies.engine.data_axis import AxisContext
from tests.support.models import Regression, regression_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 3


class WrongGradient(DDPStrategy):
    """One gradient of one parameter is two per cent too large."""

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        gradient = next(iter(self.lightning_module.net.parameters())).grad
        assert gradient is not None
        gradient *= 1.02


class _Alone(DdpAxis):
    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        return module


class MissingSync(DDPStrategy):
    """Every rank trains on its own share and nobody averages."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_axis(_Alone(self.options))


class WrongSampler(DDPStrategy):
    """Every rank sees the share of the first one."""

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {**super().distributed_sampler_kwargs, "rank": 0}


class WrongClipping(DDPStrategy):
    """Clips to the sum of what each rank was allowed."""

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        right = self.precision_plugin.clip_grad_by_norm

        def clip(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
            right(optimizer, clip_val * self.world_size)

        self.precision_plugin.clip_grad_by_norm = clip


class LostState(DDPStrategy):
    """Forgets the optimizer's momentum after the last step, which no loss shows."""

    @override
    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == STEPS:
            for state in self.optimizers[0].state.values():
                state["momentum_buffer"].zero_()
        return output


def problem() -> Problem:
    return Problem(
        module=partial(Regression, optimizer="sgd"),
        train=partial(regression_data, 24, 4),
        validation=partial(regression_data, 12, 4),
        steps=STEPS,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.1},
    )


def one_process(rank: int, world_size: int) -> Trace:
    return trace_one_process(problem(), data_size=2)


def layout(rank: int, world_size: int, strategy: type[DDPStrategy]) -> Trace:
    return trace_layout(problem(), strategy(telemetry=False), devices=world_size)


@pytest.mark.sample(
    "WrongGradient-gradient norm of step 0: ",
    "LostState-optimizer state 'net.0.weight.momentum_buffer' at element ",
)
@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        (WrongGradient, "gradient norm of step 0: "),
        (MissingSync, "gradient norm of step 0 on rank 0: "),
        (WrongSampler, "loss of step 0: "),
        (WrongClipping, "loss of step 1: "),
        (LostState, "optimizer state 'net.0.weight.momentum_buffer' at element "),
    ],
)
def test_a_planted_fault_is_named(strategy: type[DDPStrategy], named: str) -> None:
    reference = run_ranks(one_process, 1)[0]
    trace = run_ranks(layout, 2, strategy)[0]
    found = [str(each) for each in find_differences(reference, trace)]
    assert found[0].startswith(named)


@pytest.mark.full
def test_ranks_that_hold_different_models_are_named() -> None:
    trace = run_ranks(layout, 2, MissingSync)[0]
    assert trace.disagreement is not None
    assert "ranks disagree on parameter 'net.0.weight'" in trace.disagreement


class Precise(Regression):
    """Notes how products and convolutions of fp32 are computed in its steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_float32_matmul_precision("high")  # as run.matmul_precision does
        self.seen: set[str] = set()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        backends: Any = torch.backends
        self.seen |= {each.fp32_precision for each in (backends.cuda.matmul, backends.cudnn.conv)}
        return super().training_step(batch, batch_idx)


def precisions(rank: int, world_size: int) -> tuple[set[str], str]:
    module = Precise()
    given = replace(problem(), module=lambda: module)
    if world_size == 1:
        trace_one_process(given, data_size=2)
    else:
        trace_layout(given, DDPStrategy(telemetry=False), devices=world_size)
    return module.seen, torch.get_float32_matmul_precision()


@pytest.mark.parametrize("size", [1, 2])
def test_a_gpu_would_compute_both_runs_without_tf32(size: int) -> None:
    assert run_ranks(precisions, size)[0] == ({"ieee"}, "high")

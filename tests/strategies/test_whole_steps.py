"""What is gathered at once for steps of whole parameters, and experts that cannot be."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import UnsupportedError
from boltmesh.strategies import Parallel3DStrategy, ZeROStrategy, whole_steps
from boltmesh.strategies.whole_steps import WholeSteps, add_whole_steps
from boltmesh.telemetry.traffic import ExpectedTraffic
from tests.support.matrix_optimizers import Shampoo
from tests.support.ranks import run_ranks
from tests.support.tiny import TinyData, TinyExperts, TinyModel


class Two:
    """An exchange of two ranks."""

    rank, size = 0, 2

    def agrees(self, answer: bool) -> bool:
        return answer

    def is_shared(self, parameter: torch.Tensor) -> bool:
        return True

    def whole_shape(self, parameter: torch.Tensor) -> torch.Size:
        return parameter.shape


class Counting(SGD):
    """Counts its calls in an attribute, which rounds do not restore."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step(closure)


HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "sizes", "rounds"),
    [
        (None, [50] * 8, [[[50]] * 2] * 4),
        (None, [32] * 8, [[[32, 32]] * 2] * 2),
        # The work of the largest is half of all: other owners would wait for it in rounds.
        (None, [160, 40, 40, 40, 40], [[[160], [40] * 4]]),
        (None, [80, 80, 80, 40, 40, 40], [[[80], [80]], [[80, 40], [40, 40]]]),
        (None, [10, 10], [[[10], [10]]]),
        (HOST, [160, 40, 40, 40, 40], [[[], [40]], [[160], [40, 40]], [[], [40]]]),
        (HOST, [], [[[], []]]),
    ],
)
def test_rounds_have_a_limit_of_bytes_and_equal_work_of_each_owner(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device | None,
    sizes: list[int],
    rounds: list[list[list[int]]],
) -> None:
    monkeypatch.setattr(whole_steps, "ROUND_BYTES", 4 * 64)
    parameters = [Parameter(torch.zeros(size)) for size in sizes or [1]]
    exchange: Any = Two()
    steps = WholeSteps(SGD(parameters), exchange, device=device)
    found = steps._rounds(parameters if sizes else [])
    assert [[[each.numel() for each in own] for own in some] for some in found] == rounds
    at_once = WholeSteps(Counting(parameters), exchange, device=device)
    is_divided = device is not None  # on a host gathered in rounds, and stepped at once
    assert len(at_once._rounds(parameters if sizes else [])) == (len(rounds) if is_divided else 1)


def test_an_exchange_is_counted_on_its_own_axis_beside_another_of_its_operator() -> None:
    expected = [
        ExpectedTraffic("expert", "alltoall_base", 40.0, 4.0, "rows"),
        ExpectedTraffic("data", "alltoall_base", 20.0, None, "weights"),
    ]
    moved = [
        ExpectedTraffic("data", "alltoall_base", 8.0, 2.0, "whole"),
        ExpectedTraffic("tensor", "broadcast", 8.0, 2.0, "whole"),
    ]
    step: Any = SimpleNamespace(traffic=lambda: moved)
    both = ExpectedTraffic("data", "alltoall_base", 36.0, None, "weights; whole")
    assert add_whole_steps(expected, [step, step], "data") == [expected[0], both]
    assert add_whole_steps(expected[:1], [step], "data") == [expected[0], moved[0]]


class ByMatrices(TinyExperts):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Shampoo(self.parameters())


def problem() -> Problem:
    return Problem(module=ByMatrices, train=TinyData(24, 4).val_dataloader, steps=3)


def one_process(rank: int, world_size: int) -> Trace:
    return trace_one_process(problem(), data_size=2)


def divided(rank: int, world_size: int) -> Trace:
    return trace_layout(problem(), ZeROStrategy(stage=1, expert=2, telemetry=False), devices=2)


@pytest.mark.ranks
def test_experts_of_the_ranks_of_all_shards_are_stepped_whole() -> None:
    (reference,) = run_ranks(one_process, 1)
    for trace in run_ranks(divided, 2):
        assert find_differences(reference, trace) == []


def refused(rank: int, world_size: int) -> str:
    lightning.seed_everything(3)  # experts with equal numbers of rows on all ranks are not found
    strategy = Parallel3DStrategy(data=2, expert=2, zero_stage=0, telemetry=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(ByMatrices(), TinyData(16, 4))
    return str(caught.value)


@pytest.mark.ranks
def test_experts_of_other_ranks_than_shards_are_refused() -> None:
    for message in run_ranks(refused, 2):
        assert message.startswith("Shampoo ")
        assert "is divided over other ranks than the rest of the model" in message


class HalfWay(Shampoo):
    def _step(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        super()._step(parameter, grad, group)
        if group["calls"] == 2:
            raise ValueError("the cause")


class Interrupted(TinyModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return HalfWay(self.parameters())


def interrupt(rank: int, world_size: int) -> None:
    module = Interrupted()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False,
        strategy=ZeROStrategy(stage=1, offload_optimizer="cpu", telemetry=False),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="the cause"):
        trainer.fit(module, TinyData(16, 4))
    with pytest.raises(ValueError, match="the cause"):  # not half of a step's values
        next(module.parameters()).sum()


@pytest.mark.ranks
def test_parameters_of_a_step_that_ended_half_way_are_not_taken_for_those_of_a_step() -> None:
    run_ranks(interrupt, 1)

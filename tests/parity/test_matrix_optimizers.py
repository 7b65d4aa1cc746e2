"""Optimizers of whole matrices step sharded parameters as in one process."""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import (
    DDPStrategy,
    Parallel3DStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    whole_steps,
)
from boltmesh.strategies.whole_steps import WholeSteps
from boltmesh.telemetry.reader.reader import open_job
from tests.support.matrix_optimizers import Matrices
from tests.support.ranks import run_ranks
from tests.support.stack import token_data

pytestmark = pytest.mark.ranks


def problem(kind: str, accumulate: int) -> Problem:
    return Problem(
        module=partial(Matrices, kind),
        train=partial(token_data, 48, 2),
        validation=partial(token_data, 8, 2),
        steps=5,
        accumulate=accumulate,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.8},
    )


def one_process(rank: int, world_size: int, kind: str, accumulate: int, data_size: int) -> Trace:
    return trace_one_process(problem(kind, accumulate), data_size=data_size, is_dealt=data_size > 1)


def strategy_of(options: dict[str, Any], *, telemetry: bool = False) -> Any:
    kinds = {"stage": ZeROStrategy, "zero_stage": Parallel3DStrategy}
    strategy: Any = next((kinds[key] for key in kinds if key in options), TensorParallelStrategy)
    return strategy(telemetry=telemetry, **options)


def sharded(
    rank: int, world_size: int, kind: str, accumulate: int, options: dict[str, Any]
) -> Trace:
    made = strategy_of(options)
    return trace_layout(problem(kind, accumulate), made, devices=world_size)


CPU = {"offload_optimizer": "cpu"}
TOLERANCES = {"lars": Tolerance(relative=1e-5, parameters=1e-5, optimizer=1e-5)}
"""Closer than the default, where rounding stays small: LARS divides by norms alone."""


@pytest.mark.sample("muon-2-2-options1", "lamb-1-2-options13")
@pytest.mark.parametrize(
    ("kind", "accumulate", "ranks", "options"),
    [
        ("muon", 1, 2, {"stage": 1}),
        ("muon", 2, 2, {"stage": 3}),
        ("shampoo", 2, 2, {"stage": 2}),
        ("shampoo", 1, 3, {"stage": 3}),
        ("adafactor", 1, 2, {"stage": 2}),
        ("fused_sgd", 2, 2, {"stage": 1}),
        ("rprop", 1, 2, {"stage": 3}),
        ("shampoo", 1, 4, {"stage": 3, "shard_size": 2}),
        ("shampoo", 1, 4, {"pipeline": 2, "data": 2, "zero_stage": 2, "microbatches": 2}),
        ("muon", 1, 2, {}),
        ("shampoo", 2, 2, {}),
        ("adafactor", 1, 4, {"tensor": 2, "pipeline": 2, "zero_stage": 0, "microbatches": 2}),
        ("adafactor", 1, 4, {"tensor": 2, "data": 2, "zero_stage": 0}),
        ("lamb", 1, 2, {"stage": 1, **CPU}),
        ("muon", 2, 2, {"stage": 2, **CPU}),
        ("soap", 2, 2, {"stage": 3, "offload_parameters": "cpu", **CPU}),
        ("adafactor", 1, 4, {"stage": 3, "shard_size": 2, **CPU}),
        ("wide_muon", 1, 4, {"tensor": 2, "data": 2, "zero_stage": 2}),
        ("lamb", 2, 4, {"tensor": 2, "data": 2, "zero_stage": 3}),
        ("soap", 1, 4, {"tensor": 2, "data": 2, "zero_stage": 1, **CPU}),
        ("lamb", 1, 2, {"pipeline": 2, "zero_stage": 0, "microbatches": 2}),
        ("muon", 1, 2, {"pipeline": 2, "zero_stage": 0, "microbatches": 2}),
        ("soap", 1, 4, {"pipeline": 2, "data": 2, "zero_stage": 2, "microbatches": 2, **CPU}),
        ("lamb", 1, 8, {"pipeline": 2, "tensor": 2, "data": 2, "zero_stage": 1, "microbatches": 2}),
        ("lars", 1, 2, {}),
        ("lars", 2, 2, {"stage": 3}),
        ("lars", 1, 2, {"stage": 2, **CPU}),
        ("lars", 1, 2, {"pipeline": 2, "zero_stage": 0, "microbatches": 2}),
        ("lars", 2, 4, {"tensor": 2, "data": 2, "zero_stage": 3}),
        ("combined", 2, 2, {}),
        ("combined", 1, 2, {"stage": 3}),
    ],
)
def test_whole_matrices_are_stepped_as_in_one_process(
    kind: str, accumulate: int, ranks: int, options: dict[str, Any]
) -> None:
    shares = 2 if not options else options.get("pipeline", 1) * options.get("tensor", 1)
    data_size = ranks // shares
    reference = run_ranks(one_process, 1, kind, accumulate, data_size)[0]
    for trace in run_ranks(sharded, ranks, kind, accumulate, options):
        assert find_differences(reference, trace, TOLERANCES.get(kind)) == []
        assert trace.optimizer_state.keys() == reference.optimizer_state.keys()


def in_rounds(
    rank: int, world_size: int, kind: str, accumulate: int, options: dict[str, Any]
) -> tuple[Trace, set[tuple[int, int]]]:
    """Return a trace, and the numbers of rounds and of calls of the optimizer in a step."""
    seen = set()
    step = WholeSteps.step

    def counted(self: WholeSteps, optimizer: Any) -> None:
        calls, run = 0, self._run

        def count(optimizer: Any) -> None:
            nonlocal calls
            calls += 1
            run(optimizer)

        with patch.object(self, "_run", count):
            step(self, optimizer)
        seen.add((len(self._rounds(self._shared)), calls))

    with (
        patch.object(whole_steps, "ROUND_BYTES", 1),
        patch.object(WholeSteps, "_cost", lambda *_: 1),  # else the largest takes a whole round
        patch.object(WholeSteps, "step", counted),
    ):
        return sharded(rank, world_size, kind, accumulate, options), seen


@pytest.mark.sample("shampoo-2-2-options1", "soap-2-2-options4")
@pytest.mark.parametrize(
    ("kind", "accumulate", "ranks", "options"),
    [
        ("muon", 2, 2, {"stage": 3}),
        ("shampoo", 2, 2, {"stage": 2}),
        ("shampoo", 1, 3, {"stage": 1}),
        ("combined", 1, 2, {"stage": 3}),
        ("soap", 2, 2, {"stage": 3, "offload_parameters": "cpu", **CPU}),
        ("even", 2, 2, {}),
        ("lamb", 2, 4, {"tensor": 2, "data": 2, "zero_stage": 3}),
        ("soap", 1, 4, {"pipeline": 2, "data": 2, "zero_stage": 2, "microbatches": 2, **CPU}),
    ],
)
def test_rounds_of_a_step_are_one_step(
    kind: str, accumulate: int, ranks: int, options: dict[str, Any]
) -> None:
    shares = 2 if not options else options.get("pipeline", 1) * options.get("tensor", 1)
    reference = run_ranks(one_process, 1, kind, accumulate, ranks // shares)[0]
    for trace, seen in run_ranks(in_rounds, ranks, kind, accumulate, options):
        assert find_differences(reference, trace) == []
        assert trace.optimizer_state.keys() == reference.optimizer_state.keys()
        assert all(calls == rounds > 1 for rounds, calls in seen), seen
        assert seen


def derived(rank: int, world_size: int) -> Trace:
    torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))])  # hooks are run by ``Muon.step`` now
    return sharded(rank, world_size, "wide_muon", 1, {"stage": 1})


def test_a_step_that_calls_that_of_its_base_runs_hooks_once() -> None:
    reference = run_ranks(one_process, 1, "wide_muon", 1, 2)[0]
    for trace in run_ranks(derived, 2):
        assert find_differences(reference, trace) == []


def full(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def run(
    rank: int, world_size: int, folder: str, steps: int, resume: str | None, layout: dict[str, Any]
) -> dict[str, torch.Tensor]:
    seed_everything(3)
    module = Matrices("shampoo")
    strategy = strategy_of(layout) if layout else DDPStrategy(telemetry=False)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=steps, logger=False,
        callbacks=ModelCheckpoint(folder, "at{step}", every_n_train_steps=3, save_top_k=-1),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, token_data(48, 4), ckpt_path=resume)
    found = {name: full(each).clone() for name, each in module.named_parameters()}
    names = {id(each): name for name, each in module.named_parameters()}
    (optimizer,) = trainer.optimizers
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[id(parameter)]}.{key}"] = torch.as_tensor(value)
    return found


@pytest.mark.full
def test_state_of_whole_matrices_is_saved_and_resumes_to_the_bit(tmp_path: Path) -> None:
    resume_in(tmp_path, 2, {"stage": 2}, {"stage": 3})


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"stage": 3, "offload_parameters": "cpu", **CPU}),
        (4, {"tensor": 2, "data": 2, "zero_stage": 2}),
        (4, {"tensor": 2, "data": 2, "zero_stage": 1, **CPU}),
    ],
)
def test_state_of_whole_matrices_resumes_in_other_layouts(
    tmp_path: Path, ranks: int, layout: dict[str, Any]
) -> None:
    resume_in(tmp_path, ranks, layout, layout)


def resume_in(folder: Path, ranks: int, layout: dict[str, Any], other: dict[str, Any]) -> None:
    checkpoint = str(folder / "atstep=3.ckpt")
    straight = run_ranks(run, ranks, str(folder), 5, None, layout)
    resumed = run_ranks(run, ranks, str(folder / "other"), 5, checkpoint, layout)
    for one, resumed_one in zip(straight, resumed, strict=True):
        assert one.keys() == resumed_one.keys()
        assert all(torch.equal(one[name], resumed_one[name]) for name in one)
    # No rank keeps a state twice, and another layout reads all of it.
    states = [{name for name in each if "momentum" in name} for each in resumed]
    assert sum(map(len, states)) == len(set().union(*states))
    saved = run_ranks(run, ranks, str(folder / "same"), 3, checkpoint, other)
    alone = run_ranks(run, 2, str(folder / "alone"), 3, checkpoint, {})[0]
    together = {name: value for each in saved for name, value in each.items()}
    assert alone.keys() == together.keys()
    is_state = [name for name in alone if name not in dict(Matrices("shampoo").named_parameters())]
    compared = list(alone) if "tensor" not in other else is_state  # parameters are parts there
    assert all(torch.equal(alone[name], together[name]) for name in compared)


def recorded(rank: int, world_size: int, kind: str, layout: dict[str, Any]) -> str:
    strategy = strategy_of(layout, telemetry=True)
    path = []

    class Notes(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            path.append(str(strategy.recorder.path))

    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=12, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=Notes(),
    )  # fmt: skip
    trainer.fit(Matrices(kind), token_data(48, 2))
    return path[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        ("muon", 2, {"stage": 2}),
        ("shampoo", 2, {"stage": 2}),
        ("shampoo", 2, {}),
        ("muon", 2, {"stage": 2, **CPU}),
        ("shampoo", 4, {"tensor": 2, "data": 2, "zero_stage": 2}),
    ],
)
def test_the_bytes_of_whole_steps_are_those_expected(
    kind: str, ranks: int, layout: dict[str, Any]
) -> None:
    path = run_ranks(recorded, ranks, kind, layout)[0]
    with open_job(Path(path)) as job:
        snapshot = job.snapshot()
    # What is stated is the mean over the tensor ranks, of those with the same data.
    tensor_ranks = [each for each in snapshot.ranks if not each.coordinates.get("data")]
    counted: defaultdict[tuple[str, str], float] = defaultdict(float)
    for rank in tensor_ranks:
        for each in rank.collectives:
            counted[each.axis, each.operator] += (each.bytes_per_step or 0.0) / len(tensor_ranks)
    moved = {("data", "alltoall_base")} if layout else set()
    if "stage" not in layout:
        moved.add(("tensor", "broadcast"))
    for key in moved:
        expected = [e.payload_bytes for e in snapshot.expected if (e.axis, e.operator) == key]
        assert [counted[key]] == expected

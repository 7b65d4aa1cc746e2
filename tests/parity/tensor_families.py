"""Families of models x 2 and 4 ranks x a whole and a divided sequence x fp32 and bf16.

    python -m tests.parity.tensor_families [--only NAME ...] [--ranks 2 4]

Each trains for five optimizer steps by a plan that finds itself, and in one process. Prints a
table: what share of the parameters is divided; of fp32, the largest difference of any gradient of
any step, of losses, and of parameters after the steps; of bf16-mixed, how far the gradients of the
first step are from those in fp32, of one process and divided. ``test_tensor_families.py`` runs a
part of it. About fifteen minutes on two cores.
"""

import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from boltmesh.check.differences import Trace
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import BoltMeshError
from boltmesh.strategies.parameter_access import whole_value
from boltmesh.strategies.tensor_parallel import TensorParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.tensor_families import FAMILIES, STEPS, Family, family_data, has_tokens

FP32, BF16 = "32-true", "bf16-mixed"

Case = tuple[bool, str]
"""Whether the sequence is divided, and the precision."""

CASES: tuple[Case, ...] = ((False, FP32), (False, BF16), (True, FP32), (True, BF16))


class Gradients(Callback):
    """Keeps the whole gradients of every step."""

    reads_gradients = False  # asks for the whole of them

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.kept.append(
            {
                name: whole_value(each.grad.detach(), each).float().clone()
                for name, each in pl_module.named_parameters()
                if each.grad is not None
            }
        )


@dataclass
class Run:
    """What one way of running has computed."""

    trace: Trace
    gradients: list[dict[str, Tensor]]
    share: float = 0.0
    """Of the elements of parameters, what is divided."""
    backends: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Apart:
    """How far a divided run is from one process."""

    share: float
    backends: str
    gradient: float
    """Largest of an element of any step, relative to the largest of that gradient, or to a
    thousandth of the largest of the model's."""
    loss: float
    """Relative."""
    parameter: float
    """Absolute."""
    own_error: float = 0.0
    """Of bf16: how far the gradients of one process's first step are from those in fp32."""
    error: float = 0.0
    """The same of the divided run."""
    notes: tuple[str, ...] = ()


def problem(name: str, precision: str, keeper: Gradients) -> Problem:
    return Problem(
        module=partial(Family, name),
        train=partial(family_data, name),
        steps=STEPS,
        trainer={"accelerator": "cpu", "precision": precision, "callbacks": [keeper]},
    )


def alone(rank: int, world_size: int, name: str, precisions: tuple[str, ...]) -> dict[str, Run]:
    warnings.simplefilter("ignore")
    runs = {}
    for precision in precisions:
        keeper = Gradients()
        trace = trace_one_process(problem(name, precision, keeper), data_size=1, is_dealt=False)
        runs[precision] = Run(trace, keeper.kept)
    return runs


def divided(rank: int, world_size: int, name: str, cases: Sequence[Case]) -> list[Run | str] | None:
    """Run the cases one after the other; a refusal stands for itself."""
    warnings.simplefilter("ignore")
    runs = [_divided(world_size, name, *each) for each in cases]
    return runs if rank == 0 else None


def _divided(world_size: int, name: str, has_sequence: bool, precision: str) -> Run | str:
    keeper = Gradients()
    strategy = TensorParallelStrategy(
        telemetry=False,
        sequence_parallel=has_sequence,
        loss_parallel=has_tokens(name) or "auto",  # logits that had to be gathered are refused
    )
    try:
        trace = trace_layout(problem(name, precision, keeper), strategy, devices=world_size)
    except BoltMeshError as error:
        return str(error)
    assert trace.disagreement is None, trace.disagreement
    plan = strategy.plan
    assert plan is not None
    elements = sum(each.numel() for each in trace.parameters.values())
    share = sum(each.elements for each in plan.sharded.values()) / elements
    backends = ", ".join(sorted(set(plan.backends.values())))
    assert has_sequence == (plan.sequence is not None), plan.notes
    return Run(trace, keeper.kept, share, backends, plan.notes)


def farthest(wanted: Sequence[dict[str, Tensor]], found: Sequence[dict[str, Tensor]]) -> float:
    """Return how far gradients are, relative to their own size or a thousandth of the largest."""
    assert len(wanted) == len(found) > 0
    worst = 0.0
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        least = 1e-3 * max(each.abs().max().item() for each in one.values())
        assert least > 0
        for name, each in one.items():
            size = max(each.abs().max().item(), least)
            apart = (other[name] - each).abs().max().item() / size
            worst = apart if not apart <= worst else worst  # what is no number stays
    return worst


def compare(wanted: dict[str, Run], precision: str, found: Run) -> Apart:
    own, truth = wanted[precision], wanted[FP32]
    assert len(own.trace.losses) == len(found.trace.losses) == STEPS
    pairs = zip(own.trace.losses, found.trace.losses, strict=True)
    return Apart(
        share=found.share,
        backends=found.backends,
        gradient=farthest(own.gradients, found.gradients),
        loss=max(abs(one - other) / abs(one) for one, other in pairs),
        parameter=max(
            (found.trace.parameters[name] - each).abs().max().item()
            for name, each in own.trace.parameters.items()
        ),
        own_error=farthest(truth.gradients[:1], own.gradients[:1]),
        error=farthest(truth.gradients[:1], found.gradients[:1]),
        notes=found.notes,
    )


def measure(name: str, ranks: int, cases: Sequence[Case] = CASES) -> dict[Case, Apart | str]:
    """Run a family both ways, its plan in all cases; a refusal stands for itself."""
    precisions = tuple(dict.fromkeys((FP32, *(precision for _, precision in cases))))
    wanted = run_ranks(alone, 1, name, precisions)[0]
    runs = run_ranks(divided, ranks, name, tuple(cases))[0]
    assert runs is not None
    return {
        case: run if isinstance(run, str) else compare(wanted, case[1], run)
        for case, run in zip(cases, runs, strict=True)
    }


def row(name: str, ranks: int, has_sequence: bool, found: dict[Case, Apart | str]) -> str:
    """Return a line of the table."""
    single, half = found[has_sequence, FP32], found[has_sequence, BF16]
    start = f"| {name} | {ranks} | {'divided' if has_sequence else 'whole'} |"
    if isinstance(single, str) or isinstance(half, str):
        said = single if isinstance(single, str) else str(half)
        return f"{start} refused: {' '.join(said.split())[:160].replace('|', '/')} | | | | | |"
    figures = (single.gradient, single.loss, single.parameter, half.own_error, half.error)
    numbers = " | ".join(f"{each:.1e}" for each in figures)
    return f"{start} {100 * single.share:.0f} %, {single.backends} | {numbers} |"


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | ranks | sequence | divided | gradient | loss | parameters | bf16 | divided |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.only:
        for ranks in options.ranks:
            found = measure(name, ranks)
            for has_sequence in (False, True):
                print(row(name, ranks, has_sequence, found), flush=True)
            for note in dict.fromkeys(
                note for each in found.values() if isinstance(each, Apart) for note in each.notes
            ):
                print(f"    {name}, {ranks} ranks: {note}", flush=True)


if __name__ == "__main__":
    main()

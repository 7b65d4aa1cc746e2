"""Data, pipeline and tensor axis together on 8 ranks, 2 x 2 x 2, against one process.

    python -m tests.parity.three_axes [--only GPT Llama] [--chunk 6]

A GPT written by hand, with tied weights, and Hugging Face's Llama; every ZeRO stage, a few with
the optimizer on the host or a disk; 1f1b and interleaved_1f1b, a few with zbv; whole and divided
sequences; fp32, a few in bf16-mixed. Each trains for five optimizer steps of two batches with
clipping, and validates. Prints a table of the largest differences. ``test_three_axes.py`` runs a
part of it. Half a minute a line on two cores.
"""

import itertools
import tempfile
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import BoltMeshError
from boltmesh.strategies import Parallel3DStrategy
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks

FP32, BF16 = "32-true", "bf16-mixed"
SIZE = 2
"""Of each axis."""
RANKS = SIZE**3
STEPS = 5


def llama(optimizer: str) -> LightningModule:
    # Here, for it imports transformers, which takes ranks that need none of it seconds.
    from tests.support.causal_training import CausalTraining

    return CausalTraining("llama", optimizer=optimizer)


MODELS: dict[str, Callable[..., LightningModule]] = {
    "GPT": partial(TinyGPT, depth=4, ties=True),
    "Llama": llama,
}

TOLERANCES = {
    FP32: Tolerance(),
    # Of products that are added up in bf16, which has 8 bits: the order decides about the last.
    BF16: Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2),
}


@dataclass(frozen=True)
class Layout:
    """What differs from run to run."""

    stage: int = 1
    schedule: str = "1f1b"
    has_sequence: bool = False
    """Whether the sequence is divided."""
    precision: str = FP32
    offload: Literal["cpu", "nvme"] | None = None
    """Where the optimizer steps; None: on the device."""

    def strategy(self, folder: str) -> Parallel3DStrategy:
        return Parallel3DStrategy(
            data=SIZE,
            pipeline=SIZE,
            tensor=SIZE,
            zero_stage=self.stage,
            microbatches=4,
            schedule=self.schedule,
            sequence_parallel=self.has_sequence,
            offload_optimizer=self.offload,
            offload_path=folder if self.offload == "nvme" else None,
            telemetry=False,
        )


LAYOUTS = (
    *(
        Layout(stage, schedule, has_sequence)
        for has_sequence in (False, True)
        for schedule in ("1f1b", "interleaved_1f1b")
        for stage in (0, 1, 2, 3)
    ),
    Layout(1, "zbv"),
    Layout(3, "zbv", has_sequence=True),
    Layout(1, "1f1b", precision=BF16),
    Layout(2, "zbv", precision=BF16),
    Layout(3, "interleaved_1f1b", has_sequence=True, precision=BF16),
    Layout(1, offload="cpu"),
    Layout(2, "interleaved_1f1b", offload="nvme"),
    Layout(3, "zbv", has_sequence=True, offload="cpu"),
    Layout(1, precision=BF16, offload="cpu"),
)


@dataclass
class Apart:
    """How far a layout is from one process."""

    losses: float
    """Relative."""
    norms: float
    """Of gradients before clipping, on any rank; relative."""
    parameters: float
    """Relative to the largest element of the parameter, or to a thousandth of the model's."""
    states: float
    """The same of what the optimizer keeps of each parameter."""
    beyond: list[str]
    """What is further apart than rounding explains, metrics and predictions included."""


def problem(model: str, precision: str) -> Problem:
    """Return what is trained; in bf16 without Adam, whose steps enlarge what is rounded."""
    optimizer = "adamw" if precision == FP32 else "sgd"
    return Problem(
        module=partial(MODELS[model], optimizer=optimizer),
        train=partial(text_data, 48, 4),
        validation=partial(text_data, 21, 4),
        prediction=partial(text_data, 19, 4) if model == "GPT" else None,
        steps=STEPS,
        accumulate=2,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.5, "precision": precision},
    )


def alone(rank: int, world_size: int, model: str, precisions: Sequence[str]) -> dict[str, Trace]:
    warnings.simplefilter("ignore")
    return {each: trace_one_process(problem(model, each), data_size=SIZE) for each in precisions}


Norms = list[list[float]]


def laid_out(
    rank: int, world_size: int, model: str, layouts: Sequence[Layout]
) -> list[tuple[Trace | str | None, Norms]]:
    """Run one layout after the other.

    Returns:
        Of each what all ranks have computed, on the first of them, or why it was refused; and the
        norms of gradients that this rank saw.
    """
    warnings.simplefilter("ignore")
    found: list[tuple[Trace | str | None, Norms]] = []
    for each in layouts:
        try:
            with tempfile.TemporaryDirectory(prefix="three-axes-") as folder:
                strategy = each.strategy(folder)
                trace = trace_layout(problem(model, each.precision), strategy, devices=world_size)
        except BoltMeshError as error:
            found.append((str(error), []))
            continue
        assert strategy.layout.sizes == dict.fromkeys(("pipeline", "data", "tensor"), SIZE)
        assert strategy.plan is not None
        assert each.has_sequence == (strategy.plan.sequence is not None), strategy.plan.notes
        found.append((trace if rank == 0 else None, trace.gradient_norms))
    return found


def farthest(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return how far tensors are, relative to their own size or a thousandth of the largest."""
    assert wanted.keys() == found.keys()
    least = 1e-3 * max(each.abs().max().item() for each in wanted.values())
    assert least > 0
    return worst(
        (found[name] - each).abs().max().item() / max(each.abs().max().item(), least)
        for name, each in wanted.items()
    )


def worst(differences: Iterator[float]) -> float:
    largest = 0.0
    for each in differences:
        largest = each if not each <= largest else largest  # what is no number stays
    return largest


def by_key(states: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return states of an optimizer by what they are: momentum, its square, a count of steps."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, each in states.items():
        found.setdefault(name.rpartition(".")[2], {})[name] = each
    return found


def compare(wanted: Trace, found: Trace, precision: str) -> Apart:
    assert len(wanted.losses) == len(found.losses) == STEPS
    assert len(wanted.gradient_norms) == len(found.gradient_norms) == STEPS
    assert wanted.losses[-1] != wanted.losses[0]
    assert min(*itertools.chain(*wanted.gradient_norms)) > 0
    assert wanted.validation
    states, laid = by_key(wanted.optimizer_state), by_key(found.optimizer_state)
    assert states.keys() == laid.keys()
    losses = zip(wanted.losses, found.losses, strict=True)
    norms = zip(wanted.gradient_norms, found.gradient_norms, strict=True)
    return Apart(
        losses=worst(abs(one - other) / abs(one) for one, other in losses),
        norms=worst(abs(one[0] - rank) / one[0] for one, ranks in norms for rank in ranks),
        parameters=farthest(wanted.parameters, found.parameters),
        states=worst(farthest(each, laid[key]) for key, each in states.items()),
        beyond=[str(each) for each in find_differences(wanted, found, TOLERANCES[precision])],
    )


def measure(model: str, layouts: Sequence[Layout]) -> list[tuple[Layout, Apart | str]]:
    """Run a model both ways; a refusal stands for itself."""
    precisions = tuple(dict.fromkeys(each.precision for each in layouts))
    wanted = run_ranks(alone, 1, model, precisions)[0]
    ranks = run_ranks(laid_out, RANKS, model, tuple(layouts), timeout_s=1500.0)
    found: list[tuple[Layout, Apart | str]] = []
    for number, layout in enumerate(layouts):
        trace = ranks[0][number][0]
        if isinstance(trace, str):
            found.append((layout, trace))
            continue
        norms = [
            [each[0] for each in step] for step in zip(*(r[number][1] for r in ranks), strict=True)
        ]
        trace = replace(trace, gradient_norms=norms)
        found.append((layout, compare(wanted[layout.precision], trace, layout.precision)))
    return found


def row(model: str, layout: Layout, found: Apart | str) -> str:
    """Return a line of the table."""
    sequence = "divided" if layout.has_sequence else "whole"
    stage = str(layout.stage) if layout.offload is None else f"{layout.stage}, {layout.offload}"
    start = f"| {model} | {layout.precision} | {layout.schedule} | {sequence} | {stage} |"
    if isinstance(found, str):
        return f"{start} refused: {' '.join(found.split())[:200].replace('|', '/')} | | | |"
    figures = (found.losses, found.norms, found.parameters, found.states)
    return f"{start} {' | '.join(f'{each:.1e}' for each in figures)} |"


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--chunk", type=int, default=6, help="layouts to a start of the ranks")
    parser.add_argument("--first", type=int, default=0, help="the layout to begin with")
    parser.add_argument("--count", type=int, default=len(LAYOUTS), help="how many layouts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | precision | schedule | sequence | ZeRO | losses | norms | parameters | states |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    chosen = LAYOUTS[options.first : options.first + options.count]
    for model in options.only:
        for start in range(0, len(chosen), options.chunk):
            for layout, found in measure(model, chosen[start : start + options.chunk]):
                print(row(model, layout, found), flush=True)
                for each in found.beyond[:5] if isinstance(found, Apart) else ():
                    print(f"    beyond rounding: {each}", flush=True)


if __name__ == "__main__":
    main()

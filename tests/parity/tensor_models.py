"""Causal language models of Hugging Face that ship a tensor plan, planned against unplanned.

    python -m tests.parity.tensor_models [--only NAME ...] [--ranks 2] [--sequence-parallel]
        [--context] [--precision 64-true]

Each is built tiny, with random weights, and trained for three steps of SGD in one process and by
``TensorParallelStrategy``, whose plan finds itself; with ``--context`` by
``ContextParallelStrategy``. Prints a table: what share of the parameters is
divided, how blocks run, the largest difference of losses and of parameters after the steps; or why
it was refused. Where rounding grows from step to step, double precision leaves nothing of it.
``test_tensor_models.py`` runs a part of it, ``test_context_models.py`` all of it with a context
axis. About twenty minutes on two cores.
"""

import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.check.differences import Trace
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import BoltMeshError
from boltmesh.strategies.context_parallel import ContextParallelStrategy
from boltmesh.strategies.tensor_parallel import TensorParallelStrategy
from tests.support.causal_lms import SHIPPED, build
from tests.support.ranks import RankFailure, run_ranks

STEPS, ROWS, TOKENS = 3, 4, 18

AT_ONCE = 6
"""Models that share a start of the ranks, which import transformers."""


class Model(LightningModule):
    """One of Hugging Face, with its own loss."""

    def __init__(self, name: str, rate: float) -> None:
        super().__init__()
        self.model, self.rate = build(name), rate

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@dataclass(frozen=True)
class Way:
    """How models are run."""

    ranks: int = 2
    sequence_parallel: bool = False
    precision: Any = "32-true"
    divides_context: bool = False
    """Divide sequences, not layers."""
    rate: float = 0.1


@dataclass
class Divided:
    """A run by a plan."""

    trace: Trace
    share: float
    """Of the elements of parameters, what is divided."""
    backends: dict[str, str]
    notes: tuple[str, ...]


@dataclass
class Row:
    """A line of the table."""

    name: str
    share: float = 0.0
    backends: str = ""
    loss: float = 0.0
    parameter: float = 0.0
    refused: str = ""
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        if self.refused:
            return f"| {self.name} | refused: {self.refused} | | | |"
        figures = f"{self.loss:.1e} | {self.parameter:.1e}"
        return f"| {self.name} | {100 * self.share:.0f} % | {self.backends} | {figures} |"


def tokens() -> DataLoader[Any]:
    torch.manual_seed(3)
    return DataLoader(TensorDataset(torch.randint(3, 90, (STEPS * ROWS, TOKENS))), batch_size=ROWS)


def problem(name: str, way: Way) -> Problem:
    return Problem(
        module=partial(Model, name, way.rate),
        train=tokens,
        steps=STEPS,
        trainer={"accelerator": "cpu", "precision": way.precision},
    )


def alone(rank: int, world_size: int, names: Sequence[str], way: Way) -> list[Trace | str]:
    """Train each in this process; what one raises stands for its trace."""
    warnings.simplefilter("ignore")
    return [_alone(name, way) for name in names]


def _alone(name: str, way: Way) -> Trace | str:
    try:
        return trace_one_process(problem(name, way), data_size=1, is_dealt=False)
    except Exception as error:  # noqa: BLE001 - whatever an architecture raises at these sizes
        return f"{type(error).__name__}: {error}"


def divided(rank: int, world_size: int, names: Sequence[str], way: Way) -> list[Divided | str]:
    """Train each by a plan of its own; why one is refused stands for its run."""
    warnings.simplefilter("ignore")
    return [_divided(name, way) for name in names]


def _divided(name: str, way: Way) -> Divided | str:
    layers = TensorParallelStrategy(telemetry=False, sequence_parallel=way.sequence_parallel)
    sequences = ContextParallelStrategy(telemetry=False, find_unused_parameters=True)
    strategy = sequences if way.divides_context else layers
    try:
        trace = trace_layout(problem(name, way), strategy, devices=way.ranks)
    except BoltMeshError as error:
        return str(error)
    assert trace.disagreement is None, trace.disagreement
    if isinstance(strategy, ContextParallelStrategy):
        return Divided(trace, 0.0, {}, ())
    placed = strategy.tensor_axis.placement
    assert placed is not None
    plan = placed.plan
    elements = sum(each.numel() for each in trace.parameters.values())
    share = sum(each.elements for each in plan.sharded.values()) / elements
    return Divided(trace, share, dict(plan.backends), plan.notes)


def measure(names: Sequence[str], way: Way) -> list[Row]:
    """Run models both ways, all of them in one start of the ranks, which import transformers."""
    wanted = run_ranks(alone, 1, names, way)[0]
    sound = [name for name, each in zip(names, wanted, strict=True) if not isinstance(each, str)]
    found = run_ranks(divided, way.ranks, sound, way)[0]
    by_name = dict(zip(sound, found, strict=True))
    return [
        _row(name, each, by_name.get(name, "")) for name, each in zip(names, wanted, strict=True)
    ]


def _row(name: str, wanted: Trace | str, found: Divided | str) -> Row:
    if isinstance(wanted, str):
        return Row(name, refused=f"by itself, {_short(wanted)}")
    if isinstance(found, str):
        return Row(name, refused=_short(found))
    pairs = zip(wanted.losses, found.trace.losses, strict=True)
    return Row(
        name,
        found.share,
        ", ".join(sorted(set(found.backends.values()))),
        max(abs(one - other) / abs(one) for one, other in pairs),
        max(
            (found.trace.parameters[key] - each).abs().max().item()
            for key, each in wanted.parameters.items()
        ),
        notes=found.notes,
    )


def _short(text: str) -> str:
    return " ".join(text.split())[:300].replace("|", "/")


def table(names: Sequence[str], way: Way) -> None:
    print(f"| {way.ranks} ranks | divided | blocks run | loss | parameters |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for first in range(0, len(names), AT_ONCE):
        for row in _some(names[first : first + AT_ONCE], way):
            print(row.text(), flush=True)
            for note in row.notes:
                print(f"    {row.name}: {note}", flush=True)


def _some(names: Sequence[str], way: Way) -> list[Row]:
    """Run a few; where one takes its ranks down, each on ranks of its own."""
    try:
        return measure(names, way)
    except RankFailure as failure:
        if len(names) == 1:
            return [Row(names[0], refused=f"FAILED {_short(str(failure)[-400:])}")]
        return [_some([each], way)[0] for each in names]


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SHIPPED, default=SHIPPED)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "64-true"])
    parser.add_argument("--context", action="store_true", help="divide sequences, not layers")
    parser.add_argument("--rate", type=float, default=0.1, help="of SGD")
    options = parser.parse_args()
    torch.set_num_threads(1)
    way = Way(
        options.ranks, options.sequence_parallel, options.precision, options.context, options.rate
    )
    table(options.only, way)


if __name__ == "__main__":
    main()

"""Every schedule x 2 and 4 ranks x nine families of models x fp32 and bf16, against one process.

    PYTHONPATH=examples python -m tests.parity.pipeline_models [--only NAME] [--ranks 2 4]

Five optimizer steps each. Prints a table: the largest difference of any gradient of the first step,
relative to the largest gradient of the model, and of losses and parameters after all steps.
``test_pipeline_models.py`` runs a part of it. A few minutes for each model on two cores.
"""

from argparse import ArgumentParser
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from boltmesh.check.differences import Trace
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.pipeline_zoo import ZOO, zoo_data
from tests.support.ranks import run_ranks

SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
PRECISIONS = ("32-true", "bf16-mixed")
STEPS = 5


class FirstGradients(Callback):
    """Keeps the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            for name, parameter in pl_module.named_parameters():
                if parameter.grad is not None:
                    self.kept[name] = parameter.grad.detach().clone()


@dataclass
class Run:
    trace: Trace
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Apart:
    """How far a pipeline is from one process."""

    gradient: float
    """Largest difference of an element, relative to the largest gradient of the model."""
    loss: float
    """Relative."""
    parameter: float
    """Absolute."""


def problem(name: str, precision: str, keeper: FirstGradients) -> Problem:
    return Problem(
        module=ZOO[name],
        train=partial(zoo_data, name),
        steps=STEPS,
        trainer={"accelerator": "cpu", "precision": precision, "callbacks": [keeper]},
    )


def alone(rank: int, world_size: int, name: str, precisions: tuple[str, ...]) -> list[Run]:
    runs = []
    for precision in precisions:
        keeper = FirstGradients()
        runs.append(
            Run(
                trace_one_process(problem(name, precision, keeper), data_size=1, is_dealt=False), {}
            )
        )
        runs[-1].gradients = keeper.kept
    return runs


def staged(rank: int, world_size: int, name: str, cases: list[tuple[str, str]]) -> list[Run | None]:
    """Run ``(schedule, precision)`` one after the other; all gradients come together on rank 0."""
    runs: list[Run | None] = []
    for schedule, precision in cases:
        keeper = FirstGradients()
        microbatches = 2 * world_size if schedule == "dualpipev" else 4
        strategy = PipelineParallelStrategy(
            telemetry=False, schedule=schedule, microbatches=microbatches
        )
        trace = trace_layout(problem(name, precision, keeper), strategy, devices=world_size)
        told: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
        dist.all_gather_object(told, keeper.kept)
        assert trace.disagreement is None, trace.disagreement
        gradients = {key: each for ranks in told for key, each in ranks.items()}
        runs.append(Run(trace, gradients) if rank == 0 else None)
    return runs


def compare(wanted: Run, found: Run) -> Apart:
    assert wanted.gradients.keys() == found.gradients.keys()
    assert len(wanted.trace.losses) == len(found.trace.losses) == STEPS
    largest = max(each.abs().max().item() for each in wanted.gradients.values())
    assert largest > 0
    pairs = zip(wanted.trace.losses, found.trace.losses, strict=True)
    return Apart(
        gradient=max(
            (found.gradients[name] - each).abs().max().item() / largest
            for name, each in wanted.gradients.items()
        ),
        loss=max(abs(one - other) / abs(one) for one, other in pairs),
        parameter=max(
            (found.trace.parameters[name] - each).abs().max().item()
            for name, each in wanted.trace.parameters.items()
        ),
    )


def measure(name: str, ranks: int, cases: list[tuple[str, str]]) -> list[Apart]:
    precisions = tuple(dict.fromkeys(precision for _, precision in cases))
    references = dict(zip(precisions, run_ranks(alone, 1, name, precisions)[0], strict=True))
    found = run_ranks(staged, ranks, name, cases)[0]
    return [
        compare(references[precision], run)
        for (_, precision), run in zip(cases, found, strict=True)
    ]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(ZOO))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(schedule, precision) for precision in PRECISIONS for schedule in SCHEDULES]
    print("| model | ranks | precision | gradient | loss | parameter |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in [options.only] if options.only else ZOO:
        for ranks in options.ranks:
            results = measure(name, ranks, cases)
            for precision in PRECISIONS:
                own = [
                    each
                    for each, (_, used) in zip(results, cases, strict=True)
                    if used == precision
                ]
                worst = [
                    f"{max(getattr(each, key) for each in own):.1e}"
                    for key in ("gradient", "loss", "parameter")
                ]
                print(f"| {name} | {ranks} | {precision} | {' | '.join(worst)} |", flush=True)


if __name__ == "__main__":
    main()

"""Trains random configurations under a strategy, many in one start of the ranks."""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from boltmesh.errors import ConfigError
from boltmesh.strategies import (
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.fuzz.cases import STEPS, Case, Module, batches, by_a_plain_loop
from tests.support.numbered import Losses
from tests.support.ranks import RankFailure, run_ranks

TOLERANCE = 2e-4
"""A twentieth in fp64: transformers compute norms and losses in fp32 all the same."""
CASE_S = 180.0
"""Most seconds that a case may take before it counts as hanging."""


@dataclass(frozen=True)
class Layout:
    """A strategy on some ranks."""

    ranks: int
    build: Callable[..., Any]
    options: dict[str, Any]


LAYOUTS = {
    "tensor": Layout(2, TensorParallelStrategy, {}),
    "sequence": Layout(2, TensorParallelStrategy, {"sequence_parallel": True}),
    "gpipe": Layout(2, PipelineParallelStrategy, {"schedule": "gpipe", "microbatches": 2}),
    "1f1b": Layout(2, PipelineParallelStrategy, {"schedule": "1f1b", "microbatches": 4}),
    "interleaved": Layout(
        2, PipelineParallelStrategy, {"schedule": "interleaved_1f1b", "microbatches": 2}
    ),
    "zero_bubble": Layout(
        2, PipelineParallelStrategy, {"schedule": "zero_bubble", "microbatches": 4}
    ),
    "3d": Layout(4, Parallel3DStrategy, {"pipeline": 2, "tensor": 2, "microbatches": 2}),
    "zero3_cpu": Layout(
        2, ZeROStrategy, {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a case: ``equal``, ``refused``, ``differs``, ``crashed`` or ``hung``.

    ``equal in fp64``: rounding in fp32 has grown, which a model of four channels may do in a step.
    """

    case: Case
    kind: str
    text: str = ""


def outcomes(
    cases: Sequence[Case], layout: str, run: Callable[..., Any] = run_ranks
) -> Iterator[Outcome]:
    """Train cases under a layout, and compare each with a plain loop.

    Args:
        cases: In this order.
        layout: Of ``LAYOUTS``.
        run: ``reuse_ranks`` for a few cases of several layouts.
    """
    waiting = list(cases)
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(_train, LAYOUTS[layout].ranks, waiting, layout, folder,
                    timeout_s=CASE_S * len(waiting))  # fmt: skip
                failure = ""
            except RankFailure as error:
                failure = " ".join(str(error).split())[:300]
            done = _read(Path(folder), LAYOUTS[layout].ranks)
        for case, found in zip(waiting, done, strict=False):
            outcome = _judged(case, found)
            if outcome.kind == "differs" and not case.is_double:
                (again,) = outcomes([replace(case, is_double=True)], layout, run)
                if again.kind == "equal":
                    outcome = replace(outcome, kind="equal in fp64")
            yield outcome
        del waiting[: len(done)]
        if waiting and failure:
            yield Outcome(waiting.pop(0), "hung" if "was ended" in failure else "crashed", failure)


def _train(rank: int, world_size: int, cases: list[Case], layout: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    with (
        open(os.devnull, "w") as nothing,
        redirect_stderr(nothing),
        open(Path(folder, str(rank)), "w") as file,
    ):
        for case in cases:
            print(json.dumps(_result(case, layout, world_size)), file=file, flush=True)


def _result(case: Case, layout: str, world_size: int) -> list[float] | str:
    """Return losses, or the class and the text of an error."""
    chosen = LAYOUTS[layout]
    losses = Losses()
    try:
        module = Module(case)
        Trainer(
            strategy=chosen.build(telemetry=False, timeout_s=CASE_S / 2, **chosen.options),
            accelerator="cpu", devices=world_size, max_steps=STEPS, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=[losses],
        ).fit(module, DataLoader(batches(case), batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    except ConfigError as error:
        return f"refused {' '.join(str(error).split())}"
    except Exception as error:  # noqa: BLE001 - any is a result
        return f"crashed {type(error).__name__}: {' '.join(str(error).split())}"
    return losses.kept


def _read(folder: Path, num_ranks: int) -> list[list[Any]]:
    """Return the results by case, of all ranks, for the cases that all ranks have ended."""
    files = [folder / str(rank) for rank in range(num_ranks)]
    rows = [
        [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for file in files
    ]
    return [list(each) for each in zip(*rows, strict=False)]


def _judged(case: Case, found: list[Any]) -> Outcome:
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        crashes = [each for each in errors if each.startswith("crashed")]
        kind, _, text = (crashes or errors)[0].partition(" ")
        return Outcome(case, kind, text[:600])
    wanted = by_a_plain_loop(case)
    for rank, losses in enumerate(found):
        is_equal = len(losses) == STEPS and all(
            math.isclose(one, other, rel_tol=TOLERANCE / 20 if case.is_double else TOLERANCE)
            for one, other in zip(losses, wanted, strict=True)
        )
        if not is_equal:
            return Outcome(case, "differs", f"rank {rank}: {losses} instead of {wanted}")
    return Outcome(case, "equal")

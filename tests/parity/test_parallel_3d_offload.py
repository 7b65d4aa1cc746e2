"""Pipelines whose optimizer steps on the host or on a disk compute what one process computes."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import Parallel3DStrategy
from boltmesh.strategies.offload import stores
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

Options = dict[str, Any]

CPU: Options = {"offload_optimizer": "cpu"}
NVME: Options = {"offload_optimizer": "nvme"}
PARTS: Options = {"zero_stage": 3, **NVME, "offload_fraction": {"host": 0.3, "disk": 0.4}}
AWAY: Options = {"zero_stage": 3, **NVME, "offload_parameters": "nvme"}
INTERLEAVED: Options = {"schedule": "interleaved_1f1b"}
CLIP: Options = {"gradient_clip_val": 0.5}
ROUGH = Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2)
"""Of products that are added up in bf16, which has 8 bits: the order decides about the last."""
CHUNK_NUMEL = 100
"""So that small models have parameters in several chunks, and chunks of several parameters."""


@dataclass(frozen=True)
class Case:
    """What is trained, and the layouts that it is trained in."""

    name: str
    layouts: tuple[Options, ...]
    data: int = 2
    tensor: int = 1
    accumulate: int = 1
    steps: int = 5
    model: Options = field(default_factory=dict)
    trainer: Options = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)

    @property
    def ranks(self) -> int:
        return 2 * self.data * self.tensor

    def problem(self) -> Problem:
        return Problem(
            module=partial(TinyGPT, **self.model),
            train=partial(text_data, 8 * self.data * self.steps * self.accumulate, 8),
            validation=partial(text_data, 21, 4),
            prediction=partial(text_data, 19, 4),
            steps=self.steps,
            accumulate=self.accumulate,
            trainer={"accelerator": "cpu", **self.trainer},
        )


TIED: Options = {"depth": 4, "ties": True}
CASES = [
    Case("tied weights, groups with schedules, clipping, accumulation",
         (CPU, {**AWAY, "schedule": "zbv"}),
         accumulate=2, model={**TIED, "groups": True}, trainer=CLIP),
    Case("the same, interleaved", ({"zero_stage": 2, **NVME, **INTERLEAVED},),
         accumulate=2, model={**TIED, "groups": True}, trainer=CLIP),
    Case("frozen layers, sgd, bf16-mixed, nothing clipped",
         (PARTS, {"zero_stage": 3, **CPU, "offload_parameters": "cpu"}),
         model={"depth": 4, "freezes": True, "optimizer": "sgd"},
         trainer={"precision": "bf16-mixed"}, tolerance=ROUGH),
    Case("pipeline x tensor, one rank of the data axis", ({**NVME, "schedule": "zbv"},),
         data=1, tensor=2, accumulate=2, model=TIED, trainer=CLIP),
    Case("three pipelines: tied weights get averages of three", (CPU,), data=3, model=TIED,
         trainer=CLIP),
]  # fmt: skip


def one_process(rank: int, world_size: int, case: Case) -> Trace:
    return trace_one_process(case.problem(), data_size=case.data, is_dealt=case.data > 1)


def layouts(rank: int, world_size: int, case: Case, folder: str) -> list[Trace]:
    stores.SMALL_NUMEL = 0
    vars(stores)["CHUNK_NUMEL"] = CHUNK_NUMEL
    traces = []
    for options in case.layouts:
        path: Options = {"offload_path": folder} if "nvme" in options.values() else {}
        strategy = Parallel3DStrategy(
            data=case.data, pipeline=2, tensor=case.tensor, microbatches=4, telemetry=False,
            timeout_s=600, **options, **path,
        )  # fmt: skip
        traces.append(trace_layout(case.problem(), strategy, devices=world_size))
        axis = strategy.data_axis
        assert axis.for_one_rank() is axis  # it is not left out for a lone rank
    return traces


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layout_equals_one_process(case: Case, tmp_path: Path) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    ranks = run_ranks(layouts, case.ranks, case, str(tmp_path))
    assert len(reference.losses) == case.steps
    assert reference.losses[-1] != reference.losses[0]
    assert reference.validation
    assert list(tmp_path.iterdir()) == []  # nothing is left of the swap files
    for traces in ranks:
        for options, trace in zip(case.layouts, traces, strict=True):
            found = [
                f"{options}: {each}" for each in find_differences(reference, trace, case.tolerance)
            ]
            assert found == []

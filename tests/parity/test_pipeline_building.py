"""A model of which each rank of a pipeline builds its own stages equals one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies.deferred_initialization.deferred import is_deferred
from boltmesh.strategies.deferred_initialization.materialize import make_values, materialize
from boltmesh.strategies.pipeline.partition import materialize as stage_materialize
from boltmesh.strategies.pipeline.stage.units import is_absent
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.parity.test_zero_tiling import Configured, under_deferred_init
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

LARGE = {"width": 131, "hidden": 133, "depth": 4}
"""Linears of more than 64 KiB."""
MIN_BYTES = {"configure_model": 64 << 10, "deferred_init": 64}


def on_meta(**options: Any) -> Stack:
    with torch.device("meta"):
        return Stack(**options)


def made_from_meta(**options: Any) -> Stack:
    module = on_meta(**options)
    materialize(module)
    return module


BUILT: dict[str, Any] = {
    "configure_model": Configured, "deferred_init": under_deferred_init, "meta": on_meta,
}  # fmt: skip
WHOLE: dict[str, Any] = {**BUILT, "deferred_init": Stack, "meta": made_from_meta}


def problem_of(build: Any, options: dict[str, Any]) -> Problem:
    return Problem(
        module=partial(build, **options),
        train=partial(token_data, 44, 8),
        validation=partial(token_data, 21, 8),
        steps=4,
        trainer={"accelerator": "cpu"},
    )


def one_process(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> Trace:
    return trace_one_process(problem_of(WHOLE[kind], options), data_size=1, is_dealt=False)


def pipeline(
    rank: int, world_size: int, kind: str, schedule: str, options: dict[str, Any]
) -> tuple[Trace, dict[str, list[str]]]:
    """The trace, and which parameters this rank made and which it has."""
    modules: list[LightningModule] = []
    made: list[str] = []

    def make() -> LightningModule:
        modules.append(BUILT[kind](**options))
        return modules[0]

    def counted(tensor: Tensor, name: str, device: torch.device) -> Tensor:
        assert is_deferred(tensor)
        made.append(name)
        return make_values(tensor, name, device)

    vars(stage_materialize)["make_values"] = counted
    strategy = PipelineParallelStrategy(telemetry=False, schedule=schedule, microbatches=4)
    trace = trace_layout(replace(problem_of(BUILT[kind], options), module=make), strategy,
                         devices=world_size)  # fmt: skip
    named = list(modules[0].named_parameters())
    return trace, {
        "made": sorted(made),
        "held": sorted(name for name, each in named if strategy.holds(name)),
        "large": sorted(n for n, p in named if p.nbytes >= MIN_BYTES.get(kind, 1 << 60)),
        "absent": sorted(name for name, each in named if is_absent(each)),
        "all": sorted(name for name, _ in named),
    }


@pytest.mark.sample("meta-1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", BUILT)
def test_stages_that_ranks_build_equal_one_process(kind: str, schedule: str) -> None:
    options = LARGE | {"ties": kind != "meta"}
    reference = run_ranks(one_process, 1, kind, options)[0]
    found = run_ranks(pipeline, 2, kind, schedule, options)
    assert reference.losses[-1] != reference.losses[0]
    for trace, names in found:
        assert names["made"] == sorted({*names["held"]} & {*names["large"]})
        assert names["absent"] == sorted({*names["all"]} - {*names["held"]})
        assert [str(each) for each in find_differences(reference, trace)] == []
    halves = [set(names["held"]) for _, names in found]
    assert halves[0] | halves[1] == set(found[0][1]["all"])
    # The stages of zbv that are tied stand on one rank.
    is_shared = options["ties"] and schedule == "1f1b"
    assert len(halves[0] & halves[1]) == (1 if is_shared else 0)


def fit(rank: int, world_size: int, epochs: int, source: str | None, target: str) -> Any:
    seed_everything(1, verbose=False)
    module = Configured(**LARGE)
    strategy = PipelineParallelStrategy(telemetry=False, microbatches=4)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=epochs, **QUIET
    )
    trainer.fit(module, token_data(22, 8), ckpt_path=source)
    trainer.save_checkpoint(target)
    return {
        name: each.detach().clone()
        for name, each in module.named_parameters()
        if strategy.holds(name)
    }


@pytest.mark.full
def test_a_checkpoint_is_loaded_into_a_model_that_ranks_build(tmp_path: Path) -> None:
    path = tmp_path.joinpath
    whole = run_ranks(fit, 2, 2, None, str(path("whole")))
    run_ranks(fit, 2, 1, None, str(path("half")))
    resumed = run_ranks(fit, 2, 2, str(path("half")), str(path("again")))
    for found, expected in zip(resumed, whole, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())


class CannotReset(Stack):
    """Has a parameter on ``meta`` that nobody can set."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty((), device="meta"))


def refused(rank: int, world_size: int) -> str:
    strategy = PipelineParallelStrategy(telemetry=False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, **QUIET)
    with pytest.raises(Exception, match="meta device") as caught:
        trainer.fit(CannotReset(), token_data(16, 8))
    return str(caught.value)


@pytest.mark.full
def test_what_cannot_be_made_is_refused_by_name() -> None:
    for said in run_ranks(refused, 2):
        assert "'temperature'" in said
        assert "deferred_init()" in said

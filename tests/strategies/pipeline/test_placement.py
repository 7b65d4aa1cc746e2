"""One rank decides how a model is cut, whatever samples of the data the others have seen."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from boltmesh.errors import ConfigError
from boltmesh.strategies import PipelineParallelStrategy
from boltmesh.strategies.data_parallel.single_rank import SingleRankAxis
from boltmesh.strategies.pipeline.expected_traffic import PipelineEstimate
from boltmesh.strategies.pipeline.options import PipelineContext
from boltmesh.strategies.pipeline.partition import placement
from boltmesh.strategies.pipeline.partition.choose import MemoryBudget
from boltmesh.strategies.pipeline.partition.materialize import DeferredModel
from boltmesh.strategies.pipeline.partition.placement import StageAssignment, divide, place
from boltmesh.strategies.pipeline.stage import plan_cache
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.strategies.pipeline.stage_params import StageParameters
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from tests.support.ranks import run_ranks
from tests.support.stack import Built, token_data

pytestmark = pytest.mark.ranks

LENGTHS = (1, 60)
"""Of the samples of the two ranks: the embedding weighs as much as one of them, or nothing."""


class Texts(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


def cut(rank: int, world_size: int, lengths: tuple[int, int]) -> tuple[Any, ...]:
    module = Texts()
    batch = torch.zeros(4, lengths[rank], dtype=torch.long)
    group = torch.distributed.new_group([0, 1])
    options: dict[str, Any] = {
        "rank_of_stage": (0, 1),
        "split": "auto",
        "budget": MemoryBudget(math.inf, is_asked=False, live=(2, 1)),
        "context": PipelineContext(
            group=group,
            new_group=lambda *_: None,
            data=SingleRankAxis(),
            device=torch.device("cpu"),
            recorder=NullRecorder(),
            seed=1,
        ),
        "unmade": DeferredModel(module),
    }
    first = place(module, "training_step", (batch, 0), **options).division
    # A device that a test has, other than the CPU.
    StageParameters(module, first, replace(options["context"], device=torch.device("meta")))
    kinds = {each.device.type for each in module.parameters()}
    again = place(module, "training_step", (batch, 0), **options).division
    assert again == first  # by what is known of the module
    return first.stage_of_unit, first.ranks_of_parameter, first.rank_of_buffer, kinds


def test_a_step_is_looked_at_once_to_cut_and_to_run_it(monkeypatch) -> None:
    looks: list[str] = []

    def look(root: Any, units: Any, step: str, *args: Any, **options: Any) -> Any:
        looks.append(step)
        return trace_step(root, units, step, *args, **options)

    monkeypatch.setattr(placement, "trace_step", look)
    monkeypatch.setattr(plan_cache, "trace_step", look)
    module, batch = Texts(), torch.zeros(4, 3, dtype=torch.long)
    division, plans = divided(module, "training_step", batch)
    runs = plans.stages("training_step", batch, 0, seed=1)
    assert looks == ["training_step"]
    fresh = plan_cache.StagePlans(module, plans.units, division.stage_of_unit)
    again = fresh.stages("training_step", batch, 0, seed=1)
    assert len(looks) == 2
    for one, other in zip(runs, again, strict=True):
        assert one.plan.trace.events == other.plan.trace.events
        assert one.plan.values_in == other.plan.values_in
        assert one.plan.parameters == other.plan.parameters
        assert one.plan.handling == other.plan.handling


def test_the_first_rank_decides_by_its_sample() -> None:
    short = run_ranks(cut, 2, (LENGTHS[0], LENGTHS[0]))
    long = run_ranks(cut, 2, (LENGTHS[1], LENGTHS[1]))
    assert short[0] != long[0]
    mixed = run_ranks(cut, 2, LENGTHS)
    assert mixed == [short[0], short[0]]
    # The dry run that follows has a batch on the CPU.
    assert mixed[0][-1] == {"cpu"}, "what other ranks hold waits there for the transfer"


class FirstAlone(Texts):
    """Tests look at the embedding alone, or at nothing."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        """Forgets its layers."""

    def test_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.embedding(batch).mean()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch + 1


def divided(
    module: LightningModule, step: str, batch: Tensor
) -> tuple[StageAssignment, plan_cache.StagePlans]:
    return divide(
        module,
        step,
        (batch, 0),
        rank_of_stage=(0, 1),
        split="auto",
        seed=1,
        device=torch.device("cpu"),
        budget=MemoryBudget(math.inf, is_asked=False, live=(2, 1)),
        unmade=DeferredModel(module),
        recomputed=frozenset(),
    )


def names_of_stages(module: LightningModule, step: str) -> list[list[str]]:
    division, _ = divided(module, step, torch.zeros(4, 3, dtype=torch.long))
    return [[each.name for each in stage] for stage in division.stages]


@pytest.mark.full
@pytest.mark.parametrize("step", ["test_step", "predict_step"])
def test_evaluation_that_calls_few_layers_or_none_leaves_all_of_them_to_the_stages(
    step: str,
) -> None:
    module = FirstAlone()
    stages = names_of_stages(module, step)
    assert all(stages)
    names = [f"layers.{number}" for number in range(6)]
    assert [*stages[0], *stages[1]] == ["embedding", *names]


def test_training_that_calls_no_layer_is_refused_by_what_it_does() -> None:
    with pytest.raises(ConfigError, match=r"FirstAlone\.training_step calls none of the model's"):
        names_of_stages(FirstAlone(), "training_step")


@pytest.mark.full
def test_a_model_is_looked_at_on_the_cpu_before_its_layers_are_made_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dry run has a batch on the CPU, and would meet layers on the GPU."""
    order: list[str] = []
    look_at, make = PipelineEstimate.look_at, DeferredModel.make

    def noted(name: str, call: Any) -> Any:
        def noting(*args: Any) -> Any:
            order.append(name)
            return call(*args)

        return noting

    monkeypatch.setattr(PipelineEstimate, "look_at", noted("look", look_at))
    monkeypatch.setattr(DeferredModel, "make", noted("make", make))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=PipelineParallelStrategy(stages=1, microbatches=2),
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Built(), token_data(8, 4))
    assert order == ["look", "make"]

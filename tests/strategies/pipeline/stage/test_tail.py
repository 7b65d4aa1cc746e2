"""What follows the last layer, run once on joined microbatches, gives what the whole step gives."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from boltmesh.strategies.pipeline.merge import NoJoints, find_joints, join
from boltmesh.strategies.pipeline.microbatch import MicrobatchSplitter
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from boltmesh.strategies.pytree import take_apart
from tests.support import hugging_face
from tests.support import pipeline_models as models
from tests.support.staged import split_evenly

TOKENS = torch.randint(
    0, models.WORDS, (5, models.LENGTH), generator=torch.Generator().manual_seed(0)
)
IMAGES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
PARTS = 3

CASES: list[tuple[type[LightningModule], Any]] = [
    (models.Words, TOKENS),
    (models.HeadBetweenUnits, TOKENS),
    (models.OutsideResidual, TOKENS),
    (models.InPlaceResidual, TOKENS),
    (models.ChangedArgument, TOKENS),
    (models.Streams, TOKENS),
    (models.DataclassState, TOKENS),
    (models.Extra, TOKENS),
    (models.UNet, IMAGES),
    (models.Convolutions, IMAGES),
]


def run_divided(module: LightningModule, batch: Any, wanted: int) -> tuple[Any, Any]:
    """Return what the tail gives for joined microbatches, and how they were joined."""
    step = "training_step"
    split = split_evenly(module, step, (batch, 0), 3)
    plans = StagePlans(module, find_stage_units(module), split)
    tail = plans.tail(step, batch, 0)
    parts, sizes = MicrobatchSplitter().cut(batch, wanted)
    tails = [plans.tail(step, part, 0) for part in parts]
    joints = find_joints(tail.end.plan, [each.end.plan for each in tails], sizes)
    if isinstance(joints, NoJoints):
        return None, None
    given = []
    for part, own in zip(parts, tails, strict=True):
        values: Any = ()
        for run in (*plans.stages(step, part, 0)[:-1], own.last):
            values = run.forward(values, (part, 0))
        assert [(tuple(each.shape), each.dtype) for each in values] == [
            (spec.shape, spec.dtype) for spec in own.last.plan.values_out
        ]
        given.append(values)
    joined = join(given, joints, tail.end.plan.values_in)
    return tail.end.forward(joined, (batch, 0)), joints


def assert_equal(got: Any, wanted: Any) -> None:
    for one, other in zip(take_apart(got)[0], take_apart(wanted)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "batch"), CASES, ids=[kind.__name__ for kind, _ in CASES])
@torch.no_grad()
def test_the_tail_of_joined_microbatches(kind: type[LightningModule], batch: Any) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    got, joints = run_divided(module, batch, PARTS)
    assert joints
    assert set(joints) == {0}
    assert_equal(got, module.training_step(batch, 0))


@pytest.mark.sample("gpt2_tied")
@pytest.mark.parametrize("kind", ["llama", "gpt2_tied", "bert", "t5", "vit"])
@torch.no_grad()
def test_the_tail_of_hugging_face_models(kind: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = hugging_face.HuggingFace(kind).eval()
    batch = hugging_face.batches(kind)[0]  # the rows of which count different tokens
    got, joints = run_divided(module, batch, 2)
    assert joints == (0,) * len(joints)
    assert_equal(got, module.training_step(batch, 0))


def test_gradients_go_back_through_the_tail() -> None:
    torch.manual_seed(0)
    module = models.Words()
    plans = StagePlans(
        module, find_stage_units(module), split_evenly(module, "training_step", (TOKENS, 0), 2)
    )
    tail = plans.tail("training_step", TOKENS, 0)
    values: Any = plans.stages("training_step", TOKENS, 0)[0].forward((), (TOKENS, 0))
    made = tail.last.forward(values, (TOKENS, 0))
    given = tuple(each.detach() for each in made)
    loss = tail.end.forward(given, (TOKENS, 0))
    loss.backward()
    wanted = module.training_step(TOKENS, 0)
    torch.testing.assert_close(loss, wanted)
    wanted.backward()
    weight: Any = module.head.weight.grad
    module.zero_grad()
    torch.autograd.backward(made, [each.grad for each in given])
    torch.testing.assert_close(module.head.weight.grad, weight)


class Drawing(models.Words):
    """Draws before the layers, after them, or not at all."""

    where = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.embed(batch)
        x = torch.nn.functional.dropout(x, 0.5, self.training)
        if self.where == "before":
            x = x + torch.rand_like(x)
        x = self.body(x, batch)
        loss = self.loss(x, batch)
        return loss + torch.rand(()) if self.where == "after" else loss


@pytest.mark.parametrize(("where", "draws"), [("", False), ("before", True), ("after", False)])
def test_random_numbers_before_the_tail_are_known(where: str, draws: bool) -> None:
    module = Drawing().eval()
    module.where = where
    plans = StagePlans(
        module, find_stage_units(module), split_evenly(module, "training_step", (TOKENS, 0), 2)
    )
    assert plans.tail("training_step", TOKENS, 0).draws_before == draws
    module.train()  # its dropout is one of the step's own
    assert plans.tail("training_step", TOKENS, 0).draws_before


class Picks(models.Words):
    """The head sees some tokens only."""

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        chosen = tokens > 3
        logits = self.head(self.norm(x[chosen]))
        return torch.nn.functional.cross_entropy(logits, tokens[chosen])


class Pooled(models.Words):
    """The head gives one number for all rows."""

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.head(self.norm(x.mean((0, 1)))).square().sum()


@pytest.mark.parametrize("kind", [Picks, Pooled])
def test_values_without_a_dimension_of_rows_are_not_joined(kind: type[LightningModule]) -> None:
    assert run_divided(kind(), TOKENS, PARTS) == (None, None)

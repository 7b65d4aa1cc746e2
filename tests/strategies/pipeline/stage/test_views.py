"""Several views of a batch through the layers of several stages."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.stage.event_stages import EventStages
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from tests.support.staged import check_parity

BATCH = tuple(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
SPLIT = {"backbone.0": 0, "backbone.2": 0, "neck": 1, "head.0": 1, "head.2": 2}


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv(self.norm(x)))


class Views(LightningModule):
    """One encoder and one head for several views."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), Block(8))
        self.neck = Block(8)
        self.head = nn.Sequential(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1))

    def encode(self, x: Tensor) -> Tensor:
        return self.neck(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        # What each view is multiplied by is computed between layers, of that view alone.
        found = self.encode(x)
        pooled = (found * found.sigmoid()).mean((2, 3), keepdim=True)
        return F.normalize(self.head(pooled).flatten(1), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError


class Pair(Views):
    """As SimCLR: rows of two views are compared with each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self(batch[0]), self(batch[1])
        return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


class Triplet(Views):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        anchor, positive, negative = map(self, batch)
        return F.triplet_margin_loss(anchor, positive, negative, margin=1.0)


class Stopped(Views):
    """As SimSiam: no gradient reaches the other view."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self(batch[0])
        first = self.encode(batch[0]).mean((2, 3)).std()
        return 1 - (self(batch[1]) * target).sum(1).mean() + 0.1 * first


class Dropped(Views):
    """As R-Drop: one view twice, with other dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - self(batch[0])).square().sum()


class WrittenBehind(Views):
    """Changes, behind its layers, what earlier stages gave, and a tensor of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.encode(batch[0])
        first, second = self.head(states).flatten(1), self(batch[1])
        norm = states.flatten(1).norm(dim=1, keepdim=True) * 1.0
        norm.clamp_(min=8.0)
        loss = torch.zeros(())
        loss += F.mse_loss(first / norm, second.repeat(1, 16))
        return loss * 0.5


class WrittenStem(Views):
    """As torchvision's: the activation behind the first layer is in place; so is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), Block(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.encode(batch[0])
        states.mul_(2.0)
        first = self.head(states.mean((2, 3), keepdim=True)).flatten(1)
        return (first - self(batch[1])).square().sum()


class Regularized(Views):
    """Adds a term of the first stage's alone, behind its layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.backbone(batch[0])
        first = self.head(self.neck(states).mean((2, 3), keepdim=True)).flatten(1)
        scores = first @ self(batch[1]).T
        return F.cross_entropy(scores, torch.arange(len(first))) + states.square().mean()


class Memory(nn.Module):
    """Leaves what it was given behind, as layers with states of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.last: Tensor | None = None

    def forward(self, x: Tensor, earlier: Tensor | None = None) -> Tensor:
        self.last = x * 1.5
        return self.conv(x) if earlier is None else self.conv(x) + earlier


class Remembering(Views):
    """Gives a layer of a later stage what the same layer left behind for another view."""

    def __init__(self) -> None:
        super().__init__()
        self.neck: Any = Memory()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.neck(self.backbone(batch[0]))
        second = self.neck(self.backbone(batch[1]), self.neck.last)
        return self.head(first + second).square().sum()


@pytest.mark.parametrize(
    "kind", [Pair, Triplet, Stopped, Dropped, WrittenBehind, WrittenStem, Regularized, Remembering]
)
def test_views_equal_the_whole_step(kind: type[Views]) -> None:
    torch.manual_seed(0)
    module = kind()
    if kind is not Dropped:
        check_parity(module, [BATCH], split=SPLIT)
        return
    torch.manual_seed(5)
    wanted = module.training_step(BATCH, 0)
    plans = StagePlans(module, find_stage_units(module), SPLIT)
    received: tuple[Tensor, ...] = ()
    for run in plans.stages("training_step", BATCH, 0, seed=5):
        received = run.forward(received, (BATCH, 0), seed=5)
    torch.testing.assert_close(received, wanted)


def test_each_stage_runs_its_layers_for_all_views_and_then_ends() -> None:
    module, ran = Triplet(), []
    for name, unit in find_stage_units(module).items():
        unit.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    runs = StagePlans(module, find_stage_units(module), SPLIT).stages("training_step", BATCH, 0)
    ran.clear()  # of the trace
    received: tuple[Tensor, ...] = ()
    by_stage = []
    for run in runs:
        received = run.forward(received, (BATCH, 0))
        by_stage.append([name for name in ran if SPLIT[name] == run.plan.stage])
        ran.clear()
    assert by_stage == [
        ["backbone.0", "backbone.2"] * 3, ["neck", "head.0"] * 3, ["head.2"] * 3
    ]  # fmt: skip
    assert [len(run.plan.values_in) for run in runs] == [0, 3, 3]


def test_a_step_in_order_has_the_stage_of_the_unit_before() -> None:
    class Once(Views):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0]).square().sum()

    module = Once()
    trace = trace_step(module, find_stage_units(module), "training_step", (BATCH, 0))
    stages = EventStages(trace, SPLIT)
    assert stages.is_in_order
    assert stages.of_call == (0, 0, 1, 1, 2)
    pooled = next(i for i, each in enumerate(trace.events) if "sigmoid" in each.name)
    assert stages.of(pooled) == 1
    assert stages.of(len(trace.events)) == 2


@pytest.mark.parametrize("kind", [Pair, Regularized, WrittenBehind])
def test_the_last_stage_without_its_tail_gets_what_the_stage_before_it_sends(
    kind: type[Views],
) -> None:
    module = kind()
    plans = StagePlans(module, find_stage_units(module), SPLIT)
    args = ("training_step", BATCH, 0)
    before, tail = plans.stages(*args)[-2].plan, plans.tail(*args)
    assert tail.last.plan.values_in == before.values_out
    received: tuple[Tensor, ...] = ()
    for run in [*plans.stages(*args)[:-1], tail.last, tail.end]:
        received = run.forward(received, (BATCH, 0))
    torch.testing.assert_close(received, module.training_step(BATCH, 0))


class Leaving(Views):
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.steps = 0
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        first = self(batch[0])
        self.seen.append(first.detach())
        second = self(batch[1])
        self.center.lerp_(second.detach().mean(0), 0.1)
        return (first - second).square().sum()


def test_what_a_step_leaves_behind_belongs_to_the_stage_that_has_its_values() -> None:
    module = Leaving()
    plans = StagePlans(module, find_stage_units(module), SPLIT)
    first, *_, last = [run.plan for run in plans.stages("training_step", BATCH, 0)]
    assert first.changed_buffers["center"] == last.changed_buffers["center"] == 2
    assert {name for _, name in first.changed_attributes} >= {"steps", "seen"}
    assert {name for _, name in first.attributes_of_last} == {"seen"}
    assert last.attributes_of_last == frozenset()


def test_evaluation_out_of_order_is_not_cut() -> None:
    class Evaluated(Pair):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.training_step(batch, batch_idx)

    module = Evaluated()
    plans = StagePlans(module, find_stage_units(module), SPLIT)
    with pytest.raises(ConfigError, match="validation_step calls layers of a stage again"):
        plans.stages("validation_step", BATCH, 0)


class WritesParameter(Views):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - self(batch[1])).square().sum()
        first: Any = self.backbone[0]
        with torch.no_grad():
            first.bias.clamp_(-1, 1)
        return loss


class LooksAtAnEarlierOne(Views):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self(batch[0]).sum()
        states = self.encode(batch[1])
        scale = 2.0 if first.item() > 0 else 1.0
        return scale * self.head(states).sum() + first


class Feedback(Views):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shift = self(batch[0]).mean()
        return self(batch[1] + shift).square().sum()


class LooksBetween(Views):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = 2.0 if self(batch[0]).sum().item() > 0 else 1.0
        return scale * self(batch[1]).square().sum()


class WritesBetween(Views):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.backbone(batch[0])
        first = self.neck(states)
        states.mul_(2.0)
        return (first * states).mean() + self(batch[1]).square().sum()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Feedback, "'backbone.0' is on stage 0 and the step calls it after 'head.2' of stage 2"),
        (LooksBetween, "looks at a value of stage 2 that other stages do not have"),
        (LooksAtAnEarlierOne, "looks at a value of stage 1 that other stages do not have"),
        (WritesBetween, "mul_ .* changes a tensor in place, and the step calls layers of a stage"),
        (WritesParameter, "'backbone.0.bias' is written to in the step"),
    ],
)
def test_what_needs_the_order_of_the_step_is_refused(kind: type[Views], says: str) -> None:
    module = kind()
    plans = StagePlans(module, find_stage_units(module), SPLIT)
    with pytest.raises(ConfigError, match=says):
        plans.stages("training_step", BATCH, 0)

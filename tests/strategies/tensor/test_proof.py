"""Nothing that is wrong on the ranks that will train passes the proof, whatever made it wrong."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional

from boltmesh.errors import ConfigError
from boltmesh.strategies import TensorParallelStrategy, gathered_parameters
from boltmesh.strategies.dry_run import step as dry_run_step
from boltmesh.strategies.tensor import placement, verify
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.plan import Section, SizeAttribute, TensorPlan
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.torch_compat.communication import destroy_group
from tests.support.gpts import TinyGPT, text_data
from tests.support.numbered import Losses
from tests.support.pipeline_tensor import PipelineTensor
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import Block, Stack, token_data

pytestmark = pytest.mark.ranks

Change = Callable[[TensorPlan], TensorPlan]


def changed_entries(plan: TensorPlan, pattern: str, **changes: Any) -> TensorPlan:
    sharded = {
        name: replace(each, **changes) if pattern in name else each
        for name, each in plan.sharded.items()
    }
    assert sharded != plan.sharded
    return replace(plan, sharded=sharded)


def without_sections(plan: TensorPlan) -> TensorPlan:
    """As of one section: ranks get other rows of q, k and v than belong together."""
    whole = plan.sharded["blocks.0.attention.qkv.weight"].length
    return changed_entries(plan, "attention.qkv", sections=(Section(1, whole, 1),))


def with_rows_taken_for_columns(plan: TensorPlan) -> TensorPlan:
    """The sum over the ranks is left out."""
    return changed_entries(plan, "down.weight", style="along")


def with_norms_taken_for_partial(plan: TensorPlan) -> TensorPlan:
    """Gradients of norms that are whole already are summed once more."""
    norms = tuple(f"blocks.{number}.second.weight" for number in range(2))
    return replace(plan, partial=(*plan.partial, *norms))


def without_sizes(plan: TensorPlan) -> TensorPlan:
    """Code on plain shards sees the sizes of the whole, and raises."""
    return replace(plan, attributes=(), region_axes=())


FAULTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "other rows": (without_sections, ("blocks.0.attention.qkv.weight",)),
    "no sum": (with_rows_taken_for_columns, ("blocks.0.down.weight",)),
    "a gradient twice": (with_norms_taken_for_partial, ()),
    "whole sizes": (without_sizes, ()),
}


def fit(
    module: LightningModule, world_size: int, *, steps: int = 3, rows: int = 4
) -> tuple[list[float], Any]:
    """Train a module; return the losses and the plan, which one process does not have."""
    losses = Losses()
    strategy = TensorParallelStrategy(telemetry=False)
    Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy if world_size > 1 else "auto",
        max_steps=steps, logger=False, callbacks=[losses], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, text_data(12, rows))  # fmt: skip
    return losses.kept, strategy.plan


def train(
    rank: int, world_size: int, name: str | None, scale: float = 1.0
) -> tuple[list[float], list[str], Any]:
    seed_everything(1, verbose=False)
    made: list[TensorPlan] = []
    if name is not None:

        def faulty(*args: Any, **kwargs: Any) -> TensorPlan:
            plan = make_plan(*args, **kwargs)
            made.append(FAULTS[name][0](plan))
            return made[-1]

        vars(placement)["make_plan"] = faulty
    gpt = TinyGPT(optimizer="sgd")
    for key, parameter in gpt.named_parameters():
        if key.endswith(("head.weight", "attention.out.weight")):
            parameter.data *= scale
    losses, plan = fit(gpt, world_size, steps=6)
    return (losses, list(plan.sharded), plan.notes) if plan else (losses, [], ())


@pytest.mark.parametrize("scale", [0.0, 1e-8])  # as in UNets; scales of ConvNeXt multiply
def test_a_wrong_plan_before_layers_of_zeros_does_not_train(scale: float) -> None:
    reference = run_ranks(train, 1, None, scale)[0][0]
    for losses, sharded, notes in run_ranks(train, 2, "other rows", scale):
        assert losses == pytest.approx(reference, rel=1e-5)
        assert "blocks.0.attention.qkv.weight" not in sharded
        assert any("blocks.0" in each for each in notes)


@pytest.mark.sample("no sum")
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_plan_does_not_train(name: str) -> None:
    reference = run_ranks(train, 1, None)[0][0]
    for losses, sharded, notes in run_ranks(train, 2, name):
        assert losses == pytest.approx(reference, rel=1e-5)
        assert not set(FAULTS[name][1]) & set(sharded)
        assert any("blocks.0" in each for each in notes)


def test_a_right_plan_is_not_questioned() -> None:
    ((losses, sharded, notes), _) = run_ranks(train, 2, None)
    assert losses == pytest.approx(run_ranks(train, 1, None)[0][0], rel=1e-5)
    assert "blocks.1.attention.qkv.weight" in sharded
    assert not [each for each in notes if "not run as" in each or "stays whole" in each]


def trials(rank: int, world_size: int, name: str) -> list[bool]:
    """Return of each group that was made for a trial whether it was idle when it was given back."""
    made: list[Any] = []
    ended: list[tuple[Any, bool]] = []
    make = placement._group_for_a_proof

    def noted(context: Any) -> Any:
        made.append(make(context))
        return made[-1]

    def destroyed(group: Any, *, is_idle: bool) -> None:
        ended.append((group, is_idle))
        destroy_group(group, is_idle=is_idle)

    vars(placement)["_group_for_a_proof"] = noted
    vars(verify)["destroy_group"] = destroyed
    train(rank, world_size, name)
    assert [group for group, _ in ended] == [each.process_group for each in made]
    return [is_idle for _, is_idle in ended]


def test_every_group_of_a_trial_is_given_back_also_where_ranks_have_raised() -> None:
    one, other = run_ranks(trials, 2, "whole sizes")
    assert one == other
    assert one[0] is False
    assert one[-1] is True  # of the trial that was right


class Strange(LightningModule):
    """Blocks of one class of which one does something else."""

    def __init__(self, *, fault: str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing(number == 1) for number in range(3))
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fault == "raises":
            raise ValueError("no data of mine")
        x = functional.one_hot(batch[0], 24).float()
        for block in reversed(self.blocks) if self.fault == "backwards" else self.blocks:
            x = block(x)
        return functional.mse_loss(x, functional.one_hot(batch[1], 24).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mixing(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 12), nn.Linear(12, 24)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.mixes:
            # Made of plain numbers: to an analysis of shapes it looks like any other factor.
            hidden = hidden * (1 + torch.arange(hidden.shape[-1]))
        return x + self.down(hidden.tanh())


def train_strange(rank: int, world_size: int, fault: str | None) -> tuple[float, list[str]]:
    seed_everything(1, verbose=False)
    losses, plan = fit(Strange(fault=fault), world_size)
    return losses[-1], list(plan.sharded) if plan else []


@pytest.mark.full
def test_blocks_of_one_class_that_differ_in_a_setting_are_proven_apart() -> None:
    reference = run_ranks(train_strange, 1, None)[0][0]
    for loss, sharded in run_ranks(train_strange, 2, None):
        assert loss == pytest.approx(reference, rel=1e-5)
        assert "blocks.0.up.weight" in sharded
        assert "blocks.2.up.weight" in sharded


def test_blocks_may_run_in_another_order_than_the_model_has_them() -> None:
    # CoCa of open_clip has its text encoder first and runs its image encoder first.
    reference = run_ranks(train_strange, 1, "backwards")[0][0]
    for loss, sharded in run_ranks(train_strange, 2, "backwards"):
        assert loss == pytest.approx(reference, rel=1e-5)
        assert {"blocks.0.up.weight", "blocks.2.up.weight"} <= set(sharded)


class Resampled(LightningModule):
    """Checks a width that blocks leave divided, as UNets of diffusers do where they resample."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(Leaving() for _ in range(2))
        self.resampling = Resampling()
        self.blocks = nn.ModuleList(Residual(width) for width in (12, 12, 16, 16, 20, 20))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = functional.one_hot(batch[0], 24).float()
        for wide in self.wide:
            x = self.resampling(wide(x))
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(x, functional.one_hot(batch[1], 24).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(24, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, width), nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Resampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels = nn.Linear(32, 24), 32

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.channels
        result: Tensor = self.conv(x)
        return result


def train_resampled(rank: int, world_size: int) -> tuple[list[float], list[str], int]:
    seed_everything(1, verbose=False)
    compare, num_trials = verify._Proof._compare, 0

    def counted(*args: Any) -> str | None:
        nonlocal num_trials
        num_trials += 1
        return compare(*args)

    vars(verify)["_Proof"]._compare = counted
    losses, plan = fit(Resampled(), world_size)
    return losses, list(plan.sharded) if plan else [], num_trials


def test_what_lies_outside_of_blocks_is_tried_before_each_kind_of_them() -> None:
    reference = run_ranks(train_resampled, 1)[0][0]
    for losses, sharded, num_trials in run_ranks(train_resampled, 2):
        assert losses == pytest.approx(reference, rel=1e-5)
        assert {f"blocks.{at}.up.weight" for at in range(6)} <= set(sharded)
        assert not {"wide.0.out.weight", "resampling.conv.weight"} & set(sharded)
        assert num_trials == 3  # no plan twice


class Slots(LightningModule):
    """Blocks that leave what they made in slots by their number, and take what they find there.

    Or they take its gradient alone. The first block is of a kind of its own.
    """

    def __init__(self, *, takes_values: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Slotted(number, takes_values) for number in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = functional.one_hot(batch[0], 24).float()
        slots: dict[int, Tensor] = {}
        for block in self.blocks:
            x = block(x, slots)
        return functional.mse_loss(x, functional.one_hot(batch[1], 24).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Slotted(nn.Module):
    def __init__(self, number: int, takes_values: bool) -> None:
        super().__init__()
        self.number, self.is_first, self.takes_values = number, number == 0, takes_values
        self.up, self.down = nn.Linear(24, 12), nn.Linear(12, 24)

    def forward(self, x: Tensor, slots: dict[int, Tensor]) -> Tensor:
        hidden = self.up(x).tanh()
        if (found := slots.get(self.number)) is not None:
            hidden = hidden + (found if self.takes_values else found - found.detach())
        slots[self.number] = hidden
        return x + self.down(hidden)


def train_slots(
    rank: int, world_size: int, divided: str, takes_values: bool, fits: bool
) -> tuple[list[float], list[str], tuple[str, ...]]:
    seed_everything(1, verbose=False)

    def faulty(*args: Any, **kwargs: Any) -> TensorPlan:
        plan = make_plan(*args, **kwargs)
        assert not [each for each in plan.attributes if each.name == "number"]
        wrong = SizeAttribute(divided, "number", int(divided[-1]))
        return replace(plan, attributes=(*plan.attributes, wrong))

    vars(placement)["make_plan"] = faulty
    if not fits:
        vars(verify)["_free_bytes"] = lambda _: 0
    losses, plan = fit(Slots(takes_values=takes_values), world_size)
    return (losses, list(plan.sharded), plan.notes) if plan else (losses, [], ())


@pytest.mark.sample("blocks.2-True-True")
@pytest.mark.parametrize(
    ("divided", "takes_values", "fits"),
    [
        ("blocks.2", True, True),
        ("blocks.2", False, True),
        ("blocks.2", True, False),  # seen in a forward pass through all blocks
        ("blocks.3", False, False),  # seen in a backward pass through the last and the first
    ],
)
def test_a_block_that_is_wrong_beside_others_alone_does_not_train(
    divided: str, takes_values: bool, fits: bool
) -> None:
    """Its number is divided, so that it shares a slot with ``blocks.1``, the first of its kind."""
    reference = run_ranks(train_slots, 1, divided, takes_values, True)[0][0]
    for losses, sharded, notes in run_ranks(train_slots, 2, divided, takes_values, fits):
        assert losses == pytest.approx(reference, rel=1e-5)
        assert "blocks.3.up.weight" in sharded
        assert notes == ()


class Deciding(LightningModule):
    """Blocks in which roundings decide a little, as they do where tokens go to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = functional.one_hot(batch[0], 24).float()
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(x, functional.one_hot(batch[1], 24).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 12), nn.Linear(12, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).tanh())
        with torch.no_grad():
            goes_up = (y * 5e4).round() % 2
        return x + y + 0.02 * goes_up


def decide(rank: int, world_size: int) -> tuple[list[str], tuple[str, ...], int]:
    seed_everything(1, verbose=False)
    nudges: list[object] = []
    nudge = dry_run_step.nudge
    vars(dry_run_step)["nudge"] = lambda each: nudges.append(nudge(each))
    _, plan = fit(Deciding(), world_size, steps=1, rows=12)
    return list(plan.sharded), plan.notes, len(nudges)


@pytest.mark.full
def test_what_roundings_decide_is_no_fault() -> None:
    for sharded, notes, nudges in run_ranks(decide, 2):
        assert nudges > 0
        assert "blocks.3.up.weight" in sharded
        assert notes == ()


class Attentive(LightningModule):
    """Keeps outputs for the end of the epoch, and reads what each block left on itself.

    FTTransformer of pytorch-tabular reads so, and every module written for Lightning 2 keeps so.
    """

    def __init__(self, *, keeps_hidden: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(keeps_hidden) for _ in range(3))
        self.training_step_outputs: list[Tensor] = []
        self.shares_right: list[float] = []
        self.workspace = torch.zeros(4, 6, 24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = functional.one_hot(batch[0], 24).float()
        for block in self.blocks:
            x = block(x)
            assert isinstance(block, Keeping)
            self.training_step_outputs.append(block.seen.detach())
        self.workspace[:] = x.detach()
        self.shares_right.append((x.detach().argmax(-1).numpy() == batch[1].numpy()).mean())
        return functional.mse_loss(x, functional.one_hot(batch[1], 24).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeping(nn.Module):
    def __init__(self, keeps_hidden: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 12), nn.Linear(12, 24)
        self.keeps_hidden = keeps_hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        x = x + self.down(hidden)
        self.seen = hidden if self.keeps_hidden else x
        return x


def train_attentive(
    rank: int, world_size: int, keeps_hidden: bool, is_analysed: bool
) -> tuple[list[float], Any, list[str], tuple[str, ...]]:
    seed_everything(1, verbose=False)
    module = Attentive(keeps_hidden=keeps_hidden)
    if not is_analysed:
        vars(placement)["analyse"] = lambda module, run, **options: analyse(
            module, lambda each: run(each)[0], **options
        )
    losses, plan = fit(module, world_size)
    kept = [each.mean().item() for each in module.training_step_outputs] + module.shares_right
    kept.append(module.workspace.mean().item())
    return losses, kept, *((list(plan.sharded), plan.notes) if plan else ([], ()))


@pytest.mark.parametrize(
    ("keeps_hidden", "is_analysed"), [(False, True), (True, True), (True, False)]
)
def test_what_a_step_keeps_for_later_is_that_of_the_whole_model(
    keeps_hidden: bool, is_analysed: bool
) -> None:
    losses, expected, *_ = run_ranks(train_attentive, 1, keeps_hidden, True)[0]
    for mine, kept, sharded, notes in run_ranks(train_attentive, 2, keeps_hidden, is_analysed):
        assert mine == pytest.approx(losses, rel=1e-5)
        assert kept == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert ("blocks.1.up.weight" in sharded) is not keeps_hidden
        assert any("in the attribute" in each for each in notes) is not is_analysed


def test_a_step_that_cannot_be_run_before_the_first_is_refused_with_its_reason() -> None:
    with pytest.raises(RankFailure, match=r"training_step could not be run.*no data of mine"):
        run_ranks(train_strange, 2, "raises")


def test_options_that_do_not_exist_are_refused() -> None:
    for options in ({"size": 0}, {"plan": "best"}, {"sequence_parallel": "auto"},
                    {"loss_parallel": "never"}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(options))):
            TensorParallelStrategy(**options)


class Scaled(nn.Module):
    """A layer that is given objects of classes that no other rank can find."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(8, 12)

    def forward(self, x: Tensor, scale: Any, mode: str) -> Tensor:
        made: Tensor = self.inner(x)
        return made * scale.value if mode == "scaled" else made


def _local_scale() -> tuple[Any, str]:
    class Scale:
        value = 0.5

    class Mode(str, Enum):
        SCALED = "scaled"

    return Scale(), Mode.SCALED


class ScaledStack(Stack):
    def __init__(self) -> None:
        super().__init__(width=8, hidden=12)
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *_local_scale())
        logits: Tensor = self.head(self.norm(x))
        return logits


def train_in_stages(rank: int, world_size: int, strategy: Any) -> tuple[Any, int, int]:
    """Return parameters, whole runs of the step for the proof, and layers that are divided."""
    dry_run: Any = dry_run_step.DryRun
    runs, run = [], dry_run.run

    def counted(self: Any, **options: Any) -> Any:
        runs.append(1)
        return run(self, **options)

    dry_run.run = counted
    seed_everything(1, verbose=False)
    module = ScaledStack()
    trainer = quiet_trainer(world_size, strategy, max_steps=3)
    trainer.fit(module, token_data(24, 8))
    with gathered_parameters(module):
        values = {name: each.detach().clone() for name, each in module.named_parameters()}
    axis = getattr(trainer.strategy, "tensor_axis", None)
    return values, len(runs), 0 if axis is None else len(axis.plan.sharded)


def test_in_a_pipeline_ranks_of_the_first_stage_verify_for_all() -> None:
    ((wanted, *_),) = run_ranks(train_in_stages, 1, "auto")
    found = run_ranks(train_in_stages, 4, PipelineTensor(stages=2, size=2, telemetry=False))
    for values, _, divided in found:
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)
        assert divided
    assert [bool(runs) for _, runs, _ in found] == [True, True, False, False]

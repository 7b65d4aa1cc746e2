"""Models whose sequences are divided between blocks give the numbers of whole ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.plan import (
    Backend,
    ExitPoint,
    GatherPoint,
    SequencePlan,
    TensorPlan,
)
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.tensor.runtime.apply import AppliedPlan, apply_plan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.sequence import Stacks
from tests.support.ranks import run_ranks
from tests.support.tensor_models import NO_DTENSOR_RULES, Example, example
from tests.support.vocabularies import counted_messages, relative, tensor_group

pytestmark = pytest.mark.ranks

ON_PARTS = ("gpt_torch_attention", "llama", "qwen3", "gemma", "gpt2", "bert", "neox", "falcon")
AS_DTENSORS = ("gpt_separate", "gpt_grouped", "gpt_one_key_head_norm", "gpt_fused", "phi3", "bloom")


def planned(
    made: Example, backend: Backend, group: TensorGroup, dtype: torch.dtype | None = None
) -> AppliedPlan:
    blocks = find_blocks(made.module)
    plan = make_plan(
        analyse(made.module, made.loss, blocks=blocks), group.size, sequence_parallel=True
    )
    plan = replace(plan, backends=dict.fromkeys((*blocks, ""), backend))
    made.module.to(dtype)
    return apply_plan(made.module, plan, group)


def gradients(applied: AppliedPlan) -> dict[str, Tensor]:
    """Whole gradients by name. Collective."""
    return {
        name: applied.join(name, each.grad) if name in applied.plan.sharded else each.grad
        for name, each in applied.module.named_parameters()
        if each.grad is not None
    }


def worst(found: Mapping[str, Tensor], whole: nn.Module) -> tuple[float, str]:
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(each.abs().max()) for each in expected.values())
    return max((relative(found[name], each, least), name) for name, each in expected.items())


def worst_gradient(applied: AppliedPlan, whole: nn.Module) -> tuple[float, str]:
    return worst(gradients(applied), whole)


def _models(
    rank: int, size: int, names: tuple[str, ...], backend: Backend, tokens: int
) -> dict[str, tuple[float, tuple[float, str]]]:
    found = {}
    for name in names:
        whole, made = example(name, tokens=tokens), example(name, tokens=tokens)
        expected = whole.loss(whole.module)
        expected.backward()
        applied = planned(made, backend, tensor_group())
        loss = made.loss(made.module)
        loss.backward()
        found[name] = (
            relative(loss.detach(), expected.detach()),
            worst_gradient(applied, whole.module),
        )
    return found


@pytest.mark.sample("parts-13")
@pytest.mark.parametrize("tokens", [16, 13])
@pytest.mark.parametrize(
    ("names", "backend"), [(ON_PARTS, "local"), (AS_DTENSORS, "region")], ids=["parts", "DTensors"]
)
def test_losses_and_every_gradient_are_those_of_one_process(
    names: tuple[str, ...], backend: Backend, tokens: int
) -> None:
    pytest.importorskip("transformers")
    if backend == "region":
        names = tuple(each for each in names if each not in NO_DTENSOR_RULES)
    for found in run_ranks(_models, 2, names, backend, tokens):
        for name, (loss_error, (gradient_error, where)) in found.items():
            assert loss_error < 1e-6, name
            # A key's bias has a gradient of noise: it is measured by a thousandth of the largest.
            assert gradient_error < 1e-5, (name, where)


@pytest.mark.full
def test_on_four_ranks_three_of_which_have_full_parts() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(_models, 4, ("gpt_torch_attention", "gpt2"), "local", 13):
        for loss_error, (gradient_error, where) in found.values():
            assert loss_error < 1e-6
            assert gradient_error < 1e-5, where


def _low_precision(rank: int, size: int) -> list[tuple[float, tuple[float, str]]]:
    """How far from fp32 one process in bf16 is, and a group in bf16."""
    exact, own, made = (example("llama", tokens=13) for _ in range(3))
    truth = exact.loss(exact.module)
    truth.backward()
    own.module.to(torch.bfloat16)
    own_loss = own.loss(own.module)
    own_loss.backward()
    applied = planned(made, "local", tensor_group(), torch.bfloat16)
    loss = made.loss(made.module)
    loss.backward()
    named = own.module.named_parameters()
    alone = {name: each.grad for name, each in named if each.grad is not None}
    return [
        (relative(own_loss.detach(), truth.detach()), worst(alone, exact.module)),
        (relative(loss.detach(), truth.detach()), worst_gradient(applied, exact.module)),
    ]


@pytest.mark.full
def test_in_bf16_numbers_are_as_near_to_fp32_as_those_of_one_process() -> None:
    pytest.importorskip("transformers")
    # What a row sums over the ranks is rounded to 8 bits before and after, where one process
    # rounds it once: with errors that are as likely up as down, far less than twice as much.
    for own, divided in run_ranks(_low_precision, 2):
        assert own[1][0] > 2**-8  # it is about roundings
        assert divided[0] < max(2 * own[0], 2**-8)
        assert divided[1][0] < 2 * own[1][0], divided[1][1]


def _messages(rank: int, size: int, tokens: int) -> tuple[list[tuple[str, int]], int]:
    made = example("llama", tokens=tokens)
    planned(made, "local", tensor_group())
    with counted_messages() as messages:
        made.loss(made.module).backward()
    layers = 2
    return messages.sent, layers


@pytest.mark.full
@pytest.mark.parametrize("tokens", [16, 15])
def test_a_step_moves_the_bytes_of_plain_tensor_parallelism(tokens: int) -> None:
    pytest.importorskip("transformers")
    rows, width, filled = 2, 64, 16
    activations = 4 * rows * filled * width
    positions = rows * tokens
    for sent, layers in run_ranks(_messages, 2, tokens):
        gathers = [size for name, size in sent if "gather" in name]
        scatters = [size for name, size in sent if "scatter" in name]
        sums = sorted(size for name, size in sent if "allreduce" in name)
        # Attention and MLP of each layer, forward and backward; the stack's exit, and its entry.
        assert gathers == [activations] * (4 * layers + 2)
        assert scatters == [activations] * (4 * layers)
        # Norms' weights, two per layer; the loss; what is looked up, and the head's input.
        losses = [4 * positions, 8 * positions]
        tables = [4 * positions * width] * 2
        assert sums == sorted([4 * width] * 2 * layers + losses + tables)


def _three_steps(rank: int, size: int) -> dict[str, Tensor]:
    made = example("gpt2", tokens=13)
    applied = planned(made, "local", tensor_group())
    optimizer = torch.optim.SGD(made.module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        made.loss(made.module).backward()
        optimizer.step()
    return {
        name: parameter.detach()
        for name, parameter in made.module.named_parameters()
        if name not in applied.plan.sharded
    }


@pytest.mark.full
def test_whole_parameters_between_blocks_do_not_drift_apart() -> None:
    """Without the sum over the ranks, norms would: each sees its own part of the sequence."""
    pytest.importorskip("transformers")
    first, second = run_ranks(_three_steps, 2)
    assert any("ln_1" in name for name in first)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


def _one_target(rank: int, size: int) -> tuple[float, str]:
    """A mean that each rank took over its own positions would be wrong, and another on each."""
    whole, made = example("gpt2", tokens=13), example("gpt2", tokens=13)
    for each in (whole, made):
        labels = each.batch["labels"]
        labels[...] = -100
        labels[0, 11] = 5
    applied = planned(made, "local", tensor_group())
    whole.loss(whole.module).backward()
    made.loss(made.module).backward()
    return worst_gradient(applied, whole.module)


@pytest.mark.full
def test_a_batch_with_one_target_has_its_gradient() -> None:
    pytest.importorskip("transformers")
    for gradient_error, where in run_ranks(_one_target, 2):
        assert gradient_error < 1e-5, where


class Dropping(nn.Module):
    """Blocks that draw for the residual stream, by a module and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DroppingBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class DroppingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        added = self.down(self.up(self.norm(x)).relu())
        added = F.dropout(self.dropout(added), 0.5, self.training)
        self.seen.append(added.detach() != 0)
        return x + added


def _draws(rank: int, size: int) -> list[Tensor]:
    torch.manual_seed(1)
    made = Example(Dropping(), {"x": torch.randn(2, 12, 8)})
    planned(made, "local", tensor_group())
    seen = []
    for _ in range(2):
        torch.manual_seed(2)
        made.loss(made.module)
        block: Any = made.module.get_submodule("blocks.0")
        seen.append(block.seen[-1])
    assert torch.equal(*seen)
    after = torch.rand(3)
    dist.broadcast(other := after.clone(), 0)
    assert torch.equal(after, other)
    return seen


@pytest.mark.full
def test_ranks_draw_their_own_for_their_parts_and_again_per_seed() -> None:
    first, second = (seen[0] for seen in run_ranks(_draws, 2))
    assert first.shape == second.shape == (2, 6, 8)
    assert not torch.equal(first, second)


REFUSED = {
    "gpt_three_heads": "looks at several tokens",  # attention stays whole
    "opt": "sequence",  # rows and positions become one dimension within a block
    "chain": "no stack of blocks",
}


def _refusals(rank: int, size: int) -> dict[str, str]:
    said = {}
    for name in REFUSED:
        with pytest.raises(ConfigError) as refused:
            planned(example(name), "local", tensor_group())
        said[name] = str(refused.value)
    return said


def test_models_that_look_across_divided_positions_are_refused_with_the_operator() -> None:
    pytest.importorskip("transformers")
    for said in run_ranks(_refusals, 2):
        for name, part in REFUSED.items():
            assert part in said[name]


def _bad_plans(rank: int, size: int) -> None:
    model, group = Dropping(), tensor_group()

    def stacks(last: str = "blocks.1", gathers: tuple[GatherPoint, ...] = ()) -> Stacks:
        sequence = SequencePlan(
            (("blocks.0", last),),
            gathers,
            entries=(GatherPoint("blocks.0", 0),),
            exits=(ExitPoint("blocks.1", None),),
        )
        return Stacks(model, TensorPlan(size, sequence=sequence), group)

    assert stacks().around("blocks.1.up") is not None
    assert stacks().around("blocks") is None
    with pytest.raises(LayoutError, match="does not say which argument"):
        stacks("blocks.0")
    with pytest.raises(LayoutError, match="in no stack"):
        stacks(gathers=(GatherPoint("", 0),)).put_on(None)  # type: ignore[arg-type]


@pytest.mark.full
def test_plans_that_do_not_fit_the_model_are_refused() -> None:
    run_ranks(_bad_plans, 1)

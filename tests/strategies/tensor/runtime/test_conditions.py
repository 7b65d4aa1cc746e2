"""A planned model under what training does to a model: autocast, recomputation, copies, DDP."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from boltmesh.strategies.tensor.runtime.apply import apply_plan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from tests.support.ranks import run_ranks
from tests.support.tensor_runs import (
    applied,
    built,
    compared,
    difference,
    gradients,
    planned,
    world,
)

pytestmark = pytest.mark.ranks

MODES = [("gpt_local", "local"), ("gpt_separate", "region"), ("gpt_fused", "region"),
         ("experts", "local"), ("gpt_torch_attention", "local")]  # fmt: skip


def _autocast(rank: int, world_size: int) -> tuple[list[Any], list[torch.dtype]]:
    found = []
    types = []
    for name, backend in MODES:
        with torch.autocast("cpu", torch.bfloat16):
            found.append(compared(name, backend))
        _, model, loss = applied(name, backend)
        model.blocks[0].attention.register_forward_hook(lambda *each: types.append(each[-1].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss(model)
    return found, types


def test_autocast_gives_types_and_numbers_as_without_a_plan() -> None:
    found, types = run_ranks(_autocast, 2)[0]
    for each in found:
        assert each.missing == []
        # bf16 has eight bits, and sums of two halves round elsewhere than whole ones.
        assert each.loss < 2e-2
        assert each.gradient < 0.2, each.where
    # A bias in fp32 that is added to the sum must not widen what is bf16 without a plan.
    assert set(types) == {torch.bfloat16}
    assert len(types) == len(MODES)


def _step(model: nn.Module, loss: Callable[[nn.Module], Tensor], plan: Any) -> Any:
    torch.manual_seed(7)
    model.zero_grad()
    value = loss(model)
    value.backward()
    return value.detach(), gradients(model, plan)


def _recomputed(rank: int, world_size: int) -> list[bool]:
    found = []
    for name, backend in [*MODES, ("gpt_drawing", "local"), ("gpt_drawing", "region"),
                          ("gpt_dropout", "region")]:  # fmt: skip
        plan, model, loss = applied(name, backend)
        kept = _step(model, loss, plan)
        for kind in ("full", "selective"):
            again = ActivationCheckpointing(kind)
            again.put_on(model)
            value, grads = _step(model, loss, plan)
            again.take_off()
            same = all(torch.equal(grads[each], kept[1][each]) for each in kept[1])
            found.append(torch.equal(value, kept[0]) and same)
    return found


@pytest.mark.full
def test_recomputed_blocks_give_the_same_bits_dropout_included() -> None:
    for found in run_ranks(_recomputed, 2):
        assert all(found)
        assert len(found) == 16


def _evaluated(rank: int, world_size: int) -> list[float]:
    found = []
    for name, backend in [*MODES, ("torch_layers", "local"), ("gpt_drawing", "local")]:
        whole, loss = built(name, torch.float64)
        _, model, _ = applied(name, backend, torch.float64)
        for no_grad in (torch.no_grad, torch.inference_mode):
            with no_grad():
                found.append(abs(loss(whole.eval()) - loss(model.eval())).item())
    return found


@pytest.mark.full
def test_evaluation_gives_the_same_numbers() -> None:
    # Torch's encoder hands weights to one kernel there, unless it is kept from that.
    assert max(run_ranks(_evaluated, 2)[0]) < 1e-12


def _called_again(rank: int, world_size: int) -> list[Any]:
    found = []
    for name, backend in MODES:
        whole, loss = built(name, torch.float64)
        plan, model, _ = applied(name, backend, torch.float64)
        results = []
        for each, applied_plan in ((model, plan), (whole, None)):
            # Twice in one graph, as contrastive losses do, and accumulated over two of them.
            for _ in range(2):
                value = loss(each) * loss(each)
                value.backward()
            results.append((value.detach(), gradients(each, applied_plan)))
        found.append(difference(results[0], results[1]))
    return found


@pytest.mark.full
def test_modules_that_are_called_several_times_sum_their_gradients() -> None:
    for found in run_ranks(_called_again, 2)[0]:
        assert found.missing == []
        assert found.loss < 1e-10
        assert found.gradient < 1e-10


def _copied(rank: int, world_size: int) -> list[Any]:
    found = []
    for name, backend in MODES:
        plan, model, loss = applied(name, backend, torch.float64)
        twin = copy.deepcopy(model)
        value = loss(twin)
        value.backward()
        assert all(each.grad is None for each in model.parameters())
        names = [each for each, _ in model.named_parameters()]
        plan.remove()
        wrapped = [each for each in model.modules() if "forward" in vars(each)]
        whole, loss = built(name, torch.float64)
        found.append((abs(value.item() - loss(whole).item()), wrapped,
                      names == [each for each, _ in whole.named_parameters()]))  # fmt: skip
    return found


@pytest.mark.full
def test_a_copy_runs_alone_and_wrappers_come_off() -> None:
    for error, wrapped, has_its_names in run_ranks(_copied, 2)[0]:
        assert error < 1e-12
        assert wrapped == []
        assert has_its_names


def _on_a_data_axis(rank: int, world_size: int, kind: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group = TensorGroup(mesh["tensor"].get_group(), torch.device("cpu"))
    found = []
    for name, backend in (("gpt_local", "local"), ("gpt_one_key_head_norm", "region"),
                          ("qwen3", "local")):  # fmt: skip
        whole, loss = built(name)
        value = loss(whole)
        value.backward()
        model, _ = built(name)
        applied_plan = apply_plan(model, planned(model, loss, 2, backend), group)
        if kind == "ddp":
            run: nn.Module = DistributedDataParallel(model, process_group=mesh["data"].get_group())
        else:
            blocks = model.model.layers if name == "qwen3" else model.blocks
            for block in blocks:
                fully_shard(block, mesh=mesh["data"])
            fully_shard(model, mesh=mesh["data"])
            run = model
        mine = loss(run)
        mine.backward()
        grads = {}
        for each, parameter in model.named_parameters():
            part = parameter.grad
            assert part is not None
            part = part.full_tensor() if kind == "fsdp" else part  # type: ignore[attr-defined]
            is_part = each in applied_plan.plan.sharded
            grads[each] = applied_plan.join(each, part) if is_part else part
        found.append(difference((mine.detach(), grads), (value.detach(), gradients(whole))))
    return found


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_parameters_are_any_to_a_data_axis_around(kind: str) -> None:
    for found in run_ranks(_on_a_data_axis, 4, kind)[0]:
        assert found.missing == []
        assert found.loss < 4e-6
        assert found.gradient < 1e-4, found.where


def _rank_of_a_larger_group(rank: int, world_size: int) -> str:
    model, loss = built("gpt_local")
    group = world()
    with pytest.raises(ValueError, match="for 4 ranks, and the group has 2"):
        apply_plan(model, planned(model, loss, 4, "local"), group)
    other, _ = built("gpt_three_heads")
    with pytest.raises(ValueError, match="All ranks have to build the same model"):
        apply_plan(other, planned(model, loss, 2, "local"), group)
    return "refused"


@pytest.mark.full
def test_a_plan_of_another_model_or_number_of_ranks_is_refused() -> None:
    assert run_ranks(_rank_of_a_larger_group, 2) == ["refused"] * 2

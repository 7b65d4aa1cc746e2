"""Attention with a single head trains as in one process: ranks share the channels of its values."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from boltmesh.errors import LayoutError
from boltmesh.strategies import Parallel3DStrategy, TensorParallelStrategy
from boltmesh.strategies.tensor.runtime.dtensor import attend
from tests.support.numbered import Settings, by_a_plain_loop, by_a_strategy
from tests.support.ranks import run_ranks
from tests.support.tensor_runs import world

pytestmark = pytest.mark.ranks

ONE_HEAD: Settings = {
    "kind": "Llama", "vocab_size": 40, "hidden_size": 8, "intermediate_size": 32,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "padded": [True, False, True], "length": 8,
}  # fmt: skip

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {}),
    "sequence": (2, {"sequence_parallel": True}),
    "3D": (4, {"pipeline": 2, "tensor": 2, "microbatches": 2, "sequence_parallel": True}),
}


def train(rank: int, world_size: int, layout: str) -> list[float]:
    options = LAYOUTS[layout][1]
    kind = Parallel3DStrategy if "tensor" in options else TensorParallelStrategy
    return by_a_strategy(ONE_HEAD, kind(telemetry=False, **options), world_size)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_head_with_padding_in_the_first_batch(layout: str) -> None:
    pytest.importorskip("transformers")
    wanted = by_a_plain_loop(ONE_HEAD)
    for found in run_ranks(train, LAYOUTS[layout][0], layout):
        assert found == pytest.approx(wanted, rel=1e-5)


def attention(rank: int, world_size: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 1, 5, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(5, 5).tril().log()
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    wanted = torch.autograd.grad(expected.square().sum(), [query, key, value])
    mesh = world().mesh
    parts: list[Any] = [
        DTensor.from_local(each, mesh, [Replicate()]).redistribute(placements=[placement])
        for each, placement in zip([query, key, value], [Replicate(), Replicate(), Shard(3)],
                                   strict=True)
    ]  # fmt: skip
    out: Any = attend(parts[0], parts[1], parts[2], mask)
    assert out is not None
    found = torch.autograd.grad(out.square().sum().full_tensor(), [query, key, value])
    errors = [
        (one - other).abs().max().item()
        for one, other in zip([expected, *wanted], [out.full_tensor(), *found], strict=True)
    ]
    try:
        attend(parts[0].redistribute(placements=[Shard(2)]), parts[1], parts[2])
    except LayoutError as error:
        return errors, str(error)
    dist.barrier()
    return errors, ""


@pytest.mark.full
def test_attention_over_channels_of_values() -> None:
    for errors, refusal in run_ranks(attention, 2):
        assert max(errors) < 1e-5
        assert "otherwise than by heads" in refusal

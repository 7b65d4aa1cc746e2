"""Gradients that come all at once: their buckets, their averages, and what ranks agree on."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from boltmesh.errors import ConfigError, DivergenceError, LayoutError
from boltmesh.strategies.data_parallel.ddp import DdpAxis, DdpOptions
from boltmesh.strategies.data_parallel.pipeline_ddp import (
    agree_on_gradients,
    average,
    divide_into_buckets,
)
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks


def gradients(rank: int) -> list[Tensor]:
    """Of shapes and types that make several buckets, one of them a gradient alone."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(3,), (2, 2), (40,), (5,), (), (6, 4)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[3] = made[3].double()
    made[5] = made[5].t()  # not contiguous
    return made


def test_buckets_hold_one_type_and_no_more_than_their_size() -> None:
    buckets = divide_into_buckets(gradients(0), 64)
    assert [[tuple(each.shape) for each in bucket] for bucket in buckets] == [
        [(3,), (2, 2)], [(40,)], [(5,)], [()], [(4, 6)]
    ]  # fmt: skip


def averaged(rank: int, world_size: int) -> tuple[list[Tensor], list[bool], str]:
    made = gradients(rank)
    group = dist.group.WORLD
    assert group is not None
    average(made, group, 64)
    parameters = [Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.ones(2)
    if rank == 1:
        parameters[1].grad = torch.ones(2)
    device = torch.device("cpu")
    used = agree_on_gradients(parameters, group, device, has_loss=True)
    is_used = [any(each is one for one in used) for each in parameters]
    assert all(each.grad is not None for each in used)
    with pytest.raises(DivergenceError) as caught:
        agree_on_gradients(parameters, group, device, has_loss=rank == 0)
    return made, is_used, str(caught.value)


@pytest.mark.full
@pytest.mark.ranks
def test_ranks_average_what_any_of_them_has() -> None:
    expected = [torch.stack(each).mean(0) for each in zip(gradients(0), gradients(1), strict=True)]
    for made, is_used, told in run_ranks(averaged, 2):
        for each, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(each, wanted, rtol=1e-6, atol=1e-6)
        assert is_used == [True, True, False]
        assert "a loss on 1 of 2 data ranks" in told


def test_what_pipelines_cannot_have_beside_them_is_refused() -> None:
    assert PipelineParallelStrategy(stages=2).layout_of(6).sizes == {
        "pipeline": 2, "data": 3, "tensor": 1
    }  # fmt: skip
    with pytest.raises(LayoutError, match="no whole pipelines of 3"):
        PipelineParallelStrategy(stages=3).layout_of(4)
    late = PipelineParallelStrategy(stages=2, schedule="pipedream_2bw")
    assert late.layout_of(2).data == 1
    with pytest.raises(ConfigError, match="would have 2 pipelines"):
        late.layout_of(4)
    with pytest.raises(ConfigError, match="Use PipelineDdpAxis"):
        MeshStrategy(axes=[PipelineAxis(PipelineOptions()), DdpAxis(DdpOptions())])

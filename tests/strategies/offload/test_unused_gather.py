"""What FSDP2 gathers ahead of a backward pass that does not come to it does not stay in use."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.engine import OffloadEngine
from boltmesh.strategies.offload.stores import OffloadPlan
from tests.support.offloaded import full
from tests.support.ranks import run_ranks

WIDTH = 16


class Sidetrack(nn.Module):
    """A layer that is called first, and of which the loss may know nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, *, is_used: bool) -> Tensor:
        side, first, last = self.layers
        aside = side(x)
        y: Tensor = last(first(x))
        return (y + aside if is_used else y).square().mean()


def _train(rank: int, world_size: int, folder: Path | None) -> list[Tensor]:
    stores.SMALL_NUMEL = 0
    torch.manual_seed(0)
    model = Sidetrack()
    mesh = init_device_mesh("cpu", (world_size,))
    units = {f"layers.{i}": fully_shard(layer, mesh=mesh) for i, layer in enumerate(model.layers)}
    units[""] = fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), 0.01, fused=folder is None)
    if folder is not None:
        plan = OffloadPlan({"disk": 1.0}, "nvme", folder)
        engine = OffloadEngine(plan, device=torch.device("cpu"), rank=rank)
        engine.attach(model, units)
        engine.adopt([optimizer], exposes_gradients=False)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randn(4, WIDTH, generator=data)
        model(x, is_used=step in {2, 3, 5}).backward()
        optimizer.step()
        optimizer.zero_grad()
        for unit in units.values():
            unit.reshard()
    return [full(each).detach().clone() for each in model.parameters()]


@pytest.mark.full
@pytest.mark.ranks
def test_a_unit_that_was_gathered_for_nothing_is_stepped_later(tmp_path: Path) -> None:
    expected = run_ranks(_train, 2, None)
    for ours, theirs in zip(run_ranks(_train, 2, tmp_path), expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)

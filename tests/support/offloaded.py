"""A small sharded model with an offload engine beside it, and its twin without one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from boltmesh.strategies.grad_norm import ShardShare
from boltmesh.strategies.offload.engine import OffloadEngine
from boltmesh.strategies.offload.stores import OffloadPlan

WIDTH = 64
"""Whole vectors for the kernel on 1 and 2 ranks, so that results can be equal to the bit."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks in a row; ``uses`` says how often each is called."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses: tuple[int, ...] = (1, 1, 1)) -> Tensor:
        for block, count in zip(self.blocks, uses, strict=True):
            for _ in range(count):
                x = block(x)
        return self.head(x)


@dataclass
class Twin:
    """Two equal sharded models: ``ours`` steps through the engine, ``reference`` through torch."""

    plan: OffloadPlan = field(default_factory=lambda: OffloadPlan({"host": 1.0}))
    exposes_gradients: bool = False
    never_clips: bool = False
    make: Callable[[Any], Optimizer] = lambda parameters: AdamW(parameters, 0.01)
    make_reference: Callable[[Any], Optimizer] = lambda parameters: AdamW(
        parameters, 0.01, fused=True
    )
    seed: int = 0

    drains = False
    """Whether to let the worker finish after each backward pass, so that what it guessed is done:
    on a loaded machine it might not get its turn."""

    def __post_init__(self) -> None:
        self.ours, self.units = sharded_net()
        self.reference, _ = sharded_net()
        self.optimizer = self.make(list(self.ours.parameters()))
        self.reference_optimizer = self.make_reference(list(self.reference.parameters()))
        world = dist.group.WORLD
        assert world is not None
        shares = [ShardShare(world)]
        self.engine = OffloadEngine(self.plan, device=torch.device("cpu"), shares=shares)
        self.engine.attach(self.ours, self.units)
        self.engine.adopt(
            [self.optimizer],
            exposes_gradients=self.exposes_gradients,
            never_clips=self.never_clips,
        )
        self._data = torch.Generator().manual_seed(self.seed)

    def backward(self, uses: tuple[int, ...] = (1, 1, 1), *, scale: float = 1.0) -> None:
        """One backward pass of each, over the same data."""
        x, y = (torch.randn(4, WIDTH, generator=self._data) for _ in range(2))
        for model in (self.reference, self.ours):
            ((model(x, uses) - y).square().mean() * scale).backward()
        if self.drains:
            self.engine.drain()

    def clip(self, max_norm: float) -> bool:
        """Clip both; whether that changed anything."""
        parameters = list(self.reference.parameters())
        norm = full(torch.nn.utils.clip_grad_norm_(parameters, max_norm)).item()
        assert abs(self.engine.clip(self.optimizer, max_norm).item() / norm - 1) < 1e-5
        return norm > max_norm

    def step(self) -> None:
        """Step both, and clear gradients."""
        for optimizer in (self.reference_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        for unit in self.units.values():
            unit.reshard()

    def train(self, steps: int, max_norm: float | None = None) -> int:
        """Several steps; how many of them were clipped."""
        clipped = 0
        for _ in range(steps):
            self.backward()
            clipped += self.clip(max_norm) if max_norm is not None else 0
            self.step()
        return clipped

    def difference(self) -> float:
        """The largest difference of a parameter or of a tensor of state."""
        worst = 0.0
        pairs = zip(self.reference.parameters(), self.ours.parameters(), strict=True)
        for reference, ours in pairs:
            worst = max(worst, _distance(reference, ours))
            expected = self.reference_optimizer.state.get(reference, {})
            found = self.optimizer.state.get(ours, {})
            assert expected.keys() == found.keys()
            for name, value in expected.items():
                if isinstance(value, Tensor):
                    worst = max(worst, _distance(value, found[name]))
        return worst


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _distance(one: Tensor, other: Tensor) -> float:
    return float((full(one).detach() - full(other).detach()).abs().max())


def sharded_net() -> tuple[Net, dict[str, Any]]:
    """The same on every call, and its units by name."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, {"": net, **{f"blocks.{i}": block for i, block in enumerate(net.blocks)}}

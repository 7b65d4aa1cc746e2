"""A model sharded by plain ``fully_shard``, without Lightning, and what it is whole."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a buffer, a scalar, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.hidden(self.embedding(tokens)).tanh())
        return self.head(self.out(hidden + self.frozen(hidden)))


def build(*, seed: int = 0, replicate: int = 1) -> Odd:
    """The model of a seed on this rank's shards; ``replicate`` groups of ranks hold the same."""
    torch.manual_seed(seed)
    module = Odd()
    world_size = torch.distributed.get_world_size()
    if replicate > 1:
        mesh = init_device_mesh(
            "cpu", (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(module.hidden, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    trained = [p for p in module.parameters() if p.requires_grad]
    vectors = [p for p in trained if p.dim() < 2]
    matrices = [p for p in trained if p.dim() >= 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0
) -> None:
    """Steps on batches that are alike on every rank, so that the number of ranks is no matter."""
    for step in range(steps):
        tokens = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(module(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    """The same with every DTensor gathered. Collective."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value

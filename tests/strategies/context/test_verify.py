"""Each trial of a divided sequence gives its group back, whatever its outcome."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from boltmesh.errors import ConfigError
from boltmesh.strategies import ContextParallelStrategy
from boltmesh.strategies.context import verify
from boltmesh.strategies.engine.groups import RankMeshStrategy
from boltmesh.strategies.torch_compat.communication import destroy_group
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

LENGTH = 12


class ReadsItsLength(nn.Module):
    """No position meets another, and on plain tensors it sees the positions of one rank."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "raises on plain tensors" and x.shape[1] != LENGTH:
            raise ValueError("another length")
        return x.sin() / x.shape[1]


class Model(LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding, self.reads = nn.Embedding(9, 8), ReadsItsLength(how)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.reads(self.embedding(batch))
        return functional.scaled_dot_product_attention(x, x, x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trials(rank: int, size: int, how: str) -> tuple[int, list[bool], str]:
    """Return the number of groups made for trials, which were given back idle, and the error."""
    made: list[Any] = []
    ended: list[tuple[Any, bool]] = []
    make, run_cut = RankMeshStrategy.new_group, verify._run_with_whole_results

    def noted(self: Any, *args: Any, timeout: Any = None, **kwargs: Any) -> Any:
        group = make(self, *args, timeout=timeout, **kwargs)
        if timeout is not None:
            made.append(group)
        return group

    def destroyed(group: Any, *, is_idle: bool) -> None:
        ended.append((group, is_idle))
        destroy_group(group, is_idle=is_idle)

    def raising(run: Any) -> Any:
        outcome = run_cut(run)
        if how == "raises on one rank" and rank == 1:
            raise ValueError("planted")
        return outcome

    vars(verify).update(destroy_group=destroyed, _run_with_whole_results=raising)
    setattr(RankMeshStrategy, "new_group", noted)  # noqa: B010 - mypy refuses the other way
    error = ""
    torch.manual_seed(1)
    module = Model(how)
    strategy = ContextParallelStrategy(telemetry=False, timeout_s=60.0)
    try:
        quiet_trainer(size, strategy, max_steps=1).fit(
            module,
            DataLoader(torch.randint(9, (4, LENGTH)), batch_size=2),  # type: ignore[arg-type]
        )
    except ConfigError as caught:
        error = str(caught)
    assert [group for group, _ in ended] == made
    return len(made), [is_idle for _, is_idle in ended], error


@pytest.mark.sample("reads")
@pytest.mark.parametrize(
    ("how", "are_idle", "error"),
    [
        ("reads", [True, True], ""),
        ("raises on plain tensors", [False, True], ""),
        ("raises on one rank", [False, False], "raises ValueError: planted"),
    ],
    ids=["reads", "raises", "fails"],
)
def test_every_group_of_a_trial_is_given_back(how: str, are_idle: list[bool], error: str) -> None:
    for count, found, raised in run_ranks(trials, 2, how):
        assert (count, found) == (len(are_idle), are_idle)
        assert error in raised
        assert bool(raised) == bool(error)

"""A checkpoint reads what is offloaded in the order in which it is stored."""

from typing import TYPE_CHECKING

import pytest

from boltmesh.strategies.checkpoint.shard_writer import PiecePlanner
from tests.support.offloaded import Twin
from tests.support.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor


def _planned(rank: int, world_size: int) -> list[str]:
    twin = Twin()
    twin.train(1)
    twin.engine.synchronize()
    names: dict[Tensor, str] = {p: name for name, p in twin.ours.named_parameters()}
    tensors = {name: parameter.detach() for parameter, name in names.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        for parameter, state in twin.optimizer.state.items():
            tensors[f"{names[parameter]}/{moment}"] = state[moment]
    planner = PiecePlanner()
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    return [item.index.fqn for item in planner.create_local_plan().items]


@pytest.mark.ranks
def test_a_parameter_and_its_moments_are_saved_one_after_the_other() -> None:
    for planned in run_ranks(_planned, 2):
        assert len(planned) == 14 * 3
        for at in range(0, len(planned), 3):
            name, *moments = planned[at : at + 3]
            assert moments == [f"{name}/exp_avg", f"{name}/exp_avg_sq"]

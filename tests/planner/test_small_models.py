"""``bolt_auto`` on each of twelve small models of different kinds."""

import pytest
import torch
from lightning.pytorch import Trainer

from boltmesh.strategies.parameter_access import gathered_parameters
from boltmesh.strategies.registry import build_strategy
from tests.planner.small_models import KINDS, SmallData, SmallModel
from tests.support.ranks import run_ranks

ROWS, STEPS = 16, 4


def train(rank: int, world_size: int, name: str):
    """Train on the same rows, whatever the number of ranks; return losses and parameters."""
    module = SmallModel(name)
    trainer = Trainer(
        strategy=build_strategy("bolt_auto", telemetry=False),
        devices=world_size,
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, SmallData(name, batch_size=ROWS // world_size, batches=STEPS))
    with gathered_parameters(module) as whole:
        values = {key: each.detach().clone() for key, each in whole.items()}
    return torch.stack(module.losses), values


@pytest.mark.full
@pytest.mark.parametrize("name", list(KINDS))
def test_bolt_auto_trains_a_model_with_the_numbers_of_one_process(name) -> None:
    ((losses, values),) = run_ranks(train, 1, name)
    ranks = run_ranks(train, 2, name)
    assert len(losses) == STEPS
    mean = torch.stack([each for each, _ in ranks]).mean(0)
    torch.testing.assert_close(mean, losses, rtol=2e-5, atol=1e-6)
    for _, of_rank in ranks:
        assert of_rank.keys() == values.keys()
        for key, expected in values.items():
            torch.testing.assert_close(of_rank[key], expected, rtol=0, atol=2e-5, msg=key)

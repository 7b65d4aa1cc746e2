"""A step that runs in stages gives the loss and the gradients of the step that runs whole."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from tests.support import pipeline_models as models
from tests.support.staged import check_parity


def _tokens(rows: int = 3, length: int = models.LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, models.WORDS, (rows, length), generator=generator)


TOKENS = [_tokens(), _tokens(seed=1), _tokens(2, 4)]
DICTS: list[Any] = [
    {"tokens": each, "mask": each > 3, "name": "first", "none": None} for each in TOKENS
]
DECIDING: list[Any] = [
    {"tokens": _tokens(seed=i), "skipped": torch.tensor(i), "weight": torch.tensor([0.5, i])}
    for i in (0, 3, 4, 3)
]
IMAGES = [torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]

CASES: list[tuple[type[Module], list[Any]]] = [
    (models.Words, TOKENS),
    (models.Tied, TOKENS),
    (models.HeadBetweenUnits, TOKENS),
    (models.OutsideResidual, TOKENS),
    (models.InPlaceResidual, TOKENS),
    (models.WrittenRows, TOKENS),
    (models.ChangedArgument, TOKENS),
    (models.Streams, TOKENS),
    (models.DataclassState, TOKENS),
    (models.FrozenStart, TOKENS),
    (models.BatchDecides, DECIDING),
    (models.DataInBlock, TOKENS),
    (models.DictBatch, DICTS),
    (models.Checkpointed, TOKENS),
    (models.CheckpointInBlock, TOKENS),
    (models.Extra, TOKENS),
    (models.MappedMask, TOKENS),
    (models.Asserts, TOKENS),
    (models.Encoder, [(each, each.flip(1)) for each in TOKENS]),
    (models.UNet, IMAGES),
    (models.Convolutions, IMAGES),
]


@pytest.mark.sample(
    "HeadBetweenUnits",
    "MappedMask",
    "Asserts",
    "InPlaceResidual",
    "ChangedArgument",
    "Checkpointed",
    "UNet",
)
@pytest.mark.parametrize(("kind", "batches"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_stages_give_what_the_whole_step_gives(kind: type[Module], batches: list[Any]) -> None:
    torch.manual_seed(0)
    check_parity(kind(), batches, stages=4)


@pytest.mark.each_choice
@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize("kind", [models.Tied, models.OutsideResidual, models.DataclassState])
def test_any_number_of_stages(kind: type[Module], stages: int) -> None:
    torch.manual_seed(0)
    check_parity(kind(), TOKENS, stages)

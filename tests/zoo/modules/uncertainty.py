"""torch-uncertainty: its routine for classification, around one network and an ensemble."""

from typing import Any

import torch
from torch import nn

from tests.zoo.entry import ROWS, Entry, integers, normal

IMPORTS = ["torch_uncertainty.routines"]

CLASSES = 5


def batch(number: int) -> Any:
    return normal(number, ROWS, 3, 8, 8), integers(number, CLASSES, ROWS)


def routine(network: Any, **options: Any) -> Any:
    from torch_uncertainty.routines import ClassificationRoutine

    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    return ClassificationRoutine(
        network, num_classes=CLASSES, loss=nn.CrossEntropyLoss(), optim_recipe=optimizer, **options
    )


def plain() -> Any:
    return routine(nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 16), nn.ReLU(), nn.Linear(16, CLASSES),
    ))  # fmt: skip


def packed() -> Any:
    from torch_uncertainty.layers import PackedConv2d, PackedLinear
    from torch_uncertainty.transforms import RepeatTarget

    options = {"alpha": 2, "num_estimators": 2}
    network = nn.Sequential(
        PackedConv2d(3, 8, 3, padding=1, first=True, **options), nn.ReLU(),
        PackedConv2d(8, 8, 3, padding=1, **options), nn.ReLU(), nn.Flatten(),
        PackedLinear(512, 16, **options), nn.ReLU(),
        PackedLinear(16, CLASSES, last=True, **options),
    )  # fmt: skip
    return routine(network, is_ensemble=True, format_batch_fn=RepeatTarget(2))


ENTRIES = [
    Entry("torch-uncertainty ClassificationRoutine", plain, batch),
    Entry("torch-uncertainty PackedConv2d", packed, batch),
]

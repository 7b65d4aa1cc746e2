"""torchgeo: its LightningModules for images of the Earth, as they come."""

from collections.abc import Callable
from typing import Any

from tests.zoo.entry import ROWS, Entry, integers, normal

IMPORTS = ["torchgeo.trainers"]

CLASSES, SIZE = 4, 32


def classes(number: int) -> Any:
    return {"image": normal(number, ROWS, 3, SIZE, SIZE), "label": integers(number, CLASSES, ROWS)}


def numbers(number: int) -> Any:
    return {"image": normal(number, ROWS, 3, SIZE, SIZE), "label": normal(number + 1, ROWS)}


def views(number: int) -> Any:
    return {"image": normal(number, ROWS, 3, SIZE, SIZE)}


def task(name: str, **options: Any) -> Callable[[], Any]:
    """With SGD: its own schedules need a validation and the number of all steps."""

    def build() -> Any:
        import torch
        import torchgeo.trainers

        kind = getattr(torchgeo.trainers, name)

        class Task(kind):  # type: ignore[misc, valid-type]
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

        made = Task(**options)
        if hasattr(made, "augmentations"):
            made.augmentations = made.augmentation1 = made.augmentation2 = torch.nn.Identity()
        return made

    return build


SSL = {"model": "resnet18", "weights": None, "in_channels": 3, "hidden_dim": 16,
       "output_dim": 8, "size": SIZE}  # fmt: skip

ENTRIES = [
    Entry("torchgeo ClassificationTask",
          task("ClassificationTask", model="resnet18", num_classes=CLASSES), classes,
          is_shared_batch=True, microbatches=1),
    Entry("torchgeo RegressionTask", task("RegressionTask", model="resnet18", num_outputs=1),
          numbers, is_shared_batch=True, microbatches=1),
    Entry("torchgeo SimCLRTask", task("SimCLRTask", **SSL, layers=2), views,
          is_shared_batch=True, microbatches=1),
]  # fmt: skip

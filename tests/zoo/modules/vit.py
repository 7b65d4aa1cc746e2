"""vit-pytorch: transformers for images, trained as its README does."""

from typing import Any

import torch
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["vit_pytorch"]


def batch(number: int) -> Any:
    return normal(number, ROWS, 3, 16, 16), integers(number, 5, ROWS)


def classifies(net: Any, batch: Any) -> Any:
    images, classes = batch
    return functional.cross_entropy(net(images), classes)


SIZES = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 4,
         "heads": 2, "dim_head": 8, "mlp_dim": 24}  # fmt: skip


def vit() -> Any:
    from vit_pytorch import ViT

    return Trained(ViT(**SIZES), classifies, lambda found: torch.optim.AdamW(found, lr=1e-3))


def simple() -> Any:
    from vit_pytorch.simple_vit import SimpleViT

    return Trained(SimpleViT(**SIZES), classifies)


def cait() -> Any:
    from vit_pytorch.cait import CaiT

    return Trained(CaiT(**SIZES, cls_depth=2), classifies)


ENTRIES = [
    Entry("vit-pytorch ViT", vit, batch),
    Entry("vit-pytorch SimpleViT", simple, batch),
    Entry("vit-pytorch CaiT", cait, batch),
]

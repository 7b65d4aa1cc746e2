"""torchvision: image models without batch norm."""

from typing import Any

from tests.zoo.entry import Entry, Trained
from tests.zoo.modules.timm import batch, classifies

IMPORTS = ["torchvision.models"]


def vit() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32,
        num_classes=5,
    )  # fmt: skip


def convnext() -> Any:
    from torchvision.models import ConvNeXt
    from torchvision.models.convnext import CNBlockConfig

    return ConvNeXt([CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 2)], num_classes=5)


ENTRIES = [
    Entry("torchvision VisionTransformer", lambda: Trained(vit(), classifies), batch),
    Entry("torchvision ConvNeXt", lambda: Trained(convnext(), classifies), batch),
]

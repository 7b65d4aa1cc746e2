"""timm: image models without batch norm, or with its statistics frozen."""

from typing import Any

from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["timm"]


def batch(number: int) -> Any:
    return normal(number, ROWS, 3, 32, 32), integers(number, 5, ROWS)


def classifies(net: Any, batch: Any) -> Any:
    images, classes = batch
    return functional.cross_entropy(net(images), classes)


def model(kind: str, **options: Any) -> Any:
    import timm

    return Trained(timm.create_model(kind, num_classes=5, **options), classifies)


TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}

ENTRIES = [
    Entry("timm vit_tiny", lambda: model("vit_tiny_patch16_224", **TINY), batch),
    Entry("timm deit3_small", lambda: model("deit3_small_patch16_224", **TINY), batch),
    Entry(
        "timm swin_tiny",
        lambda: model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 4),
        ),
        batch,
    ),
    Entry(
        "timm convnext_atto",
        lambda: model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 12, 12)),
        batch,
    ),
    Entry(
        "timm resnet10t",
        lambda: model("resnet10t", channels=(8, 8, 12, 12), stem_width=8),
        batch,
        microbatches=1,
    ),
]

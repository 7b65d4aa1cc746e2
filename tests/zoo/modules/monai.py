"""monai: networks for volumes, by its losses."""

from typing import Any

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["monai.networks.nets", "monai.losses"]


def batch(number: int) -> Any:
    return normal(number, ROWS, 1, 16, 16), integers(number, 3, ROWS, 1, 16, 16)


def segments(net: Any, batch: Any) -> Any:
    from monai.losses import DiceCELoss

    images, labels = batch
    return DiceCELoss(to_onehot_y=True, softmax=True)(net(images), labels)


def unet() -> Any:
    from monai.networks.nets import UNet

    return Trained(UNet(2, 1, 3, channels=(8, 12, 16), strides=(2, 2), num_res_units=1), segments)


def unetr() -> Any:
    from monai.networks.nets import UNETR

    net = UNETR(1, 3, img_size=16, feature_size=4, hidden_size=12, mlp_dim=16, num_heads=2,
                spatial_dims=2)  # fmt: skip
    return Trained(net, segments)


def attention_unet() -> Any:
    from monai.networks.nets import BasicUNet

    return Trained(
        BasicUNet(2, 1, 3, features=(4, 4, 8, 8, 8, 4), norm=("group", {"num_groups": 2})), segments
    )


ENTRIES = [
    Entry("monai UNet, DiceCELoss", unet, batch),
    Entry("monai UNETR, DiceCELoss", unetr, batch, has_unused=True),
    Entry("monai BasicUNet, DiceCELoss", attention_unet, batch),
]

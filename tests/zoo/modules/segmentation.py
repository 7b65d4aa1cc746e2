"""segmentation-models-pytorch: encoders and decoders of images, with losses of its own."""

from collections.abc import Callable
from typing import Any

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["segmentation_models_pytorch"]


def batch(number: int) -> Any:
    return normal(number, ROWS, 3, 64, 64), integers(number, 4, ROWS, 64, 64)


def network(name: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import segmentation_models_pytorch as smp

        loss = smp.losses.DiceLoss("multiclass", from_logits=True)

        def compared(net: Any, batch: Any) -> Any:
            images, classes = batch
            return loss(net(images), classes)

        return Trained(
            getattr(smp, name)("resnet18", encoder_weights=None, classes=4, **options), compared
        )

    return build


NETWORKS: dict[str, dict[str, Any]] = {
    "Unet": {"decoder_channels": (16, 16, 8, 8, 8)},
    "FPN": {"decoder_dropout": 0.0, "decoder_segmentation_channels": 32},
}

ENTRIES = [
    Entry(f"segmentation-models-pytorch {name}, DiceLoss", network(name, **options), batch,
          is_shared_batch=True, microbatches=1)
    for name, options in NETWORKS.items()
]  # fmt: skip

"""vector-quantize-pytorch: an autoencoder with a codebook of each kind between its halves."""

from typing import Any

from torch import nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, normal

IMPORTS = ["vector_quantize_pytorch"]


def batch(number: int) -> Any:
    return normal(number, ROWS, 3, 8, 8)


class Autoencoder(nn.Module):
    """Convolutions to a map of codes and back, as in the examples of the package."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 12, 4, 2, 1), nn.GELU(), nn.Conv2d(12, 8, 3, 1, 1)
        )
        self.quantizer = quantizer
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 12, 3, 1, 1),
            nn.GELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(12, 3, 3, 1, 1),
        )

    def forward(self, images: Any) -> Any:
        codes = self.encoder(images)
        quantized, _, *rest = self.quantizer(codes)
        loss = rest[0].sum() if rest else 0.0
        return self.decoder(quantized.clamp(-5, 5)), loss


def reconstructs(net: Any, batch: Any) -> Any:
    found, commitment = net(batch)
    return functional.l1_loss(found, batch) + 10 * commitment


def quantizer(kind: str, **options: Any) -> Any:
    import vector_quantize_pytorch

    return Trained(Autoencoder(getattr(vector_quantize_pytorch, kind)(**options)), reconstructs)


ENTRIES = [
    Entry(
        "vector-quantize-pytorch VectorQuantize",
        lambda: quantizer(
            "VectorQuantize",
            dim=8,
            codebook_size=10,
            accept_image_fmap=True,
            decay=0.8,
            sync_codebook=False,
        ),
        batch,
        is_shared_batch=True,
        microbatches=1,
    ),
    Entry(
        "vector-quantize-pytorch VectorQuantize, learned",
        lambda: quantizer(
            "VectorQuantize",
            dim=8,
            codebook_size=10,
            accept_image_fmap=True,
            learnable_codebook=True,
            sync_codebook=False,
            ema_update=False,
        ),
        batch,
        is_shared_batch=True,
        microbatches=1,
    ),
    Entry("vector-quantize-pytorch FSQ", lambda: quantizer("FSQ", levels=[4, 3, 3], dim=8), batch),
]

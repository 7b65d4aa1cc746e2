"""Losses of pairs: open_clip, sentence-transformers, pytorch-metric-learning."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["open_clip", "pytorch_metric_learning"]

VISION = {"image_size": 16, "layers": 4, "width": 16, "head_width": 8, "patch_size": 4}
TEXT = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 4}


def images_and_texts(number: int) -> Any:
    texts = integers(number, 18, ROWS, 8) + 1
    texts[:, -1] = 19
    return normal(number, ROWS, 3, 16, 16), texts


def clip() -> Any:
    from open_clip import CLIP, ClipLoss

    loss = ClipLoss()

    def compared(net: Any, batch: Any) -> Any:
        return loss(*net(*batch))

    return Trained(CLIP(embed_dim=16, vision_cfg=VISION, text_cfg=TEXT), compared)


def siglip() -> Any:
    from open_clip import CLIP
    from open_clip.loss import SigLipLoss

    loss = SigLipLoss()

    def compared(net: Any, batch: Any) -> Any:
        images, texts, scale, bias = net(*batch)
        return loss(images, texts, scale, bias)

    net = CLIP(embed_dim=16, vision_cfg=VISION, text_cfg=TEXT, init_logit_bias=-10.0)
    return Trained(net, compared)


def coca() -> Any:
    from open_clip import CoCa, CoCaLoss

    loss = CoCaLoss(caption_loss_weight=1.0, clip_loss_weight=1.0, pad_id=0)
    decoder = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 2}
    vision = VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 4,
                       "output_tokens": True}  # fmt: skip
    text = TEXT | {"embed_cls": True, "output_tokens": True}

    def compared(net: Any, batch: Any) -> Any:
        return sum(loss(**net(*batch)))

    net = CoCa(embed_dim=16, multimodal_cfg=decoder, text_cfg=text, vision_cfg=vision)
    nn.init.normal_(net.text_decoder.text_projection, std=0.1)  # its constructor leaves it empty
    return Trained(net, compared)


class Embeds(nn.Module):
    """An encoder of rows of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
            nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8),
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.layers(values)
        return functional.normalize(found, dim=-1)


def classes(number: int) -> Any:
    return normal(number, 8, 8), torch.arange(8) % 3


def metric(name: str, **options: Any) -> Any:
    def build() -> Any:
        from pytorch_metric_learning import losses

        loss = getattr(losses, name)(**options)

        def compared(net: Any, batch: Any) -> Any:
            values, labels = batch
            return loss(net(values), labels)

        return Trained(Embeds(), compared)

    return build


class WithProxies(nn.Module):
    """An encoder, and the proxies of a loss."""

    def __init__(self) -> None:
        super().__init__()
        from pytorch_metric_learning import losses

        self.net = Embeds()
        self.loss = losses.ArcFaceLoss(3, 8)

    def forward(self, values: Tensor, labels: Tensor) -> Any:
        return self.loss(self.net(values), labels)


def arcface() -> Any:
    return Trained(WithProxies(), lambda net, batch: net(*batch))


ENTRIES = [
    Entry("open_clip CLIP, ClipLoss", clip, images_and_texts),
    Entry("open_clip CLIP, SigLipLoss", siglip, images_and_texts),
    Entry("open_clip CoCa, CoCaLoss", coca, images_and_texts),
    Entry("pytorch-metric-learning TripletMarginLoss", metric("TripletMarginLoss"), classes),
    Entry("pytorch-metric-learning NTXentLoss", metric("NTXentLoss"), classes),
    Entry("pytorch-metric-learning MultiSimilarityLoss", metric("MultiSimilarityLoss"), classes),
    Entry("pytorch-metric-learning ArcFaceLoss", arcface, classes),
]

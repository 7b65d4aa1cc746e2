"""Attention: Perceiver, Conformer, local windows, Performer, Nystrom; experts of st_moe_pytorch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["perceiver_pytorch", "conformer", "local_attention", "st_moe_pytorch"]

WORDS, TOKENS = 12, 16


def values(number: int) -> Any:
    return normal(number, ROWS, TOKENS, 6), integers(number, 5, ROWS)


def tokens(number: int) -> Any:
    return integers(number, WORDS, ROWS, TOKENS)


def classifies(net: Any, batch: Any) -> Any:
    values, classes = batch
    return functional.cross_entropy(net(values), classes)


def predicts(net: Any, batch: Tensor) -> Any:
    logits = net(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def perceiver() -> Any:
    from perceiver_pytorch import Perceiver

    net = Perceiver(
        input_channels=6, input_axis=1, num_freq_bands=2, max_freq=4.0, depth=3, num_latents=8,
        latent_dim=16, cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8,
        num_classes=5, self_per_cross_attn=1,
    )  # fmt: skip
    return Trained(net, classifies)


def perceiver_io() -> Any:
    from perceiver_pytorch import PerceiverIO

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = PerceiverIO(
                depth=4, dim=6, queries_dim=8, num_latents=8, latent_dim=16, cross_heads=1,
                latent_heads=2, cross_dim_head=8, latent_dim_head=8, logits_dim=5,
            )  # fmt: skip
            self.queries = nn.Parameter(torch.randn(3, 8))

        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = self.net(values, queries=self.queries)
            return found.mean(1)

    return Trained(Reads(), classifies)


def conformer() -> Any:
    from conformer import Conformer

    class Classifies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(6, 16)
            self.net = Conformer(
                dim=16, depth=4, dim_head=8, heads=2, ff_mult=2, conv_expansion_factor=2,
                conv_kernel_size=3, attn_dropout=0.0, ff_dropout=0.0, conv_dropout=0.0,
            )  # fmt: skip
            self.out = nn.Linear(16, 5)

        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = self.out(self.net(self.into(values)).mean(1))
            return found

    return Trained(Classifies(), classifies)


def local() -> Any:
    from local_attention import LocalTransformer

    net = LocalTransformer(num_tokens=WORDS, max_seq_len=TOKENS, dim=16, depth=4, causal=True,
                           local_attn_window_size=4, heads=2, dim_head=8)  # fmt: skip
    return Trained(net, predicts)


def performer() -> Any:
    from performer_pytorch import PerformerLM

    net = PerformerLM(num_tokens=WORDS, max_seq_len=TOKENS, dim=16, depth=4, heads=2, dim_head=8,
                      causal=False, nb_features=8, local_attn_heads=0)  # fmt: skip
    return Trained(net, predicts)


def nystrom() -> Any:
    from nystrom_attention import Nystromformer

    class Classifies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(6, 16)
            self.net = Nystromformer(dim=16, depth=4, heads=2, dim_head=8, num_landmarks=4,
                                     pinv_iterations=3)  # fmt: skip
            self.out = nn.Linear(16, 5)

        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = self.out(self.net(self.into(values)).mean(1))
            return found

    return Trained(Classifies(), classifies)


def linear_attention() -> Any:
    from linear_attention_transformer import LinearAttentionTransformerLM

    net = LinearAttentionTransformerLM(num_tokens=WORDS, dim=16, heads=2, depth=4,
                                       max_seq_len=TOKENS, causal=False)  # fmt: skip
    return Trained(net, predicts)


class Switched(nn.Module):
    """Blocks of experts, each with losses of its router beside its output."""

    def __init__(self) -> None:
        super().__init__()
        from st_moe_pytorch import MoE, SparseMoEBlock

        self.blocks = nn.ModuleList(
            SparseMoEBlock(
                MoE(dim=8, num_experts=4, threshold_train=0.0, is_distributed=False),
                add_ff_before=True,
            )
            for _ in range(4)
        )

    def forward(self, values: Tensor) -> Any:
        extra: Any = 0.0
        for block in self.blocks:
            values, more, *_ = block(values)
            extra = extra + more
        return values, extra


def switched() -> Any:
    def loss(net: Any, batch: Any) -> Any:
        values, extra = net(batch[0])
        return (values - batch[1]).square().mean() + extra

    return Trained(Switched(), loss)


def rows(number: int) -> Any:
    return normal(number, ROWS, 6, 8), normal(number + 1, ROWS, 6, 8)


ENTRIES = [
    Entry("perceiver-pytorch Perceiver", perceiver, values),
    Entry("perceiver-pytorch PerceiverIO", perceiver_io, values),
    Entry("conformer Conformer", conformer, values, is_shared_batch=True, microbatches=1),
    Entry("local-attention LocalTransformer", local, tokens),
    Entry("performer-pytorch PerformerLM", performer, tokens),
    Entry("nystrom-attention Nystromformer", nystrom, values),
    Entry("linear-attention-transformer LM", linear_attention, tokens),
    Entry("st_moe_pytorch SparseMoEBlock", switched, rows, microbatches=1, is_shared_batch=True),
]

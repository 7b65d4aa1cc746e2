"""Models of tables: TabNet, TabTransformer, FTTransformer, TabM, numbers as periodic embeddings."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import Entry, Trained, integers, normal

IMPORTS = ["pytorch_tabnet", "tab_transformer_pytorch", "rtdl_num_embeddings", "tabm"]

ROWS = 4
CATEGORIES = (4, 3, 5)


def numbers(number: int) -> Any:
    return normal(number, ROWS, 8), integers(number, 3, ROWS)


def mixed(number: int) -> Any:
    kinds = torch.stack([integers(number + k, n, ROWS) for k, n in enumerate(CATEGORIES)], 1)
    return kinds, normal(number, ROWS, 6), integers(number, 2, ROWS).float()


def tabnet() -> Any:
    from pytorch_tabnet.tab_network import TabNet

    def loss(net: Any, batch: Any) -> Any:
        values, classes = batch
        logits, sparsity = net(values)
        return functional.cross_entropy(logits, classes) - 1e-3 * sparsity

    net = TabNet(8, 3, n_d=8, n_a=8, n_steps=3, n_independent=1, n_shared=1, virtual_batch_size=4,
                 group_attention_matrix=torch.eye(8))  # fmt: skip
    return Trained(net, loss)


def binary(net: Any, batch: Any) -> Any:
    kinds, values, wanted = batch
    return functional.binary_cross_entropy_with_logits(net(kinds, values).squeeze(-1), wanted)


def tab_transformer() -> Any:
    from tab_transformer_pytorch import TabTransformer

    net = TabTransformer(categories=CATEGORIES, num_continuous=6, dim=16, dim_out=1, depth=4,
                         heads=2, dim_head=8, mlp_act=nn.ReLU(), attn_dropout=0.0,
                         ff_dropout=0.0)  # fmt: skip
    return Trained(net, binary)


def ft_transformer() -> Any:
    from tab_transformer_pytorch import FTTransformer

    net = FTTransformer(categories=CATEGORIES, num_continuous=6, dim=16, dim_out=1, depth=4,
                        heads=2, dim_head=8, attn_dropout=0.0, ff_dropout=0.0)  # fmt: skip
    return Trained(net, binary)


def periodic() -> Any:
    from rtdl_num_embeddings import PeriodicEmbeddings

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = PeriodicEmbeddings(8, 6, lite=False)
            self.layers = nn.Sequential(
                nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(),
                nn.Linear(24, 3),
            )  # fmt: skip

        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = self.layers(self.embed(values))
            return found

    def loss(net: Any, batch: Any) -> Any:
        values, classes = batch
        return functional.cross_entropy(net(values), classes)

    return Trained(Net(), loss)


def tabm() -> Any:
    from tabm import TabM

    net = TabM.make(n_num_features=4, d_out=1, n_blocks=4, d_block=16, k=4, dropout=0.0)

    def loss(net: Any, batch: Any) -> Any:
        return (net(batch[0]) - batch[1].unsqueeze(1)).square().mean()

    return Trained(net, loss)


def vectors(number: int) -> Any:
    return normal(number, ROWS, 4), normal(number + 1, ROWS, 1)


ENTRIES = [
    Entry(
        "pytorch-tabnet TabNet",
        tabnet,
        numbers,
        is_shared_batch=True,
        microbatches=1,
        has_unused=True,
    ),
    Entry("tab-transformer-pytorch TabTransformer", tab_transformer, mixed, has_unused=True),
    Entry("tab-transformer-pytorch FTTransformer", ft_transformer, mixed),
    Entry("tabm TabM", tabm, vectors),
    Entry("rtdl-num-embeddings PeriodicEmbeddings", periodic, numbers),
]

"""torch-geometric: a network on graphs; batches are its own objects."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, integers, normal

IMPORTS = ["torch_geometric.nn"]


def batch(number: int) -> Any:
    from torch_geometric.data import Batch, Data

    graphs = []
    for row in range(ROWS):
        nodes = 4 + row
        edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        graphs.append(Data(x=normal(100 * number + row, nodes, 6), edge_index=edges,
                           y=integers(100 * number + row, 3, 1)))  # fmt: skip
    return Batch.from_data_list(graphs)


class Net(LightningModule):
    """Layers of one kind, a mean over the nodes of each graph, and a head."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        import torch_geometric.nn as layers

        self.body = getattr(layers, kind)(6, 12, 3, 12, **options)
        self.head = nn.Linear(12, 3)

    def training_step(self, graphs: Any, batch_idx: int) -> Any:
        from torch_geometric.nn import global_mean_pool

        nodes = self.body(graphs.x, graphs.edge_index)
        found = self.head(global_mean_pool(nodes, graphs.batch, graphs.num_graphs))
        return functional.cross_entropy(found, graphs.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


ENTRIES = [
    Entry("torch-geometric GCN", lambda: Net("GCN"), batch, microbatches=1),
    Entry("torch-geometric GAT", lambda: Net("GAT", heads=2), batch, microbatches=1),
    Entry("torch-geometric GraphSAGE", lambda: Net("GraphSAGE"), batch, microbatches=1),
]

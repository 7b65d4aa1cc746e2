"""chemprop: message passing on molecules."""

import warnings
from typing import Any

from tests.zoo.entry import ROWS, Entry

IMPORTS = ["chemprop"]

MOLECULES = ["CCO", "c1ccccc1", "CC(=O)O", "CN", "CCCC", "C1CC1N", "OCCO", "CC#N",
             "ClCCl", "CCN(CC)CC", "c1ccncc1", "CCS", "BrCC", "CC(C)C", "OC=O", "NCC"]  # fmt: skip


def batch(number: int) -> Any:
    from chemprop import data, featurizers

    points = [
        data.MoleculeDatapoint.from_smi(MOLECULES[(ROWS * number + row) % len(MOLECULES)],
                                        [0.3 * row - number])
        for row in range(ROWS)
    ]  # fmt: skip
    dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    return data.collate_batch([dataset[row] for row in range(ROWS)])


def mpnn(aggregation: str = "MeanAggregation", passing: str = "BondMessagePassing") -> Any:
    from chemprop import models, nn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return models.MPNN(
            getattr(nn, passing)(d_h=16, depth=3), getattr(nn, aggregation)(),
            nn.RegressionFFN(input_dim=16, hidden_dim=12, n_layers=2), batch_norm=False,
        )  # fmt: skip


ENTRIES = [
    Entry("chemprop MPNN, bonds", mpnn, batch, microbatches=1),
    Entry(
        "chemprop MPNN, atoms",
        lambda: mpnn("NormAggregation", "AtomMessagePassing"),
        batch,
        microbatches=1,
    ),
]

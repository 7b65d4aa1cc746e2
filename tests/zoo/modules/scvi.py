"""scvi-tools: its plan of training, a LightningModule, around variational autoencoders of cells."""

from typing import Any

import torch

from tests.zoo.entry import ROWS, Entry, integers

IMPORTS = ["scvi.module"]

GENES = 12


def batch(number: int) -> Any:
    return {
        "X": integers(number, 9, ROWS, GENES).float(),
        "batch": integers(number, 2, ROWS, 1),
        "labels": torch.zeros(ROWS, 1, dtype=torch.long),
    }


def plan(kind: str, **options: Any) -> Any:
    import scvi.module
    from scvi.train import TrainingPlan

    module = getattr(scvi.module, kind)(
        n_input=GENES, n_hidden=8, n_latent=3, dropout_rate=0.0, n_batch=2, **options
    )
    return TrainingPlan(module, n_epochs_kl_warmup=None, lr=1e-2)


ENTRIES = [
    Entry(
        "scvi-tools VAE",
        lambda: plan("VAE", use_batch_norm="none", use_layer_norm="both"),
        batch,
        draws=True,
        has_unused=True,
    ),
    Entry(
        "scvi-tools VAE, negative binomial",
        lambda: plan("VAE", use_batch_norm="none", gene_likelihood="nb", n_layers=2),
        batch,
        draws=True,
        has_unused=True,
    ),
]

"""neuralforecast: its LightningModules, on windows of short series."""

from typing import Any

import torch

from tests.zoo.entry import ROWS, Entry, normal

IMPORTS = ["neuralforecast.models"]

HORIZON, INPUT = 3, 8


def batch(number: int) -> Any:
    import pandas

    length = INPUT + HORIZON
    values = 1 + normal(number, ROWS, 1, length)
    return {
        "temporal": torch.cat([values, torch.ones_like(values)], 1),
        "temporal_cols": pandas.Index(["y", "available_mask"]),
        "y_idx": 0,
    }


def module(kind: str, **options: Any) -> Any:
    import neuralforecast.models
    from neuralforecast.losses.pytorch import MSE

    found = getattr(neuralforecast.models, kind)(
        h=HORIZON, input_size=INPUT, loss=MSE(), valid_loss=MSE(), max_steps=4, learning_rate=1e-2,
        windows_batch_size=None, **options,
    )  # fmt: skip
    found.val_size = found.test_size = 0
    return found


ENTRIES = [
    Entry(
        "neuralforecast NHITS",
        lambda: module(
            "NHITS",
            mlp_units=[[12, 12]] * 3,
            n_pool_kernel_size=[2, 2, 1],
            n_freq_downsample=[2, 1, 1],
        ),
        batch,
        has_unused=True,
        microbatches=1,
    ),
    Entry(
        "neuralforecast NBEATS",
        lambda: module("NBEATS", mlp_units=[[12, 12]] * 3),
        batch,
        has_unused=True,
        microbatches=1,
    ),
    Entry(
        "neuralforecast MLP",
        lambda: module("MLP", hidden_size=16, num_layers=3),
        batch,
        microbatches=1,
    ),
    Entry(
        "neuralforecast TFT",
        lambda: module("TFT", hidden_size=8, n_head=2, dropout=0.0),
        batch,
        has_unused=True,
        microbatches=1,
    ),
    Entry(
        "neuralforecast PatchTST",
        lambda: module(
            "PatchTST",
            hidden_size=8,
            n_heads=2,
            linear_hidden_size=12,
            encoder_layers=2,
            patch_len=4,
            stride=2,
            dropout=0.0,
            fc_dropout=0.0,
            batch_normalization=False,
        ),
        batch,
        microbatches=1,
        # Before a batch norm; added to all keys of a softmax.
        without_gradient=("to_out.0.bias", "ff.3.bias", "W_V.bias", "W_K.bias"),
    ),
    Entry(
        "neuralforecast LSTM",
        lambda: module("LSTM", encoder_hidden_size=8, decoder_hidden_size=8),
        batch,
        microbatches=1,
    ),
    Entry(
        "neuralforecast VanillaTransformer",
        lambda: module(
            "VanillaTransformer", hidden_size=8, n_head=2, conv_hidden_size=12, dropout=0.0
        ),
        batch,
        microbatches=1,
        without_gradient=("key_projection.bias",),  # added to all keys of a softmax
    ),
    Entry(
        "neuralforecast TiDE",
        # Its last norm is over one value, behind which nothing has a gradient.
        lambda: module(
            "TiDE",
            hidden_size=12,
            decoder_output_dim=8,
            temporal_decoder_dim=8,
            dropout=0.0,
            layernorm=False,
        ),
        batch,
        microbatches=1,
    ),
    Entry("neuralforecast KAN", lambda: module("KAN", hidden_size=8), batch, microbatches=1),
]

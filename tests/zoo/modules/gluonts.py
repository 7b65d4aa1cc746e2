"""gluonts: its LightningModules for forecasts, with a batch of the shapes that they describe."""

import importlib
from functools import partial
from typing import Any

import torch

from tests.zoo.entry import ROWS, Entry, integers, normal

IMPORTS = [
    "gluonts.torch.model.deepar.lightning_module",
    "gluonts.torch.model.patch_tst.lightning_module",
    "gluonts.torch.model.simple_feedforward.lightning_module",
    "gluonts.torch.model.tft.lightning_module",
    "gluonts.torch.model.d_linear.lightning_module",
    "gluonts.torch.model.lag_tst.lightning_module",
]

HORIZON, CONTEXT = 4, 12


def module(folder: str, kind: str, **options: Any) -> Any:
    home = importlib.import_module(f"gluonts.torch.model.{folder}.lightning_module")
    return getattr(home, f"{kind}LightningModule")(model_kwargs=options, lr=1e-2)


def batch(number: int, build: Any) -> Any:
    state = torch.get_rng_state()
    described = build().model.describe_inputs(batch_size=ROWS)
    torch.set_rng_state(state)
    found = {}
    for place, (name, each) in enumerate(described.items()):
        if "observed" in name:
            found[name] = torch.ones(each.shape, dtype=each.dtype)
        elif each.dtype.is_floating_point:
            found[name] = 2 + normal(10 * number + place, *each.shape).to(each.dtype)
        else:
            found[name] = integers(number, 1, *each.shape)
    found["future_target"] = 2 + normal(10 * number + 9, ROWS, HORIZON)
    found["future_observed_values"] = torch.ones(ROWS, HORIZON)
    return found


def entry(name: str, folder: str, kind: str, *, microbatches: int = 2, **options: Any) -> Entry:
    build = partial(module, folder, kind, prediction_length=HORIZON, **options)
    return Entry(f"gluonts {name}", build, partial(batch, build=build), microbatches=microbatches)


SIZES = {"context_length": CONTEXT}

ENTRIES = [
    entry(
        "DeepAR",
        "deepar",
        "DeepAR",
        freq="D",
        num_layers=2,
        hidden_size=8,
        dropout_rate=0.0,
        lags_seq=[1, 2, 7],
        **SIZES,
    ),
    entry(
        "PatchTST",
        "patch_tst",
        "PatchTST",
        patch_len=4,
        stride=2,
        padding_patch="end",
        d_model=8,
        nhead=2,
        dim_feedforward=12,
        num_feat_dynamic_real=0,
        dropout=0.0,
        activation="relu",
        norm_first=False,
        num_encoder_layers=2,
        scaling="mean",
        **SIZES,
    ),
    entry(
        "SimpleFeedForward",
        "simple_feedforward",
        "SimpleFeedForward",
        hidden_dimensions=[12, 10],
        **SIZES,
    ),
    entry(
        "TemporalFusionTransformer",
        "tft",
        "TemporalFusionTransformer",
        d_var=8,
        d_hidden=8,
        num_heads=2,
        dropout_rate=0.0,
        **SIZES,
    ),
    entry(
        "DLinear", "d_linear", "DLinear", hidden_dimension=8, kernel_size=3, scaling="mean", **SIZES
    ),
    entry(
        "LagTST",
        "lag_tst",
        "LagTST",
        freq="D",
        d_model=8,
        nhead=2,
        dim_feedforward=12,
        dropout=0.0,
        activation="relu",
        norm_first=False,
        num_encoder_layers=2,
        scaling="mean",
        lags_seq=[1, 2, 7],
        **SIZES,
    ),
]

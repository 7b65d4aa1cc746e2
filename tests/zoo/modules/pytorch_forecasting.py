"""pytorch-forecasting: its LightningModules, on a table of series."""

import warnings
from functools import cache
from typing import Any

from tests.zoo.entry import ROWS, Entry, normal

IMPORTS = ["pytorch_forecasting"]

SERIES, LENGTH, CONTEXT, HORIZON = 8, 30, 8, 3


@cache
def series(is_univariate: bool) -> Any:
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet

    values = 3 + normal(0, SERIES, LENGTH).numpy()
    table = pandas.DataFrame(
        [(str(row), time, values[row, time], time % 7) for row in range(SERIES)
         for time in range(LENGTH)],
        columns=["series", "time", "value", "day"],
    ).astype({"day": float})  # fmt: skip
    known = {} if is_univariate else {"time_varying_known_reals": ["day"],
                                      "static_categoricals": ["series"]}  # fmt: skip
    return TimeSeriesDataSet(
        table, time_idx="time", target="value", group_ids=["series"],
        max_encoder_length=CONTEXT, max_prediction_length=HORIZON, min_encoder_length=CONTEXT,
        time_varying_unknown_reals=["value"], **known,
    )  # fmt: skip


def batch(number: int, is_univariate: bool = True) -> Any:
    found = series(is_univariate)
    rows = [found[(ROWS * number + row) * 5 % len(found)] for row in range(ROWS)]
    return found._collate_fn(rows)


def module(kind: str, is_univariate: bool = True, **options: Any) -> Any:
    import pytorch_forecasting

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(pytorch_forecasting, kind).from_dataset(
            series(is_univariate), learning_rate=1e-2, log_interval=-1, optimizer="adam", **options
        )
    # Its scheduler waits for the loss of a validation.
    found.configure_optimizers = lambda: type(found).configure_optimizers(found)["optimizer"]
    return found


def covariates(number: int) -> Any:
    return batch(number, False)


ENTRIES = [
    Entry(
        "pytorch-forecasting NBeats",
        lambda: module(
            "NBeats",
            widths=[12, 12],
            num_blocks=[1, 1],
            num_block_layers=[2, 2],
            expansion_coefficient_lengths=[3, 4],
            dropout=0.0,
        ),
        batch,
        has_unused=True,
    ),
    Entry(
        "pytorch-forecasting NHiTS",
        lambda: module("NHiTS", hidden_size=12, dropout=0.0),
        batch,
        has_unused=True,
    ),
    Entry(
        "pytorch-forecasting TemporalFusionTransformer",
        lambda: module(
            "TemporalFusionTransformer",
            False,
            hidden_size=8,
            attention_head_size=2,
            hidden_continuous_size=4,
            dropout=0.0,
        ),
        covariates,
        has_unused=True,
        # Added to all keys of a softmax.
        without_gradient=("k_layers.0.bias", "k_layers.1.bias"),
    ),
    Entry(
        "pytorch-forecasting DeepAR",
        lambda: module("DeepAR", False, hidden_size=8, rnn_layers=2, dropout=0.0),
        covariates,
        has_unused=True,
    ),
    Entry(
        "pytorch-forecasting RecurrentNetwork",
        lambda: module("RecurrentNetwork", False, hidden_size=8, rnn_layers=2, dropout=0.0),
        covariates,
        has_unused=True,
    ),
]

"""darts: the LightningModules of its forecasting models, and the batches that it makes for them."""

from collections.abc import Callable
from typing import Any

from tests.zoo.entry import ROWS, Entry, normal

IMPORTS = ["darts.models"]

PAST, FUTURE = 12, 4

MODELS: dict[str, dict[str, Any]] = {
    "NBEATSModel": {"num_stacks": 4, "num_blocks": 1, "num_layers": 2, "layer_widths": 16},
    "NHiTSModel": {"num_stacks": 4, "num_blocks": 1, "num_layers": 2, "layer_widths": 16,
                   "dropout": 0.0},
    "TransformerModel": {"d_model": 16, "nhead": 2, "num_encoder_layers": 2,
                         "num_decoder_layers": 2, "dim_feedforward": 24, "dropout": 0.0},
    "TiDEModel": {"hidden_size": 16, "dropout": 0.0},
    "TSMixerModel": {"hidden_size": 16, "ff_size": 16, "num_blocks": 4, "dropout": 0.0},
    "BlockRNNModel": {"model": "LSTM", "hidden_dim": 12, "n_rnn_layers": 2},
    "NLinearModel": {},
}  # fmt: skip


def batch(number: int) -> Any:
    from darts.utils.data.torch_datasets.utils import TorchTrainingBatch

    return TorchTrainingBatch(
        past_target=normal(number, ROWS, PAST, 1),
        future_target=normal(number + 1, ROWS, FUTURE, 1),
        past_covariates=None,
        historic_future_covariates=None,
        future_covariates=None,
        static_covariates=None,
        sample_weight=None,
    )


def module(name: str) -> Callable[[], Any]:
    def build() -> Any:
        import darts.models
        from darts.utils.data.torch_datasets.utils import TorchTrainingSample

        model = getattr(darts.models, name)(
            input_chunk_length=PAST, output_chunk_length=FUTURE, **MODELS[name]
        )
        sample = TorchTrainingSample(
            past_target=normal(0, PAST, 1).numpy(), future_target=normal(0, FUTURE, 1).numpy()
        )
        found = model._create_model(sample)
        return found.float()

    return build


ENTRIES = [Entry(f"darts {name}", module(name), batch) for name in MODELS]

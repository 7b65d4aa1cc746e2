"""pytorch-tabular: the LightningModules that its TabularModel makes from a table."""

from collections.abc import Callable
from typing import Any

from tests.zoo.entry import ROWS, Entry, integers, normal

IMPORTS = ["pytorch_tabular.models"]

CATEGORIES, NUMBERS = ("kind", "place"), ("size", "age", "rate")


def batch(number: int) -> Any:
    import torch

    kinds = torch.stack([integers(number + k, 3, ROWS) + 1 for k in range(2)], 1)
    return {"categorical": kinds, "continuous": normal(number, ROWS, 3),
            "target": integers(number, 2, ROWS, 1)}  # fmt: skip


def module(name: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import numpy as np
        import pandas as pd
        import pytorch_tabular.models
        from pytorch_tabular import TabularModel
        from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

        drawn = np.random.default_rng(0)
        table = pd.DataFrame({each: drawn.choice(list("abc"), 32) for each in CATEGORIES})
        for each in NUMBERS:
            table[each] = drawn.normal(size=32)
        table["target"] = drawn.integers(0, 2, 32)
        model = TabularModel(
            data_config=DataConfig(target=["target"], continuous_cols=list(NUMBERS),
                                   categorical_cols=list(CATEGORIES)),
            model_config=getattr(pytorch_tabular.models, f"{name}Config")(
                task="classification", learning_rate=1e-2, **options
            ),
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(batch_size=ROWS, accelerator="cpu"),
            verbose=False,
        )  # fmt: skip
        return model.prepare_model(model.prepare_dataloader(table, None, seed=0))

    return build


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "CategoryEmbedding": ("CategoryEmbeddingModel", {"layers": "16-16-8"}),
    "GANDALF": ("GANDALF", {}),
    "FTTransformer": (
        "FTTransformer",
        {"input_embed_dim": 16, "num_heads": 2, "num_attn_blocks": 4, "attn_dropout": 0.0,
         "ff_dropout": 0.0, "add_norm_dropout": 0.0},
    ),
}  # fmt: skip

ENTRIES = [
    Entry(f"pytorch-tabular {name}", module(config, **options), batch, microbatches=1,
          has_unused=name == "FTTransformer")  # which leaves its batch norm out
    for name, (config, options) in CONFIGS.items()
]  # fmt: skip

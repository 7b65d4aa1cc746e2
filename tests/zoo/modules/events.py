"""Events and texts: pytorch-lifestream, chronos-bolt, sentence-transformers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["ptls.frames.coles", "chronos.chronos_bolt", "sentence_transformers"]


def coles() -> Any:
    from ptls.frames.coles import CoLESModule
    from ptls.frames.coles.losses import ContrastiveLoss
    from ptls.frames.coles.sampling_strategies import HardNegativePairSelector
    from ptls.nn import RnnSeqEncoder, TrxEncoder

    events = TrxEncoder(
        embeddings={"kind": {"in": 8, "out": 6}}, numeric_values={"amount": "identity"},
        use_batch_norm=False, embeddings_noise=0.0,
    )  # fmt: skip
    return CoLESModule(
        seq_encoder=RnnSeqEncoder(events, hidden_size=16, type="gru"),
        loss=ContrastiveLoss(margin=0.5, sampling_strategy=HardNegativePairSelector(neg_count=1)),
        optimizer_partial=partial(torch.optim.SGD, lr=0.05),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=10),
    )


def events(number: int) -> Any:
    from ptls.data_load.padded_batch import PaddedBatch

    kinds, amounts = integers(number, 7, ROWS, 6) + 1, normal(number, ROWS, 6)
    lengths = torch.tensor([6, 4, 5, 6])
    return PaddedBatch({"kind": kinds, "amount": amounts}, lengths), torch.tensor([0, 0, 1, 1])


def bolt() -> Any:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    config = T5Config(
        d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=4, num_decoder_layers=4,
        dropout_rate=0.0, feed_forward_proj="relu", pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    config.chronos_config = {
        "context_length": 16, "prediction_length": 4, "input_patch_size": 4,
        "input_patch_stride": 4, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True,
    }  # fmt: skip
    net = ChronosBoltModelForForecasting(config)
    return Trained(net, lambda net, batch: net(context=batch[0], target=batch[1]).loss)


def series(number: int) -> Any:
    return normal(number, ROWS, 16), normal(number + 1, ROWS, 4)


class Pairs(nn.Module):
    """Embeddings of two texts by one encoder, and the loss of ``MultipleNegativesRankingLoss``."""

    def __init__(self) -> None:
        super().__init__()
        from sentence_transformers.models import Pooling
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 24}
        config = BertConfig(
            num_hidden_layers=4, num_attention_heads=2, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, **sizes,
        )  # fmt: skip
        self.encoder = BertModel(config)
        self.pooling = Pooling(16)

    def forward(self, ids: Tensor) -> Any:
        mask = torch.ones_like(ids)
        found = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = self.pooling({"token_embeddings": found, "attention_mask": mask})
        return pooled["sentence_embedding"]


def ranking(net: Any, batch: Any) -> Any:
    from sentence_transformers.util import cos_sim

    both = net(torch.cat(batch))
    scores = 20 * cos_sim(both[:ROWS], both[ROWS:])
    return functional.cross_entropy(scores, torch.arange(len(scores)))


ENTRIES = [
    Entry("pytorch-lifestream CoLESModule", coles, events, microbatches=1),
    Entry("chronos ChronosBolt", bolt, series),
    Entry("sentence-transformers, pairs", lambda: Trained(Pairs(), ranking),
          lambda number: (integers(number, 24, ROWS, 6), integers(number + 1, 24, ROWS, 6)),
          has_unused=True, microbatches=1),
]  # fmt: skip

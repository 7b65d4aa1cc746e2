"""Sequences: litgpt, mambapy, a BiLSTM with a CRF, spiking networks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["litgpt", "torchcrf", "snntorch"]

WORDS, TOKENS = 16, 8


def tokens(number: int) -> Any:
    return integers(number, WORDS, ROWS, TOKENS)


def predicts(net: Any, batch: Tensor) -> Any:
    logits = net(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def litgpt(**options: Any) -> Any:
    def build() -> Any:
        from litgpt import GPT, Config

        config = Config(block_size=TOKENS, n_layer=4, n_embd=16, n_head=4, padded_vocab_size=WORDS,
                        vocab_size=WORDS, **options)  # fmt: skip
        return Trained(GPT(config), predicts)

    return build


def mamba() -> Any:
    from mambapy.mamba import Mamba, MambaConfig

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, 16)
            self.mamba = Mamba(MambaConfig(d_model=16, n_layers=4, d_state=4, pscan=True))
            self.out = nn.Linear(16, WORDS)

        def forward(self, words: Tensor) -> Tensor:
            found: Tensor = self.out(self.mamba(self.embed(words)))
            return found

    return Trained(Model(), predicts)


class Tagger(nn.Module):
    """Tags of words by a CRF over a BiLSTM."""

    def __init__(self) -> None:
        super().__init__()
        from torchcrf import CRF

        self.embed = nn.Embedding(WORDS, 12)
        self.lstm = nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 4)
        self.crf = CRF(4, batch_first=True)

    def forward(self, words: Tensor, tags: Tensor, mask: Tensor) -> Any:
        scores = self.out(self.lstm(self.embed(words))[0])
        return -self.crf(scores, tags, mask=mask, reduction="mean")


def tagged(number: int) -> Any:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[::2, -2:] = False
    return integers(number, WORDS, ROWS, TOKENS), integers(number, 4, ROWS, TOKENS), mask


def crf() -> Any:
    return Trained(Tagger(), lambda net, batch: net(*batch))


class Spiking(nn.Module):
    """Leaky neurons over some time steps, as in snntorch's tutorial 5."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.fc1, self.lif1 = nn.Linear(8, 16), snntorch.Leaky(beta=0.95)
        self.fc2, self.lif2 = nn.Linear(16, 3), snntorch.Leaky(beta=0.95)

    def forward(self, values: Tensor) -> Tensor:
        first, second = self.lif1.init_leaky(), self.lif2.init_leaky()
        potentials = []
        for _ in range(4):
            spikes, first = self.lif1(self.fc1(values), first)
            spikes, second = self.lif2(self.fc2(spikes), second)
            potentials.append(second)
        return torch.stack(potentials)


def images(number: int) -> Any:
    return normal(number, ROWS, 8), integers(number, 3, ROWS)


def spiking() -> Any:
    def loss(net: Any, batch: Any) -> Any:
        values, classes = batch
        return sum(functional.cross_entropy(each, classes) for each in net(values))

    return Trained(Spiking(), loss)


ENTRIES = [
    Entry("litgpt GPT", litgpt(), tokens),
    Entry(
        "litgpt GPT, as Llama",
        litgpt(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=24,
               n_query_groups=2, parallel_residual=False, bias=False, rotary_percentage=1.0),
        tokens,
    ),
    Entry(
        "litgpt GPT, as Mixtral",
        litgpt(norm_class_name="RMSNorm", mlp_class_name="LLaMAMoE", intermediate_size=24,
               moe_intermediate_size=24, n_expert=4, n_expert_per_token=2, n_query_groups=2,
               parallel_residual=False, bias=False, rotary_percentage=1.0),
        tokens,
        has_unused=True,
    ),
    Entry("mambapy Mamba", mamba, tokens),
    Entry("pytorch-crf CRF, BiLSTM", crf, tagged),
    Entry("snntorch Leaky", spiking, images),
]  # fmt: skip

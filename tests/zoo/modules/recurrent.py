"""Recurrent networks: xLSTM, minGRU, liquid networks of ncps, spikingjelly."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal
from tests.zoo.modules.sequences import TOKENS, WORDS, predicts, tokens

IMPORTS = ["xlstm", "minGRU_pytorch", "ncps.torch", "spikingjelly.activation_based"]


def xlstm(slstm_at: list[int]) -> Any:
    def build() -> Any:
        from xlstm import (
            FeedForwardConfig,
            mLSTMBlockConfig,
            mLSTMLayerConfig,
            sLSTMBlockConfig,
            sLSTMLayerConfig,
            xLSTMLMModel,
            xLSTMLMModelConfig,
        )

        config = xLSTMLMModelConfig(
            mlstm_block=mLSTMBlockConfig(
                mlstm=mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
            ),
            slstm_block=sLSTMBlockConfig(
                slstm=sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=4),
                feedforward=FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
            ),
            context_length=TOKENS - 1, num_blocks=4, embedding_dim=16, slstm_at=slstm_at,
            vocab_size=WORDS,
        )  # fmt: skip
        return Trained(xLSTMLMModel(config), predicts)

    return build


def min_gru() -> Any:
    from minGRU_pytorch.minLM import minLM

    return Trained(
        minLM(num_tokens=WORDS, dim=16, depth=4), lambda net, batch: net(batch, return_loss=True)
    )


def series(number: int) -> Any:
    return normal(number, ROWS, 6, 3), normal(number + 1, ROWS, 6, 2)


class Liquid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from ncps.torch import LTC, CfC
        from ncps.wirings import AutoNCP

        self.first = CfC(3, 12)
        self.second = LTC(12, AutoNCP(12, 2))

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(values)[0])[0]
        return found


def liquid() -> Any:
    return Trained(Liquid(), lambda net, batch: functional.mse_loss(net(batch[0]), batch[1]))


class Spikes(nn.Module):
    """A network of spikingjelly over some time steps, whose neurons are reset before each batch."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import functional as steps
        from spikingjelly.activation_based import layer, neuron, surrogate

        self.steps = steps
        self.layers = nn.Sequential()
        for _ in range(4):
            self.layers.append(layer.Linear(8, 8))
            self.layers.append(neuron.LIFNode(surrogate_function=surrogate.ATan(), tau=2.0))
        steps.set_step_mode(self, "m")

    def forward(self, values: Tensor) -> Any:
        self.steps.reset_net(self)
        return self.layers(values.unsqueeze(0).repeat(4, 1, 1)).mean(0)


def rows(number: int) -> Any:
    return 3 * normal(number, ROWS, 8), integers(number, 8, ROWS)


def spikes() -> Any:
    return Trained(Spikes(), lambda net, batch: functional.cross_entropy(net(batch[0]), batch[1]))


ENTRIES = [
    Entry("xlstm xLSTMLMModel", xlstm([1]), tokens),
    Entry("xlstm mLSTM alone", xlstm([]), tokens, module="xLSTMLMModel"),
    Entry("minGRU_pytorch minLM", min_gru, tokens),
    Entry("ncps CfC, LTC", liquid, series),
    Entry("spikingjelly LIFNode", spikes, rows),
]

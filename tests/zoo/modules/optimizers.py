"""Optimizers of other packages, each with a small transformer for sequences of numbers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, normal

IMPORTS = ["prodigyopt", "pytorch_optimizer", "schedulefree", "bitsandbytes"]


class Net(nn.Module):
    """Four layers of a transformer, in double precision for SOAP: it scales rounding up.

    Without biases: the gradient of a key's is rounding alone, of which Lion takes the sign.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, bias=False)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)
        self.double()

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.out(self.encoder(self.into(values)))
        return found


def batch(number: int) -> Any:
    return normal(number, ROWS, 5, 6).double(), normal(number + 1, ROWS, 5, 3).double()


def fits(net: Any, batch: Any) -> Any:
    values, wanted = batch
    return functional.mse_loss(net(values), wanted)


def trained(optimizer: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: Trained(Net(), fits, optimizer)


def prodigy(found: Any) -> Any:
    from prodigyopt import Prodigy

    return Prodigy(found, lr=1.0, d0=1e-4)


def of_pytorch_optimizer(name: str, **options: Any) -> Callable[[Any], Any]:
    def build(found: Any) -> Any:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(found, **options)

    return build


def eight_bits(found: Any) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(found, lr=1e-3, min_8bit_size=256)


class ScheduleFree(Trained):
    """Switches the optimizer as its README does."""

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_train_epoch_end(self) -> None:
        self.optimizers().eval()


def schedule_free() -> Any:
    def build(found: Any) -> Any:
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree(found, lr=1e-2)

    return ScheduleFree(Net(), fits, build)


ENTRIES = [
    Entry("prodigyopt Prodigy", trained(prodigy), batch),
    Entry("schedulefree AdamWScheduleFree", schedule_free, batch),
    *(
        Entry(f"pytorch-optimizer {name}", trained(of_pytorch_optimizer(name, **options)), batch)
        for name, options in {
            "SOAP": {"lr": 1e-3, "precondition_frequency": 2},
            "LARS": {"lr": 0.1},
            "Lamb": {"lr": 1e-2},
            "Lion": {"lr": 1e-3},
            "AdaBelief": {"lr": 1e-3},
            "CAME": {"lr": 1e-3},
            "GaLore": {"lr": 1e-3},
            "Adan": {"lr": 1e-3},
            "StableAdamW": {"lr": 1e-3},
        }.items()
    ),
    Entry("bitsandbytes AdamW8bit", trained(eight_bits), batch),
]

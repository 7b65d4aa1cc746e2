"""Optimizers of other packages, each with a small transformer for sequences of numbers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, normal

IMPORTS = ["prodigyopt", "pytorch_optimizer", "schedulefree", "bitsandbytes"]


class Net(nn.Module):
    """Four layers of a transformer.

    Without biases: the gradient of a key's is rounding alone, of which Lion takes the sign.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, bias=False)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.out(self.encoder(self.into(values)))
        return found


class Square(nn.Module):
    """Square matrices, each with more rows of input than columns.

    SOAP turns to the eigenvectors of what it has seen; of a matrix without full rank, which of them
    it takes is a matter of rounding, and so is what it trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        for each in self.layers:
            values = values + each(values).tanh()
        return values[..., :3] + values[..., 3:]


def batch(number: int) -> Any:
    return normal(number, ROWS, 5, 6), normal(number + 1, ROWS, 5, 3)


def fits(net: Any, batch: Any) -> Any:
    values, wanted = batch
    return functional.mse_loss(net(values), wanted)


def trained(
    optimizer: Callable[[Any], Any], net: Callable[[], nn.Module] = Net
) -> Callable[[], Any]:
    return lambda: Trained(net(), fits, optimizer)


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
    Entry(
        "pytorch-optimizer SOAP",
        trained(of_pytorch_optimizer("SOAP", lr=1e-3, precondition_frequency=2), Square),
        batch,
    ),
    Entry("bitsandbytes AdamW8bit", trained(eight_bits), batch),
]

"""neuraloperator: operators between functions on grids; e3nn: equivariant networks."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, normal

IMPORTS = ["neuralop.models", "e3nn.o3"]


def grids(number: int) -> Any:
    return normal(number, ROWS, 1, 8, 8), normal(number + 1, ROWS, 1, 8, 8)


def fits(net: Any, batch: Any) -> Any:
    values, wanted = batch
    return functional.mse_loss(net(values), wanted)


def fno() -> Any:
    from neuralop.models import FNO

    net = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=4)
    return Trained(net, fits)


def equivariant() -> Any:
    from e3nn import o3
    from e3nn.nn import Gate

    class Layer(nn.Module):
        def __init__(self, before: Any, scalars: Any, gates: Any, gated: Any) -> None:
            super().__init__()
            self.gate = Gate(scalars, [functional.silu], gates, [functional.sigmoid], gated)
            self.product = o3.FullyConnectedTensorProduct(before, before, self.gate.irreps_in)

        def forward(self, values: Tensor) -> Any:
            return self.gate(self.product(values, values))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = o3.Irreps("8x0e + 4x1o")
            self.into = o3.Linear(o3.Irreps("4x0e + 2x1o"), inner)
            self.layers = nn.ModuleList(
                Layer(inner, o3.Irreps("8x0e"), o3.Irreps("4x0e"), o3.Irreps("4x1o"))
                for _ in range(4)
            )
            self.out = o3.Linear(inner, o3.Irreps("1x0e"))

        def forward(self, values: Tensor) -> Any:
            values = self.into(values)
            for each in self.layers:
                values = values + 0.1 * each(0.3 * values)
            return self.out(values)

    return Trained(Net(), fits)


def vectors(number: int) -> Any:
    return normal(number, ROWS, 10), normal(number + 1, ROWS, 1)


ENTRIES = [
    Entry("neuraloperator FNO", fno, grids),
    Entry("e3nn FullyConnectedTensorProduct", equivariant, vectors),
]

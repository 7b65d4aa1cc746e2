"""An entry of the zoo: a published module, its batches, and how it has to be run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

STEPS = 4
DATA_SIZE = 2
ROWS = 4

RATE = 0.05


@dataclass(frozen=True)
class Entry:
    """A published module, small."""

    name: str
    build: Callable[[], LightningModule]
    """Returns the module; every rank calls it, after seeding."""
    batch: Callable[[int], Any]
    """Returns the batch of a number."""
    module: str = ""
    """The published class, if it is not ``name``."""
    is_shared_batch: bool = False
    """All data ranks get the same batches: the step writes state, or one process cannot accumulate.

    Otherwise each gets its own, and one process averages the gradients of all.
    """
    microbatches: int = 2
    """1 where a microbatch has other statistics than its batch, as with batch norm."""
    has_unused: bool = False
    """A step does not use all parameters; DDP has to be told."""
    draws: bool = False
    """The step draws random numbers, which are then the same in every row."""
    in_context: bool = False
    """The module attends along a sequence, so that ``bolt_context`` is tried."""
    without_gradient: tuple[str, ...] = ()
    """Parameters whose gradient is zero but for rounding, which Adam scales up: not compared."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the Trainer."""


class Trained(LightningModule):
    """Trains a network that is no LightningModule by a loss of its output, with SGD."""

    def __init__(
        self,
        net: torch.nn.Module,
        loss: Callable[[torch.nn.Module, Any], Tensor],
        optimizer: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = net.train()
        self.step_loss = loss
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step_loss(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer is not None:
            return self.optimizer(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


def generator(number: int) -> torch.Generator:
    """Return the generator of a batch."""
    return torch.Generator().manual_seed(1000 + number)


def normal(number: int, *shape: int) -> Tensor:
    """Return normal numbers for a batch."""
    return torch.randn(*shape, generator=generator(number))


def integers(number: int, high: int, *shape: int) -> Tensor:
    """Return integers below ``high`` for a batch."""
    return torch.randint(high, shape, generator=generator(number))


def _table(shape: tuple[int, ...], like: Any, *, rows: int = 1) -> Tensor:
    """Return numbers in (0, 1) that are the same in every row, whatever the number of rows."""
    shape = tuple(int(each) for each in shape)
    if len(shape) < 2:
        return torch.full(shape, 0.37, **like)
    count = 1
    for each in shape[1:]:
        count *= each
    numbers = torch.frac(torch.arange(count, dtype=torch.float32) * 0.6180339887 + 0.11)
    numbers = numbers.clamp(0.01, 0.99).view(1, *shape[1:])
    return numbers.expand(shape).to(**like).clone()


def _shape(size: tuple[Any, ...], named: Any = None) -> tuple[int, ...]:
    if named is not None:
        return tuple(named)
    if len(size) == 1 and not isinstance(size[0], int):
        return tuple(size[0])
    return tuple(size)


def _like(tensor: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
    like = {key: options[key] for key in ("dtype", "device") if options.get(key) is not None}
    if tensor is not None:
        like = {"dtype": tensor.dtype, "device": tensor.device} | like
    return like


def _normal_from(uniform: Tensor) -> Tensor:
    return torch.special.ndtri(uniform.float()).to(uniform.dtype)


@contextmanager
def even_draws() -> Iterator[None]:
    """Within the block every row of a random tensor has the same numbers.

    One process and a pipeline of microbatches then draw the same: how many rows a draw has is all
    that differs between them.
    """

    def rand(*size: Any, **options: Any) -> Tensor:
        return _table(_shape(size, options.get("size")), _like(None, options))

    def rand_like(tensor: Tensor, **options: Any) -> Tensor:
        return _table(tuple(tensor.shape), _like(tensor, options))

    def randn(*size: Any, **options: Any) -> Tensor:
        return _normal_from(rand(*size, **options))

    def randn_like(tensor: Tensor, **options: Any) -> Tensor:
        return _normal_from(rand_like(tensor, **options))

    def randint(low: int, high: Any = None, size: Any = None, **options: Any) -> Tensor:
        if not isinstance(high, int):
            low, high, size = 0, low, high if size is None else size
        like = {"dtype": torch.int64} | _like(None, options)
        share = _table(_shape((size,)), {key: like[key] for key in like if key != "dtype"})
        return (low + (share * (high - low)).floor()).to(like["dtype"])

    def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
        if size is not None:
            return mean + std * randn(*size, **options)
        return mean + std * randn_like(mean if isinstance(mean, Tensor) else std)

    def bernoulli(share: Tensor, **options: Any) -> Tensor:
        return (rand_like(share) < share).to(share.dtype)

    with (
        mock.patch.multiple(
            torch, rand=rand, rand_like=rand_like, randn=randn, randn_like=randn_like,
            randint=randint, normal=normal, bernoulli=bernoulli,
        ),
        mock.patch("torch.distributions.utils._standard_normal", _standard_normal),
        mock.patch("torch.distributions.normal._standard_normal", _standard_normal),
    ):  # fmt: skip
        yield


def _standard_normal(shape: Any, dtype: Any, device: Any) -> Tensor:
    return _normal_from(_table(tuple(shape), {"dtype": dtype, "device": device}))

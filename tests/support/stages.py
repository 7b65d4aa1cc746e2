"""Small stages whose boundaries carry everything that a boundary can carry."""

import torch
from torch import Tensor, nn

from boltmesh.strategies.pipeline.runtime.stage import ValueSpec

WIDTH = 6


class Piece(nn.Module):
    """One stage of a toy model.

    Its boundary carries a transposed activation, a skip that is handed on as it is, an offset that
    depends on parameters alone, a view of complex numbers, a frozen output that is expanded, a
    mask, a number and nothing.
    """

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.index, self.num_stages = index, num_stages
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.twice = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4)
        self.table = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.batches = 0

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.batches += 1
        transposed, skip, offset, wave, still, mask, number, nothing = values
        x = transposed.T
        x = torch.tanh(x @ self.twice) + self.linear(x) + offset + still[:1]
        x = self.norm(x * torch.where(mask, 0.5, 1.0)) @ self.twice + 0.1 * number
        wave = (wave * self.turn).conj()
        x = x + wave.real
        still = self.frozen(torch.ones(1, WIDTH, dtype=torch.float64)).expand(len(x), WIDTH)
        return x.T, skip, 2 * self.table, wave, still, ~mask, number + 1, nothing

    def loss(self, values: tuple[Tensor, ...]) -> Tensor:
        transposed, skip, offset, wave, still, mask, number, _ = values
        x = transposed.T * skip + offset + still
        return (x.square() * mask).sum() / 50 + wave.abs().sum() / 30 + number


def first_values(size: int, microbatch: int) -> tuple[Tensor, ...]:
    """What goes into the first piece."""
    generator = torch.Generator().manual_seed(microbatch)
    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return (
        x.T,
        x + 1,
        x[0],
        torch.complex(x, -x),
        x,
        x[:, :1] > 0,
        torch.tensor(microbatch),
        torch.empty(0, 3),
    )


def boundary(size: int, index: int) -> tuple[ValueSpec, ...]:
    """What crosses the boundary before piece ``index``."""
    f64, at = torch.float64, f"of piece {index - 1}"
    return (
        ValueSpec((WIDTH, size), f64, True, f"activation {at}"),
        # Skips come from the batch in piece 0, which trains nothing of them.
        ValueSpec((size, WIDTH), f64, False, f"skip {at}"),
        ValueSpec((WIDTH,), f64, True, f"offset {at}"),
        ValueSpec((size, WIDTH), torch.complex128, True, f"wave {at}"),
        ValueSpec((size, WIDTH), f64, False, f"still {at}"),
        ValueSpec((size, 1), torch.bool, False, f"mask {at}"),
        ValueSpec((), torch.int64, False, f"number {at}"),
        ValueSpec((0, 3), torch.float32, False, f"nothing {at}"),
    )


class PieceStage:
    """A piece as the executor sees it.

    Args:
        piece: Of the model.
        sizes: Rows of each microbatch.
    """

    def __init__(self, piece: Piece, sizes: tuple[int, ...]) -> None:
        self.piece, self.sizes = piece, sizes
        self.index = piece.index
        self.is_first = piece.index == 0
        self.is_last = piece.index == piece.num_stages - 1

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return () if self.is_first else boundary(self.sizes[microbatch], self.index)

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return () if self.is_last else boundary(self.sizes[microbatch], self.index + 1)

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = received or first_values(self.sizes[microbatch], microbatch)
        values = self.piece(given)
        return (self.piece.loss(values),) if self.is_last else values


def whole_model(num_stages: int, sizes: tuple[int, ...], times: int) -> list[Piece]:
    """Train all pieces in one process; their gradients are what a pipeline has to have."""
    pieces = [Piece(index, num_stages) for index in range(num_stages)]
    for _ in range(times):
        for microbatch, size in enumerate(sizes):
            values = first_values(size, microbatch)
            for piece in pieces:
                values = piece(values)
            pieces[-1].loss(values).backward()
    return pieces

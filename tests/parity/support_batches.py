"""Data that the modules of ``support`` train on: tuples, dictionaries, lists, streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, WeightedRandomSampler

ROWS, BATCH = 48, 8


class Tokens(Dataset[Any]):
    """Texts in which each token follows from the one before it; as a tuple, a dict or a list."""

    def __init__(self, kind: str = "tuple", rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(3)
        starts = torch.randint(13, (rows, 1), generator=generator)
        self.tokens, self.kind = (starts * 3 ** torch.arange(7)) % 13, kind

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        tokens, targets = self.tokens[index, :-1], self.tokens[index, 1:]
        return {"tokens": tokens, "targets": targets} if self.kind == "dict" else (tokens, targets)


class Stream(IterableDataset[Any]):
    """The same texts one after the other; each data rank takes every second one."""

    def __init__(self, share: int, shares: int) -> None:
        self.share, self.shares, self.tokens = share, shares, Tokens()

    def __iter__(self) -> Iterator[Any]:
        return (self.tokens[row] for row in range(self.share, ROWS, self.shares))


@dataclass
class Pair:
    """A batch as a dataclass."""

    tokens: Tensor
    targets: Tensor


class Custom:
    """A batch of a class that torch knows nothing of."""

    def __init__(self, tokens: Tensor, targets: Tensor) -> None:
        self.tokens, self.targets = tokens, targets


def collate(kind: str, rows: list[Any]) -> Any:
    tokens, targets = (torch.stack([row[index] for row in rows]) for index in (0, 1))
    if kind == "lists":
        return {"tokens": [row[0] for row in rows], "targets": targets, "nothing": None}
    return (Pair if kind == "dataclass" else Custom)(tokens, targets)


def loader_of(kind: str, *, share: int, shares: int, rows: int) -> Any:
    size = BATCH // shares
    if kind == "stream":
        return DataLoader(Stream(share, shares), batch_size=size)
    tokens = Tokens("dict" if kind == "dict" else "tuple", rows)
    # As Lightning's sampler does where it does not shuffle.
    data = tokens if kind == "sampler" else Subset(tokens, range(share, rows, shares))
    if kind == "two":
        return {name: DataLoader(data, batch_size=size) for name in "ab"}
    if kind == "sampler":
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            data,
            batch_size=size,
            sampler=WeightedRandomSampler([1.0] * rows, rows, generator=generator),
        )
    if kind in {"lists", "dataclass", "custom"}:
        return DataLoader(data, batch_size=size, collate_fn=partial(collate, kind))
    return DataLoader(data, batch_size=size)

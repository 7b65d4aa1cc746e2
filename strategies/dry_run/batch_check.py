"""A short number by which ranks that share one model see that they have the same batch.

In a pipeline, stage 0 computes with the inputs of a batch and the last stage with its targets; in a
tensor group each rank computes its heads: each from the copy that its own DataLoader gave it.
Copies that differ train on nonsense without a word: random crops, masks or mixtures drawn apart, an
order of the data that depends on the rank. So every rank tells a digest of what it has, and they
are compared before anything is sent.

Sees to it that the ranks of a tensor group have the same batch, before they compute with it.

Each rank computes some heads of every token; with another batch on one of them all train on
nonsense, without a word. A digest of each batch is compared while the batch is transferred.
"""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from boltmesh.errors import ConfigError
from boltmesh.strategies.pytree import is_constant_list, leaves

MOST_ELEMENTS: Final = 1024
"""Of a tensor that are looked at: where one in a hundred differs, all but one in 30,000 batches
are told apart by one tensor alone."""

_TAKEN: Final = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""What torch can take elements out of."""

_MOST_TOLD: Final = 12
_GOLDEN: Final = 0.6180339887498949


@dataclass(frozen=True)
class BatchDigest:
    """What a rank says of its batch."""

    number: int = 0
    """Positive and below 2**56; 0 where nothing is said."""
    text: str = ""
    """What it looks like, for messages."""
    is_last: bool = False
    """Whether the rank's loader gives no batch after it."""


def batch_digest(batch: Any, *, is_last: bool = False) -> BatchDigest:
    """Return the digest of a batch.

    All shapes, types, strings and numbers count, and a sample of the elements of tensors on the
    CPU: no device is waited for, so of tensors that are elsewhere only the shape is known.

    Args:
        batch: As the DataLoader gave it.
        is_last: Whether the loader has no more.
    """
    hasher = hashlib.blake2b(b"last" if is_last else b"", digest_size=7)
    told: list[str] = []
    for path, leaf in leaves(batch):
        text = f"{path.removeprefix('batch')} {_describe(leaf)}".strip()
        told.append(text)
        hasher.update(text.encode())
        hasher.update(_contents(leaf))
    shown = ", ".join(told[:_MOST_TOLD]) + (", ..." if len(told) > _MOST_TOLD else "")
    return BatchDigest(int.from_bytes(hasher.digest(), "big") | 1, shown, is_last)


def explain_difference(told: Mapping[int, BatchDigest], *, group: str = "pipeline") -> str:
    """Say how batches differ, and what to do.

    Args:
        told: By global rank what each has; at least two differ.
        group: What the ranks are that should have the same, in a word or two.
    """
    (first, mine), *others = told.items()
    rank, other = next(each for each in others if each[1].number != mine.number)
    if mine.is_last != other.is_last:
        last, longer = (first, rank) if mine.is_last else (rank, first)
        how = (
            f"The data of rank {last} ends with this batch, and rank {longer} has more: every rank "
            f"of a {group} has to get the same number of batches."
        )
    elif mine.text != other.text:
        how = f"Rank {first} has a batch of {mine.text}, and rank {rank} one of {other.text}."
    else:
        how = f"Ranks {first} and {rank} have batches of the same shapes with other values."
    return (
        f"{how} All ranks of a {group} have to get the same batch, because each computes a part of "
        f"what is made of it. Take care that a dataset, sampler or collate_fn does not look at the "
        f"rank or the time, that it draws random numbers from the generators of torch, numpy or "
        f"random, and that no callback draws from these on one rank alone."
    )


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape}"
    if isinstance(leaf, list | tuple):
        return f"{len(leaf)} items"
    return type(leaf).__name__


def _contents(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return _sample(leaf)
    if isinstance(leaf, np.ndarray):
        return repr(leaf.tolist()).encode() if leaf.dtype == object else _sample(_as_tensor(leaf))
    if isinstance(leaf, str | bytes | int | float | complex | bool) or is_constant_list(leaf):
        return repr(leaf).encode()
    return b""


def _as_tensor(array: "np.ndarray[Any, Any]") -> Tensor:
    """Return the bytes of an array, of whatever type."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of some elements, spread over the tensor in no regular distance."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return b""
    tensor = tensor.detach()
    if tensor.dtype not in _TAKEN:
        tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
    if tensor.numel() > MOST_ELEMENTS:
        tensor = tensor.take(_positions(tensor.numel()))
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@functools.lru_cache(maxsize=256)
def _positions(count: int) -> Tensor:
    # Multiples of the golden ratio: a regular distance may be that of a row, and see one column.
    steps = torch.arange(1, MOST_ELEMENTS + 1, dtype=torch.float64) * _GOLDEN
    return ((steps % 1.0) * count).long().clamp_(max=count - 1)


BYTES_PER_RANK = torch.int64.itemsize
"""Of the question that is asked for each batch."""


class _PendingCheck(NamedTuple):
    batch: Any
    """As the step will get it, by identity."""
    digest: BatchDigest
    row: torch.Tensor
    """A number of each rank, 0-filled by the others."""
    work: Work | None


class SameBatchCheck:
    """The questions of one tensor group.

    Args:
        group: Its ranks, on the CPU and of its own, so that no kernel is waited for.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._asked: _PendingCheck | None = None

    def ask(self, batch: Any, digest: BatchDigest) -> None:
        """Begin to compare a batch. Collective over the group.

        Args:
            batch: As the step will get it.
            digest: What it was where its values could be read without waiting.
        """
        row = torch.zeros(self._group.size(), dtype=torch.int64)
        row[self._group.rank()] = digest.number
        work = dist.all_reduce(row, group=self._group, async_op=True)
        self._asked = _PendingCheck(batch, digest, row, work)

    def settle(self, batch: Any) -> None:
        """Wait for the answer, before a step with the batch. Collective over the group.

        Raises:
            ConfigError: On all ranks, when they have different batches.
        """
        if self._asked is None or self._asked.batch is not batch:
            self.ask(batch, batch_digest(batch))  # a step that was given another one
        question, self._asked = self._asked, None
        assert question is not None
        if question.work is not None:
            question.work.wait()
        if len(set(question.row.tolist())) > 1:
            raise ConfigError(self._explain(question.digest))

    def _explain(self, digest: BatchDigest) -> str:
        told: list[BatchDigest] = [BatchDigest()] * self._group.size()
        dist.all_gather_object(told, digest, group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        return explain_difference(dict(zip(ranks, told, strict=True)), group="tensor group")

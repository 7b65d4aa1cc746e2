"""Checks by a digest that ranks which share one model have the same batch.

In a pipeline, stage 0 computes with the inputs of a batch and the last stage with its targets; in a
tensor group each rank computes some heads of every token. Each uses the copy from its own
DataLoader. Copies that differ train on nonsense and raise no error: random crops, masks or mixtures
drawn per rank, an order of the data that depends on the rank. So the ranks compare a digest of
their batch before they send anything: a pipeline in its handshake (``runtime/handshake.py``), a
tensor group while the batch is transferred (``SameBatchCheck``).
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
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.pytree import is_constant_list, leaves

MOST_ELEMENTS: Final = 1024
"""Number of sampled elements of a tensor. If one in a hundred differs, one tensor alone
distinguishes all but one in 30,000 batches."""

_TAKE_DTYPES: Final = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""The dtypes for which torch implements ``Tensor.take``."""

_MOST_SHOWN: Final = 12
_GOLDEN: Final = 0.6180339887498949


@dataclass(frozen=True)
class BatchDigest:
    """Digest of one rank's batch."""

    number: int = 0
    """Positive and below 2**56; 0 if the rank does not take part."""
    text: str = ""
    """Shapes and dtypes, for errors."""
    is_last: bool = False
    """Whether it is the last batch of the rank's loader."""


def batch_digest(batch: Any, *, is_last: bool = False) -> BatchDigest:
    """Return the digest of a batch.

    It covers all shapes, dtypes, strings and numbers, and a sample of the elements of tensors on
    the CPU. It does not wait for a device, so it covers only shape and dtype of other tensors.

    Args:
        batch: The DataLoader's batch; tensors may have any shape and dtype.
        is_last: Whether it is the last one of the loader.
    """
    hasher = hashlib.blake2b(b"last" if is_last else b"", digest_size=7)
    texts: list[str] = []
    for path, leaf in leaves(batch):
        text = f"{path.removeprefix('batch')} {_describe(leaf)}".strip()
        texts.append(text)
        hasher.update(text.encode())
        hasher.update(_contents(leaf))
    shown = ", ".join(texts[:_MOST_SHOWN]) + (", ..." if len(texts) > _MOST_SHOWN else "")
    return BatchDigest(int.from_bytes(hasher.digest(), "big") | 1, shown, is_last)


def explain_difference(batches: Mapping[int, BatchDigest], *, group: str = "pipeline") -> str:
    """Return the error for ranks whose batches differ.

    Args:
        batches: Digests by global rank; at least two differ.
        group: Kind of the group, for the error.
    """
    (first, mine), *others = batches.items()
    rank, other = next((rank, batch) for rank, batch in others if batch.number != mine.number)
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
        f"the result. Check that a dataset, sampler or collate_fn does not depend on the rank or "
        f"the time, that it draws random numbers from the generators of torch, numpy or random, "
        f"and that no callback draws from these on one rank alone."
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
    """Return the bytes of an array of any dtype, shape ``(num_bytes,)``, uint8."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of some elements, at irregular distances over the tensor."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return b""
    tensor = tensor.detach()
    if tensor.dtype not in _TAKE_DTYPES:
        tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
    if tensor.numel() > MOST_ELEMENTS:
        tensor = tensor.take(_positions(tensor.numel()))
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@functools.lru_cache(maxsize=256)
def _positions(count: int) -> Tensor:
    # Multiples of the golden ratio: a regular distance may be the row length and sample a column.
    steps = torch.arange(1, MOST_ELEMENTS + 1, dtype=torch.float64) * _GOLDEN
    return ((steps % 1.0) * count).long().clamp_(max=count - 1)


BYTES_PER_RANK = torch.int64.itemsize
"""Bytes per rank that ``SameBatchCheck`` moves for each batch."""


class _PendingCheck(NamedTuple):
    batch: Any
    """The object that the step will get."""
    digest: BatchDigest
    row: torch.Tensor
    """Digest numbers by rank, shape ``(R,)``, int64; summed over the ranks."""
    work: Work | None


class SameBatchCheck:
    """Compares each batch within a group of ranks that share it.

    Args:
        group: Its ranks in a separate group on the CPU, so that it waits for no kernel.
        name: Kind of the group, for errors.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._group = group
        self._name = name
        self._pending: _PendingCheck | None = None

    def start(self, batch: Any, digest: BatchDigest) -> None:
        """Begin to compare a batch. Collective over the group.

        Args:
            batch: The batch for the step.
            digest: Its digest, computed where a read does not wait for a device.
        """
        row = torch.zeros(self._group.size(), dtype=torch.int64)
        row[self._group.rank()] = digest.number
        work = dist.all_reduce(row, group=self._group, async_op=True)
        self._pending = _PendingCheck(batch, digest, row, work)

    def wait(self, batch: Any) -> None:
        """Wait for the result, before a step with the batch. Collective over the group.

        Raises:
            ConfigError: The ranks have different batches; on all of them.
        """
        if self._pending is None or self._pending.batch is not batch:
            self.start(batch, batch_digest(batch))  # the step got another batch
        pending, self._pending = self._pending, None
        assert pending is not None
        if pending.work is not None:
            pending.work.wait()
        if len(set(pending.row.tolist())) > 1:
            raise ConfigError(self._explain(pending.digest))

    def _explain(self, digest: BatchDigest) -> str:
        digests = gather_objects(digest, self._group)
        ranks = dist.get_process_group_ranks(self._group)
        return explain_difference(dict(zip(ranks, digests, strict=True)), group=self._name)

"""Averages gradients that are all there, in flat buckets of a bounded size."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

_IN_FLIGHT = 2
"""Buckets under way at once: one is filled or emptied while the other is reduced."""


@dataclass
class _Reduction:
    work: Work | None
    flat: Tensor
    members: Sequence[Tensor]
    """What ``flat`` is copied into; empty where it is the gradient itself."""


def divide_into_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Return tensors in their order, in groups of one type and at most ``bucket_bytes``.

    One that is larger by itself is alone. Equal shapes and types make equal buckets on all ranks.
    """
    buckets: list[list[Tensor]] = []
    room = 0
    for each in tensors:
        size = each.numel() * each.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != each.dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(each)
        room -= size
    return buckets


@torch.no_grad()
def average(gradients: Sequence[Tensor], group: ProcessGroup, bucket_bytes: int) -> None:
    """Replace gradients by their averages over a group, in place. Collective.

    As ``DistributedDataParallel`` does it: each rank's are divided, then added up.

    Args:
        gradients: Of equal shapes and types on all ranks.
        group: The ranks.
        bucket_bytes: How much goes in one message.
    """
    under_way: deque[_Reduction] = deque()
    for bucket in divide_into_buckets(gradients, bucket_bytes):
        if len(under_way) == _IN_FLIGHT:
            _finish(under_way.popleft())
        under_way.append(_begin(bucket, group))
    while under_way:
        _finish(under_way.popleft())


def _begin(bucket: Sequence[Tensor], group: ProcessGroup) -> _Reduction:
    is_flat = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0] if is_flat else torch.cat([each.reshape(-1) for each in bucket])
    members = () if is_flat else tuple(bucket)
    flat.div_(group.size())
    return _Reduction(dist.all_reduce(flat, group=group, async_op=True), flat, members)


def _finish(reduction: _Reduction) -> None:
    if reduction.work is not None:
        reduction.work.wait()
    for member, part in zip(reduction.members, _parts(reduction), strict=True):
        member.copy_(part)


def _parts(reduction: _Reduction) -> Iterator[Tensor]:
    at = 0
    for member in reduction.members:
        yield reduction.flat[at : at + member.numel()].view(member.shape)
        at += member.numel()

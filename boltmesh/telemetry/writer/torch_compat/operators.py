"""The operators of torch that move data between ranks, and the meaning of their arguments."""

from typing import Any, Final

import torch
import torch.distributed as dist

PAYLOAD: Final[dict[str, int | None]] = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "broadcast_": 0,
    "reduce_": 0,
    "send": 0,
    "recv_": 0,
    "recv_any_source_": 0,
    "allgather_": 0,
    "_allgather_base_": 0,
    "allgather_coalesced_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
    "gather_": 1,
    "scatter_": 1,
    "barrier": None,
    "monitored_barrier_": None,
}
"""Operator to the argument whose size is the payload: the full side of gathers and scatters.

None where nothing but a signal moves.
"""
if hasattr(torch.ops.c10d, "gather_into_tensor_"):  # from torch 2.14 on
    PAYLOAD["gather_into_tensor_"] = 1

PEER_ARGUMENTS: Final[dict[str, str | None]] = {
    "send": "dst",
    "recv_": "src",
    "recv_any_source_": None,
}
"""Point-to-point operator to the argument that is the peer, as a rank within the group.

None where the peer is known only once the caller has waited.
"""

UNTIMED: Final = frozenset({*PEER_ARGUMENTS, "monitored_barrier_"})
"""Operators whose work has no future, on any backend."""

ANY_SOURCE: Final = -1
"""The peer of a receive from any source."""


def payload_bytes(value: Any) -> int:
    """Return the bytes of a tensor or of nested lists of tensors."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return value.nbytes
        return value._indices().nbytes + value._values().nbytes
    total = 0
    for each in value:
        total += payload_bytes(each)
    return total


def group_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the members of a group by global rank; nothing for one that torch does not know."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):  # made from its parts, and never registered
        return []


def lies_on_host(args: tuple[Any, ...]) -> bool:
    """Tell whether the arguments of an operator lie in host memory."""
    for value in args[:2]:  # one of the two can be empty: what this rank neither sends nor gets
        first = value
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            return first.is_cpu
    return False


def uncounted_operators() -> list[str]:
    """Return the operators of this torch that move data in a group and are not counted."""
    names = sorted(
        name.removeprefix("c10d::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d::")
    )
    return [
        name
        for name in names
        if name not in PAYLOAD
        and any(
            each.name == "process_group"
            for each in getattr(torch.ops.c10d, name).default._schema.arguments
        )
    ]

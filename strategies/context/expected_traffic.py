"""Expected traffic of a context group: the collectives of one step, counted on fake tensors."""

from collections.abc import Mapping

from boltmesh.strategies.dry_run.batch_check import BYTES_PER_RANK
from boltmesh.strategies.tensor.expected_traffic import OperatorTraffic
from boltmesh.telemetry.traffic import ExpectedTraffic

_WHY = {
    "allreduce": "sums over the sequence and their gradients, digests of batches",
    "alltoall_base": "keys of attention and gathered positions, and their gradients",
}


def expected_context_traffic(
    counted: Mapping[str, OperatorTraffic], *, size: int, accumulated: int
) -> list[ExpectedTraffic]:
    """Return the collectives of one optimizer step on one rank.

    Args:
        counted: Traffic of one batch by operator; batches of other lengths move other bytes.
        size: Ranks of the context group.
        accumulated: Batches per optimizer step.
    """
    digest = OperatorTraffic(BYTES_PER_RANK * size, 1)
    found = {"allreduce": OperatorTraffic(0, 0), **counted}
    own = found["allreduce"]
    found["allreduce"] = OperatorTraffic(own.num_bytes + digest.num_bytes, own.calls + digest.calls)
    return [
        ExpectedTraffic(
            axis="context",
            operator=operator,
            payload_bytes=float(each.num_bytes * accumulated),
            calls=float(each.calls * accumulated),
            why=_WHY.get(operator, "positions of the sequence"),
        )
        for operator, each in found.items()
    ]

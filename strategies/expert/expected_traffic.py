"""Bytes that exchanges of rows move in an optimizer step, if all experts are as likely."""

import math
from collections.abc import Collection, Iterable

from torch.nn import Module

from boltmesh.strategies.expert.divided import DividedExperts
from boltmesh.telemetry.traffic import ExpectedTraffic

_NUMBER_BYTES = 8


def expected_rows(num_rows: int, num_experts: int, num_choices: int, size: int) -> float:
    """Rows that a rank sends in a forward pass, to itself too; each once for a rank.

    Args:
        num_rows: Rows of this rank's batch.
        num_experts: Experts of the layer.
        num_choices: Different experts of a row.
        size: Ranks that have all experts together.
    """
    others = num_experts - num_experts // size
    none_there = math.comb(others, num_choices) / math.comb(num_experts, num_choices)
    return num_rows * size * (1 - none_there)


def expected_traffic(
    divided: Iterable[DividedExperts],
    *,
    size: int,
    num_batches: int,
    recomputed: Collection[Module],
) -> list[ExpectedTraffic]:
    """Return what an optimizer step moves on one rank; empty where nothing is divided.

    Args:
        divided: The experts.
        size: Ranks that have all experts together.
        num_batches: Batches of an optimizer step, each like the one that was watched.
        recomputed: Modules whose forward pass runs once more in the backward pass.
    """
    calls, moved = 0, 0.0
    for each in divided:
        passes = 1 + (each.module in recomputed)
        choices = each.num_rows * each.num_choices
        rows = expected_rows(each.num_rows, each.experts.num_experts, each.num_choices, size)
        row_bytes = rows * each.width * each.row_itemsize
        weight_bytes = choices * each.weight_itemsize
        is_weighted = each.experts.kind == "routed"
        counts_bytes = 2 * size * _NUMBER_BYTES
        forward = 2 * row_bytes + weight_bytes + 2 * choices * _NUMBER_BYTES + counts_bytes
        moved += passes * forward + 2 * row_bytes + is_weighted * weight_bytes
        calls += passes * 5 + 2 + is_weighted
    if not calls:
        return []
    why = (
        "rows to the ranks of their experts and back, once for a rank, in both passes; for batches "
        "like the first, as if all experts were as likely"
    )
    return [
        ExpectedTraffic("expert", "alltoall_base", num_batches * moved, num_batches * calls, why)
    ]

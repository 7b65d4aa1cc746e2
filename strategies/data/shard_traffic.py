"""What one optimizer step of a sharded model should move, as telemetry counts it."""

from collections.abc import Iterable

from boltmesh.strategies.planner.layout import Job, Sharing
from boltmesh.strategies.planner.model import ModelShape
from boltmesh.strategies.planner.traffic import NORM_BYTES, estimate_traffic
from boltmesh.telemetry.traffic import ExpectedTraffic

_OPERATORS = {
    "all-gather": "_allgather_base",
    "reduce-scatter": "_reduce_scatter_base",
    "all-reduce": "allreduce",
}
"""The planner's names, and torch's for what ``fully_shard`` calls."""

_GATHERS = {
    1: "each parameter, once per optimizer step",
    2: "each parameter, once per optimizer step",
    3: "each block in the forward and in the backward pass of every batch, the rest once per batch",
}
_REDUCTIONS = {
    1: "each gradient, once per optimizer step",
    2: "each gradient, once per batch",
    3: "each gradient, once per batch",
}


def expected_shard_traffic(
    model: ModelShape,
    sharing: Sharing,
    job: Job,
    *,
    num_norms: int = 0,
    more: Iterable[ExpectedTraffic] = (),
) -> list[ExpectedTraffic]:
    """Return the traffic of one step on the data axis, one entry per operator.

    Args:
        model: What is gathered together.
        sharing: Which stage.
        job: Ranks, types and batches.
        num_norms: How many optimizers' gradients are clipped by their norm.
        more: What is moved beside that on the data axis.
    """
    reasons = {
        "all-gather": _GATHERS[sharing.stage],
        "reduce-scatter": _REDUCTIONS[sharing.stage],
        "all-reduce": "shards of gradients averaged over the copies of the model",
    }
    expected = [
        ExpectedTraffic(
            "data", _OPERATORS[each.operator], each.whole_bytes, each.calls, reasons[each.operator]
        )
        for each in estimate_traffic(model, sharing, job)
        if each.whole_bytes
    ]
    for each in more:
        expected = list(_added(expected, each))
    if num_norms:
        norm = ExpectedTraffic(
            "data", "allreduce", NORM_BYTES * num_norms, num_norms, "the norm to clip by"
        )
        expected = list(_added(expected, norm))
    if model.buffer_bytes and job.num_ranks > 1:
        why = "buffers of the first data rank, before a synchronised forward pass"
        expected.append(ExpectedTraffic("data", "broadcast", model.buffer_bytes, None, why))
    return expected


def _added(expected: Iterable[ExpectedTraffic], more: ExpectedTraffic) -> Iterable[ExpectedTraffic]:
    """Give one entry per operator: where there is one, the sum."""
    is_added = False
    for each in expected:
        if each.operator != more.operator:
            yield each
            continue
        is_added = True
        calls = None if each.calls is None or more.calls is None else each.calls + more.calls
        yield ExpectedTraffic(
            each.axis,
            each.operator,
            each.payload_bytes + more.payload_bytes,
            calls,
            f"{each.why}; {more.why}",
        )
    if not is_added:
        yield more

"""The bytes that a strategy expects of one step, shown beside the measured ones."""

from collections.abc import Iterable
from typing import Final

import msgspec

CONTROL: Final = "control"
"""The axis of small messages by which ranks agree, beside the tensors of a model."""


CHECKPOINTS: Final = "checkpoint"
"""The axis of collectives by which ranks write a checkpoint beside training."""


class ExpectedTraffic(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operator on one axis, in one optimizer step, on one rank."""

    axis: str
    operator: str
    """The ``c10d`` operator without its trailing underscore, for example ``allreduce``."""
    payload_bytes: float
    """Payload, not wire: the size of the tensor that the operator was given (its full side)."""
    calls: float | None
    """None if only the bytes are known beforehand."""
    why: str
    """The formula in words, for example ``gradients of all trainable parameters, once``."""
    is_mean: bool = False
    """Whether a step may move more or less, as the model decides for each batch."""


def added_up(traffic: Iterable[ExpectedTraffic]) -> list[ExpectedTraffic]:
    """Return one entry for each axis and operator, in the order of the first ones."""
    found: dict[tuple[str, str], ExpectedTraffic] = {}
    for each in traffic:
        key = each.axis, each.operator
        if (known := found.get(key)) is None:
            found[key] = each
            continue
        calls = None if known.calls is None or each.calls is None else known.calls + each.calls
        moved = known.payload_bytes + each.payload_bytes
        why = known.why if each.why in known.why else f"{known.why}; {each.why}"
        is_mean = known.is_mean or each.is_mean
        found[key] = ExpectedTraffic(*key, moved, calls, why, is_mean)
    return list(found.values())

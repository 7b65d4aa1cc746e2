"""The bytes that a strategy says one step should move, to be shown beside the measured ones."""

from typing import Final

import msgspec

CONTROL: Final = "control"
"""The axis of what ranks agree on in small messages, beside the tensors of a model."""


CHECKPOINTS: Final = "checkpoint"
"""The axis of collectives by which ranks write a checkpoint beside training."""


class ExpectedTraffic(msgspec.Struct, frozen=True):
    """One operator on one axis, in one optimizer step, on one rank."""

    axis: str
    operator: str
    """The ``c10d`` operator without its trailing underscore, for example ``allreduce``."""
    payload_bytes: float
    """Payload, not wire: the size of the tensor that the operator was given (its full side)."""
    calls: float | None
    """None where only the bytes are known beforehand."""
    why: str
    """The formula in words, for example ``gradients of all trainable parameters, once``."""

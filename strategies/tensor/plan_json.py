"""A plan as text: to send it from the rank that made it, to keep it, and to edit it."""

import msgspec

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.plan import TensorPlan


def to_json(plan: TensorPlan) -> str:
    """Return a plan as JSON."""
    return msgspec.json.encode(plan).decode()


def from_json(text: str | bytes) -> TensorPlan:
    """Return the plan that a text describes.

    Raises:
        ConfigError: When it describes none.
    """
    try:
        return msgspec.json.decode(text, type=TensorPlan)
    except msgspec.DecodeError as error:  # invalid values are among these
        raise ConfigError(
            f"this is no tensor plan: {error}. Make one with to_json(plan)."
        ) from None

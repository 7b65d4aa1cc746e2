"""What a user asks of the tensor axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.planning import LossParallel

UserPlan = Literal["auto"] | Mapping[str, str]


@dataclass(frozen=True)
class TensorOptions:
    """What ``TensorParallelStrategy`` was asked for; see there.

    Raises:
        ConfigError: When an option does not exist.
    """

    size: int | None = None
    plan: UserPlan = "auto"
    sequence_parallel: bool = False
    loss_parallel: LossParallel = "auto"

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size={self.size} holds no rank. Use 2 or more, or leave it out.")
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise ConfigError(
                f"plan={self.plan!r} is neither 'auto' nor a mapping of patterns of parameter "
                f"names to styles, such as {{'*.up.weight': 'column'}}."
            )
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                f"sequence_parallel={self.sequence_parallel!r} is neither true nor false."
            )
        if self.loss_parallel not in {True, False, "auto"}:
            raise ConfigError(
                f"loss_parallel={self.loss_parallel!r} is none of its settings. Use 'auto', true "
                f"or false."
            )

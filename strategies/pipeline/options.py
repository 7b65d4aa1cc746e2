"""What a user may choose about a pipeline, checked before anything is started."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.kinds import check_schedule, schedule_kind
from boltmesh.strategies.pipeline.split import UnitCost

Split = str | Sequence[str] | Callable[[Sequence[UnitCost], int], Sequence[Sequence[str]]]
"""``"auto"`` or ``"measured"``, the names at which later stages begin, or a function that cuts."""

AUTOMATIC = ("auto", "measured")


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of the strategy.

    Raises:
        ConfigError: When they do not exist or do not fit together.
    """

    stages: int | None = None
    """Ranks of the pipeline; None: all of the job."""
    microbatches: int | None = None
    """None: four for each rank, or the nearest number that the schedule has."""
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    """None: what is usual with the schedule."""
    split: Split = "auto"
    max_memory_bytes: int | None = None
    """Of a rank; None: what its device has, where that is a GPU."""

    def __post_init__(self) -> None:
        schedule_kind(self.schedule)
        if isinstance(self.split, str) and self.split not in AUTOMATIC:
            raise ConfigError(
                f"split={self.split!r} is no way to cut a model. Use 'auto', 'measured', a list of "
                f"the names of the modules at which the second and later stages begin, or a "
                f"function."
            )
        if self.max_memory_bytes is not None and self.max_memory_bytes <= 0:
            raise ConfigError(
                f"max_memory_bytes={self.max_memory_bytes} leaves nothing for a stage. Give the "
                f"bytes that a rank may take, such as 16 * 10**9, or leave it out."
            )
        if self.stages is not None:
            self.num_stages(self.stages)

    def num_microbatches(self, num_ranks: int) -> int:
        """Return how many microbatches a whole batch is cut into."""
        return 4 * num_ranks if self.microbatches is None else self.microbatches

    def num_stages(self, num_ranks: int) -> int:
        """Return the stages of the whole pipeline.

        Raises:
            ConfigError: When the schedule does not have these sizes.
        """
        size = check_schedule(
            self.schedule,
            num_ranks=num_ranks,
            num_microbatches=self.num_microbatches(num_ranks),
            stages_per_rank=self.stages_per_rank,
        )
        return num_ranks * size

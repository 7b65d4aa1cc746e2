"""What a user may choose about a pipeline, checked before anything is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.kinds import check_schedule, schedule_kind
from boltmesh.strategies.pipeline.split import UnitCost

Split = str | Sequence[str] | Callable[[Sequence[UnitCost], int], Sequence[Sequence[str]]]
"""``"auto"``, the names at which later stages begin, or a function that cuts units into stages."""

UNBUILT: Mapping[str, str] = {
    "pipedream_2bw": "keeps two versions of the weights, which is not built yet",
}


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

    def __post_init__(self) -> None:
        schedule_kind(self.schedule)
        if self.schedule in UNBUILT:
            raise ConfigError(
                f"schedule={self.schedule!r} {UNBUILT[self.schedule]}. Use 1f1b, which has its "
                f"order and waits at the end of each step, or zero_bubble."
            )
        if isinstance(self.split, str) and self.split != "auto":
            raise ConfigError(
                f"split={self.split!r} is no way to cut a model. Use 'auto', a list of the names "
                f"of the modules at which the second and later stages begin, or a function."
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

"""Which rank is beside which, as the heat map lays them out: stages below each other."""

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot


def neighbour(job: JobSnapshot, rank: int | None, across: int, down: int) -> int | None:
    """Return the rank that is so far from another one, or the last one on the way.

    Without a rank to begin with it is the first. Where there is only one stage, down is across.
    """
    stages = _stages(job)
    for place, stage in enumerate(stages):
        if rank in stage:
            if len(stages) == 1:
                across, down = across + down, 0
            there = stages[_within(place + down, len(stages))]
            column = _within(stage.index(rank), len(there))
            return there[_within(column + across, len(there))]
    return stages[0][0] if stages else None


def _stages(job: JobSnapshot) -> list[list[int]]:
    axes = [axis for axis in job.mesh if axis != "pipeline"]

    def key(rank: RankSnapshot) -> tuple[int, ...]:
        return (*(rank.coordinates.get(axis, 0) for axis in axes), rank.rank)

    stages: dict[int, list[RankSnapshot]] = {}
    for rank in job.ranks:
        stages.setdefault(rank.coordinates.get("pipeline", 0), []).append(rank)
    return [[rank.rank for rank in sorted(ranks, key=key)] for _, ranks in sorted(stages.items())]


def _within(place: int, size: int) -> int:
    return min(max(0, place), size - 1)

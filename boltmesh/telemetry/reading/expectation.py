"""What a step is expected to move on a rank, from what the ranks state."""

from collections.abc import Sequence

import msgspec

from boltmesh.telemetry.cleaning import clean
from boltmesh.telemetry.reading.rank_view import RankView
from boltmesh.telemetry.snapshot import RankSnapshot
from boltmesh.telemetry.traffic import ExpectedTraffic


def mean_expected(
    views: Sequence[RankView], ranks: Sequence[RankSnapshot]
) -> tuple[ExpectedTraffic, ...]:
    """Return what a rank is expected to move: the mean over the stages that state it.

    Only the stages of a pipeline differ, and each has as many ranks as the others.
    """
    by_stage: dict[int | None, list[ExpectedTraffic]] = {}
    for view, rank in zip(views, ranks, strict=True):
        stage = rank.coordinates.get("pipeline")
        if view.is_present and stage not in by_stage and (stated := _stated(view)):
            by_stage[stage] = stated
    by_key: dict[tuple[str, str], list[ExpectedTraffic]] = {}
    for stated in by_stage.values():
        for each in stated:
            by_key.setdefault((each.axis, each.operator), []).append(each)
    return tuple(
        msgspec.structs.replace(
            same[0],
            payload_bytes=sum(each.payload_bytes for each in same) / len(same),
            calls=_mean_calls(same),
        )
        for same in by_key.values()
    )


def _mean_calls(same: Sequence[ExpectedTraffic]) -> float | None:
    known = [each.calls for each in same if each.calls is not None]
    return sum(known) / len(known) if len(known) == len(same) else None


def _stated(view: RankView) -> list[ExpectedTraffic]:
    try:
        found = msgspec.convert(view.expected, tuple[ExpectedTraffic, ...])
    except msgspec.ValidationError:
        return []
    return [
        msgspec.structs.replace(
            each,
            axis=clean(each.axis, 40),
            operator=clean(each.operator, 60),
            why=clean(each.why, 200),
        )
        for each in found[:200]
    ]

"""Who sends how much to whom, point to point, in one optimizer step."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.telemetry.traffic import CONTROL
from boltmesh.tui.figures.memo import remember_last

Unit = Literal["rank", "ranks", "stage", "stages"]

Pairs = Mapping[tuple[int, int], float | None]
"""From the sender to the receiver, bytes a step; None: they talk, and the mean is not known yet."""


class PeerMatrix(msgspec.Struct, frozen=True):
    """Rows send, columns receive."""

    unit: Unit
    """What a row is: a rank or several, the ranks of a pipeline stage, or those of several."""
    labels: tuple[str, ...]
    cells: Pairs
    """By the places of sender and receiver in ``labels``; who does not talk is left out."""

    @property
    def total_bytes(self) -> float | None:
        """The sum over all pairs; None before any of it is known."""
        known = [size for size in self.cells.values() if size is not None]
        return sum(known) if known else None

    @property
    def most_bytes(self) -> float:
        """Those of the pair that moves the most."""
        return max((size for size in self.cells.values() if size is not None), default=0.0)


@remember_last
def rank_pairs(job: JobSnapshot) -> Pairs:
    """Return what each rank sends to each other one.

    Both sides count the same bytes: the sender is believed, and where it is not seen, because it
    is on another host or ran a version that did not count, the receiver. What ranks agree on is no
    part of it.
    """
    sent: dict[tuple[int, int], float | None] = {}
    received: dict[tuple[int, int], float | None] = {}
    for rank in job.ranks:
        for total in rank.peers:
            # Only outside of steps, to set up; or beside what the model sends.
            if total.bytes_per_step == 0 or total.axis == CONTROL:
                continue
            if total.operator.startswith("send"):
                key, pairs = (rank.rank, total.peer), sent
            else:
                key, pairs = (total.peer, rank.rank), received
            before = pairs.get(key, 0.0)
            size = total.bytes_per_step
            pairs[key] = None if size is None or before is None else before + size
    return received | sent


def peer_matrix(job: JobSnapshot, *, max_rows: int) -> PeerMatrix | None:
    """Return the matrix of at most ``max_rows`` rows, or None where nobody talks to one other.

    Ranks where they fit, else the stages of the pipeline; of either, neighbours together where
    there are still too many.
    """
    pairs = rank_pairs(job)
    if not pairs or max_rows < 1:
        return None
    ranks = sorted({rank for pair in pairs for rank in pair})
    if len(ranks) <= max_rows:
        return _gather("rank", pairs, {rank: at for at, rank in enumerate(ranks)}, ranks)
    is_pipeline = job.mesh.get("pipeline", 1) > 1
    places = _stages(job, ranks) if is_pipeline else {rank: rank for rank in ranks}
    num_places = max(places.values()) + 1
    if num_places <= max_rows:
        return _gather("stage", pairs, places, range(num_places))
    together = -(-num_places // max_rows)
    labels = [
        f"{first}-{min(first + together, num_places) - 1}"
        for first in range(0, num_places, together)
    ]
    blocks = {rank: place // together for rank, place in places.items()}
    return _gather("stages" if is_pipeline else "ranks", pairs, blocks, labels)


def _stages(job: JobSnapshot, ranks: Sequence[int]) -> dict[int, int]:
    """Return the pipeline stage of each rank; of a rank that says nothing, by the mesh's order."""
    known = {rank.rank: rank.coordinates.get("pipeline") for rank in job.ranks}
    num_stages = max(1, job.mesh.get("pipeline", 1))
    ranks_per_stage = max(1, job.world_size // num_stages)
    return {
        rank: stage if (stage := known.get(rank)) is not None else max(0, rank) // ranks_per_stage
        for rank in ranks
    }


def _gather(
    unit: Unit, pairs: Pairs, places: Mapping[int, int], labels: Sequence[object]
) -> PeerMatrix:
    cells: dict[tuple[int, int], float | None] = {}
    for (sender, receiver), size in pairs.items():
        key = (places[sender], places[receiver])
        before = cells.get(key, 0.0)
        cells[key] = None if size is None or before is None else before + size
    return PeerMatrix(unit, tuple(map(str, labels)), cells)

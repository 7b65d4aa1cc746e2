"""Bytes on the wire, from the payload and the size of the group.

The payload of a gather-type operator is its full side. The factors are those of the ring
algorithms, which move the least that is possible; a tree moves no less.
"""

from boltmesh.telemetry.snapshot import JobSnapshot

POINT_TO_POINT = ("send", "recv")


def is_point_to_point(operator: str) -> bool:
    """Say whether an operator has one rank on the other side, not a whole group."""
    return operator.startswith(POINT_TO_POINT)


def axis_size(job: JobSnapshot, axis: str) -> int | None:
    """Return how many ranks a group of ``axis`` has, or None for groups of no axis."""
    return job.world_size if axis == "world" else job.mesh.get(axis)


def wire_factor(operator: str, size: int) -> float:
    """Return the bytes that a ring algorithm sends per rank, over the operator's payload."""
    if size <= 1:
        return 0.0
    name = operator.lstrip("_")
    if name.startswith("allreduce"):
        return 2 * (size - 1) / size
    if name.startswith(("allgather", "reduce_scatter", "alltoall")):
        return (size - 1) / size
    return 1.0

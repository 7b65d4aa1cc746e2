"""Jobs of any mesh: ranks with groups, peers, collectives and memory, as a real one has them."""

import itertools
from typing import Any

import msgspec

from boltmesh.telemetry.snapshot import (
    CollectiveTotal,
    GroupProgress,
    JobSnapshot,
    MemoryKind,
    PeerTotal,
    RankSnapshot,
    StepRecord,
)
from tests.tui.samples import NOW, job, rank, step

Mesh = dict[str, int]

SEQUENCE = 1841
GIB = 2**30


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """The coordinates of every rank, the last axis the fastest."""
    return [
        dict(zip(mesh, at, strict=True))
        for at in itertools.product(*(range(size) for size in mesh.values()))
    ]


def members(mesh: Mesh, axis: str, number: int) -> tuple[int, ...]:
    """The ranks of the group of ``axis`` that rank ``number`` is in."""
    places = coordinates(mesh)
    if axis == "world":
        return tuple(range(len(places)))
    own = {name: at for name, at in places[number].items() if name != axis}
    return tuple(
        other
        for other, place in enumerate(places)
        if {name: at for name, at in place.items() if name != axis} == own
    )


def mesh_job(
    mesh: Mesh, *, steps: tuple[StepRecord, ...] | None = None, **changes: Any
) -> JobSnapshot:
    """A healthy job: every axis of more than one rank has groups that are all at SEQUENCE."""
    places = coordinates(mesh)
    axes = [axis for axis, size in mesh.items() if size > 1]
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[int, ...]] = {}
    for number, place in enumerate(places):
        for axis in axes:
            key = (axis, tuple((name, at) for name, at in place.items() if name != axis))
            groups[key] = (*groups.get(key, ()), number)
    world = tuple(range(len(places)))
    records = steps if steps is not None else tuple(step(index) for index in range(10))
    ranks = []
    for number, place in enumerate(places):
        progress = [_progress("world", "0", world)]
        for axis in axes:
            key = (axis, tuple((name, at) for name, at in place.items() if name != axis))
            found = groups[key]
            progress.append(_progress(axis, f"{axis} of {found[0]}", found))
        ranks.append(
            rank(
                number,
                coordinates=place,
                steps=records,
                groups=tuple(progress),
                collectives=tuple(_total(each) for each in progress),
                peers=tuple(_peers(number, place, mesh)),
                memory_kinds=memory_kinds(number),
            )
        )
    return job(**{"mesh": mesh, "ranks": tuple(ranks)} | changes)


def change_rank(snapshot: JobSnapshot, number: int, **changes: Any) -> JobSnapshot:
    ranks = tuple(
        msgspec.structs.replace(each, **changes) if each.rank == number else each
        for each in snapshot.ranks
    )
    return msgspec.structs.replace(snapshot, ranks=ranks)


def change_group(item: RankSnapshot, axis: str, **changes: Any) -> RankSnapshot:
    groups = tuple(
        msgspec.structs.replace(each, **changes) if each.axis == axis else each
        for each in item.groups
    )
    return msgspec.structs.replace(item, groups=groups)


def memory_kinds(number: int) -> tuple[MemoryKind, ...]:
    """Eleven GiB on the device, and two more on odd ranks."""
    return (
        MemoryKind("parameters", "device", 2 * GIB, 2 * GIB),
        MemoryKind("gradients", "device", 2 * GIB, 2 * GIB),
        MemoryKind("optimizer", "device", 4 * GIB, 4 * GIB),
        MemoryKind("activations", "device", (2 + 2 * (number % 2)) * GIB, None),
        MemoryKind("cache", "device", GIB, None),
        MemoryKind("optimizer", "host", 8 * GIB, 6 * GIB),
        MemoryKind("optimizer", "disk", None, 16 * GIB),
    )


def _progress(axis: str, name: str, ranks: tuple[int, ...]) -> GroupProgress:
    return GroupProgress(axis, name, ranks, SEQUENCE, "allreduce", True, NOW)


def _total(progress: GroupProgress) -> CollectiveTotal:
    return CollectiveTotal(
        axis=progress.axis,
        group=progress.group,
        operator="allreduce",
        calls=SEQUENCE,
        payload_bytes=SEQUENCE * 10**6,
        calls_per_step=2.0,
        bytes_per_step=2e6,
        seconds_per_step=0.01,
    )


def _peers(number: int, place: dict[str, int], mesh: Mesh) -> list[PeerTotal]:
    stages = mesh.get("pipeline", 1)
    stride = len(coordinates(mesh)) // stages if stages > 1 else 0
    found = []
    for by in (-1, 1):
        if stages > 1 and 0 <= place["pipeline"] + by < stages:
            peer = number + by * stride
            found += [
                PeerTotal("pipeline", operator, peer, 80, 80 * 10**6, 8e6)
                for operator in ("send", "recv")
            ]
    return found

"""Writes the state of one host's ranks as a directory of shards, and sends it to another host.

A checkpoint on a disk holds each shard once. Here each host gets a directory with all shards that
its ranks would load: shards that ranks of several hosts hold are in each of them. The names and
sizes of all tensors of the model are in every directory, so that loading works as from a disk.

All functions are collective over ``HostRanks.group`` and may run in a thread during training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.atomic_replace import partial_path, remove
from boltmesh.strategies.checkpoint.atomic_replace import replace as rename
from boltmesh.strategies.checkpoint.directory import complete_directory
from boltmesh.strategies.checkpoint.shard_writer import PiecePlanner, ShardWriter
from boltmesh.strategies.checkpoint.storage.folder import Draft, DraftStart, LocalFolder
from boltmesh.strategies.object_collectives import (
    all_or_none,
    broadcast_from_rank0,
    gather_objects,
    noop,
)
from boltmesh.strategies.torch_compat.files import without_duplicates

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class HostRanks:
    """The ranks of each host.

    Args:
        group: CPU group of all ranks, used only for this.
        rank: This rank.
        per_host: Number of ranks of each host, which are consecutive.
    """

    group: dist.ProcessGroup
    rank: int
    per_host: int

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return dist.get_world_size(self.group) // self.per_host

    @property
    def host(self) -> int:
        """Number of this rank's host."""
        return self.rank // self.per_host

    @property
    def leader(self) -> int:
        """The first rank of this host."""
        return self.host * self.per_host

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.rank == self.leader

    def of(self, items: Sequence[Any]) -> list[Any]:
        """Return the items of this host's ranks."""
        return list(items[self.leader : self.leader + self.per_host])

    def gather(self, item: Any) -> list[Any]:
        """Return each rank's item, by rank. Collective."""
        return gather_objects(item, self.group)

    def run(self, action: Callable[[], Any]) -> Any:
        """Run an action; if it raises on one rank, raise on all. Collective."""
        return all_or_none(action, self.group)


def write_part(
    tensors: dict[str, Any], rest: bytes, target: Path, ranks: HostRanks, *, is_divided: bool
) -> None:
    """Write the state of this host's ranks. Collective over all ranks.

    Args:
        tensors: This rank's snapshot, see ``take_snapshot``.
        rest: All other state, serialized; that of rank 0 is used.
        target: The new directory, the same on all ranks of a host.
        ranks: The ranks of each host.
        is_divided: See ``save_directory``.

    Raises:
        CheckpointError: On every rank, if one fails.
    """
    draft = LocalFolder(target).draft()
    try:
        start = ranks.run(draft.begin if ranks.is_leader else noop)
        starts = ranks.gather(start)
        ranks.run(bind(_join, draft, starts[ranks.leader]))
        rest = broadcast_from_rank0(rest, ranks.group)
        planner = PiecePlanner(is_divided=is_divided)
        planner.set_up_planner(tensors, is_coordinator=ranks.is_leader)
        plans = ranks.gather(planner.create_local_plan())
        writer = ShardWriter(draft)
        made, metadata = ranks.run(bind(_plan, plans, planner, writer, ranks))
        plan = planner.finish_plan(ranks.gather(made)[ranks.leader][ranks.rank])
        with torch.no_grad():
            results = ranks.gather(ranks.run(lambda: writer.write_data(plan, planner).value()))
        complete = bind(_complete, draft, writer, metadata, ranks.of(results), rest)
        ranks.run(complete if ranks.is_leader else noop)
    except BaseException:
        if ranks.is_leader:
            draft.abandon()
        raise


def _join(draft: Draft, start: DraftStart) -> None:
    if not draft.joins(start):
        raise CheckpointError("the first rank of this host has made a folder that is not seen here")


def _plan(
    plans: list[SavePlan], planner: PiecePlanner, writer: ShardWriter, ranks: HostRanks
) -> tuple[list[SavePlan], Metadata | None]:
    """Return, on a leader, what each rank of its host writes, and the sizes of all tensors.

    Only the leader plans: the result depends on the order of sets, which differs by process.
    """
    if not ranks.is_leader:
        return [], None
    _, metadata = planner.create_global_plan(plans)
    made = [replace(plan, items=[]) for plan in plans]
    made[ranks.leader : ranks.leader + ranks.per_host] = without_duplicates(ranks.of(plans))
    numbered, _ = create_default_global_save_plan(made)
    return writer.prepare_global_plan(numbered), metadata


def _complete(
    draft: Draft, writer: ShardWriter, metadata: Metadata, results: list[Any], rest: bytes
) -> None:
    writer.finish(metadata, results)
    complete_directory(rest, draft, writer.written)


def send_part(
    source: Path | None, to: int, target: Path | None, sender: int, ranks: HostRanks
) -> None:
    """Send a directory, or a file, from one rank while receiving one from another.

    Args:
        source: Path that this rank sends; None: nothing.
        to: The rank that receives it.
        target: Path under which this rank stores what it receives; None: it receives nothing.
        sender: The rank that sends to this one.
        ranks: The ranks of each host.

    Raises:
        CheckpointError: On every rank, if one fails.
    """
    sizes = [] if source is None else _sizes(source)
    sizes_of_ranks = ranks.gather(sizes)
    coming = [] if target is None else sizes_of_ranks[sender]
    outgoing = iter(()) if source is None else _outgoing(source, sizes)
    ranks.run(bind(_exchange, outgoing, to, coming, target, sender, ranks.group))


_Sizes = list[tuple[str, int]]
"""Names of the files of a directory and their sizes; ``""`` for a file that is no directory."""


def _sizes(source: Path) -> _Sizes:
    if source.is_file():
        return [("", source.stat().st_size)]
    return [(each.name, each.stat().st_size) for each in sorted(source.iterdir())]


def _outgoing(source: Path, sizes: _Sizes) -> Iterator[Tensor]:
    for name, size in sizes:
        with (source / name if name else source).open("rb") as file:
            for start in range(0, size, _CHUNK_BYTES):
                data = bytearray(file.read(min(_CHUNK_BYTES, size - start)))
                yield torch.frombuffer(data, dtype=torch.uint8)


def _exchange(
    outgoing: Iterator[Tensor],
    to: int,
    coming: _Sizes,
    target: Path | None,
    sender: int,
    group: dist.ProcessGroup,
) -> None:
    partial = Path() if target is None else partial_path(target)
    incoming = iter(()) if target is None else _incoming(coming, partial)
    try:
        while True:
            sent, received = next(outgoing, None), next(incoming, None)
            works = []
            if received is not None:
                works.append(dist.irecv(received, sender, group=group))
            if sent is not None:
                works.append(dist.isend(sent, to, group=group))
            for work in works:
                assert work is not None
                work.wait()
            if not works:
                break
        if target is not None:
            rename(partial, target)
    except BaseException:
        if target is not None:
            remove(partial)
        raise


def _incoming(coming: _Sizes, partial: Path) -> Iterator[Tensor]:
    """Yield buffers to be filled; each is written when the next one is requested.

    Data are received even if they cannot be written, since the sender waits; the error comes last.
    """
    failure: OSError | None = None
    partial.parent.mkdir(parents=True, exist_ok=True)
    if [name for name, _ in coming] != [""]:
        partial.mkdir()
    for name, size in coming:
        with (partial / name if name else partial).open("wb") as file:
            for start in range(0, size, _CHUNK_BYTES):
                buffer = torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
                yield buffer
                if failure is None:
                    try:
                        file.write(memoryview(buffer.numpy()))  # type: ignore[arg-type]
                        file.flush()
                    except OSError as error:
                        failure = error
    if failure is not None:
        raise failure

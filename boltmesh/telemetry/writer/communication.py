"""Counts the bytes of this rank: to other ranks, to its host or disk, and to each expert.

``CommunicationCounter`` writes every collective that ``torch_compat`` shows into the rank's file,
gives groups the name of their axis, and reports to the phase clock which waits are exposed.

``OffloadCounter`` counts what goes between the device and the host or a disk, and for how long.
Transfers overlap, so durations are not added up: of each way the time is kept in which at least
one transfer was under way, and bytes over that time are the bandwidth.

``ExpertCounter`` counts the rows of each expert, and writes them beside the rank's file.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import MAX_JSON_BYTES, write_whole
from boltmesh.telemetry.snapshot import ExpertLoad
from boltmesh.telemetry.traffic import CHECKPOINTS
from boltmesh.telemetry.writer.phases import COMMUNICATION, PhaseClock
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES, Ticket
from boltmesh.telemetry.writer.torch_compat.operators import (
    ANY_SOURCE,
    group_ranks,
    uncounted_operators,
)

WORLD: Final = "world"
OTHER: Final = "other"

_SYNCHRONOUS: Final = layout.TRAFFIC_IS_SYNCHRONOUS
_TIMED: Final = layout.TRAFFIC_IS_TIMED


class CommunicationCounter:
    """Writes each collective of this process into a rank's file, between start and stop.

    Args:
        file: Where counts and records go.
        clock: The phases of this rank.
        is_on_device: Kernels run behind the host, so waits are read from the device's timeline.
        on_error: Called, at most once, with what went wrong in here; a collective is never stopped.
    """

    def __init__(
        self,
        file: RankFile,
        clock: PhaseClock,
        *,
        is_on_device: bool,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.step = 1
        """Sequence number of the step record that collectives belong to from now on."""
        self._file = file
        self._clock = clock
        self._is_on_device = is_on_device
        self._on_error = on_error
        self._axes: dict[str, str] = {}
        self._groups: dict[str, int] = {}
        self._members: dict[str, list[int]] = {}
        self._operators: dict[str, int] = {}
        self._beside: set[int] = set()
        """Groups in which no thread that trains ever waits."""
        self._is_counting = False

    def start(self) -> str | None:
        """Begin to count; return why that is not possible or not complete, where it is not."""
        try:
            COLLECTIVES.attach(self)
        except TelemetryError as error:
            return f"communication is not counted: {error}"
        self._is_counting = True
        if uncounted := uncounted_operators():
            return f"not counted, because this boltmesh does not know them: {', '.join(uncounted)}"
        return None

    def stop(self) -> None:
        """Count no more. Safe from inside a collective: the kernels stay until ``remove``."""
        self._is_counting = False

    def remove(self) -> None:
        """Count no more, and take the kernels out with the last counter of the process."""
        COLLECTIVES.detach(self)
        self._is_counting = False

    def name_group(self, group: dist.ProcessGroup, axis: str) -> None:
        """Say which axis of the mesh a process group is.

        Ignores what ``new_group`` returns on ranks that are no members.
        """
        if not isinstance(group, dist.ProcessGroup):
            return  # type: ignore[unreachable]
        name = group.group_name
        self._axes[name] = axis
        number = self._file.group_number(name, axis, self._ranks_of(group, name))
        self._groups[name] = number
        if axis == CHECKPOINTS:
            self._beside.add(number)

    def enqueued(
        self,
        operator: str,
        group: dist.ProcessGroup,
        payload_bytes: int,
        is_synchronous: bool,
        is_timed: bool,
        peer: int | None = None,
        *,
        is_wait_told: bool = False,
    ) -> Ticket | None:
        """See ``CollectiveObserver``."""
        if not self._is_counting:
            return None
        try:
            name = group.group_name
            group_number = self._groups.get(name)
            if group_number is None:
                group_number = self._add_group(group, name)
            operator_number = self._operators.get(operator)
            if operator_number is None:
                operator_number = self._file.operator_number(operator)
                self._operators[operator] = operator_number
            clock = self._clock
            ticket = self._file.enqueue(
                self.step,
                group_number,
                operator_number,
                clock.phase,
                is_synchronous * _SYNCHRONOUS + is_timed * _TIMED,
                payload_bytes,
                0 if peer is None else self._peer_field(group, name, peer),
            )
            if self._is_on_device:
                if is_synchronous and not is_timed and threading.get_ident() == clock.thread:
                    clock.enter(COMMUNICATION)
                else:
                    clock.note_enqueue(ticket[-1], is_synchronous=is_synchronous)
            elif not is_synchronous and not is_wait_told and threading.get_ident() == clock.thread:
                # Hooks of DDP that chain collectives enqueue from gloo's threads, when the
                # backward pass has nothing left to compute.
                clock.note_enqueue(ticket[-1], is_synchronous=False)
        except Exception as error:  # noqa: BLE001 - the collective goes on whatever happens here
            self._fail(error)
            return None
        return ticket

    def returned(self, ticket: Ticket) -> None:
        """See ``CollectiveObserver``."""
        is_synchronous = ticket[5] & _SYNCHRONOUS
        if self._is_on_device and is_synchronous and threading.get_ident() == self._clock.thread:
            self._clock.leave()

    def completed(self, ticket: Ticket, done_ns: int) -> None:
        """See ``CollectiveObserver``."""
        try:
            self._file.complete(ticket, done_ns)
            if ticket[2] in self._beside:
                return
            if ticket[5] & _SYNCHRONOUS:
                self._clock.note_wait(done_ns - ticket[-1])
            else:
                self._clock.note_done(done_ns)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def waited(self, ticket: Ticket, begin_ns: int, done_ns: int) -> None:
        """See ``CollectiveObserver``."""
        try:
            self._file.complete(ticket, done_ns)
            if threading.get_ident() == self._clock.thread:
                self._clock.note_wait(done_ns - begin_ns)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def lost(self, ticket: Ticket) -> None:
        """See ``CollectiveObserver``."""
        self._file.lose(ticket)

    def found_peer(self, ticket: Ticket, group: dist.ProcessGroup, peer: int) -> None:
        """See ``CollectiveObserver``."""
        if not self._is_counting:
            return
        try:
            field = self._peer_field(group, group.group_name, peer)
            if field != layout.UNKNOWN_PEER:
                self._file.find_peer(ticket, field)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _add_group(self, group: dist.ProcessGroup, name: str) -> int:
        axis = self._axes.get(name)
        if axis is None:
            axis = WORLD if group.size() == self._file.header.world_size else OTHER
        ranks = self._ranks_of(group, name)
        number = self._groups[name] = self._file.group_number(name, axis, ranks)
        return number

    def _ranks_of(self, group: dist.ProcessGroup, name: str) -> list[int]:
        """Return the members of a group by global rank, queried once."""
        ranks = self._members.get(name)
        if ranks is None:
            ranks = self._members[name] = group_ranks(group)
        return ranks

    def _peer_field(self, group: dist.ProcessGroup, name: str, peer: int) -> int:
        """Return a peer within a group as ``layout.TRAFFIC`` has it."""
        ranks = self._ranks_of(group, name)
        if not ANY_SOURCE < peer < len(ranks):
            return layout.UNKNOWN_PEER
        return min(ranks[peer] + 1, layout.UNKNOWN_PEER)

    def _fail(self, error: Exception) -> None:
        if self._is_counting:
            self._is_counting = False
            self._on_error(error)


_WAYS: Final = {way: 3 * number for number, way in enumerate(layout.OFFLOAD_WAYS)}


class OffloadCounter:
    """The totals of one rank, called from the threads that move the bytes.

    Args:
        file: Where they go; what this process wrote into it before is counted on.
    """

    def __init__(self, file: RankFile) -> None:
        self._file = file
        self._totals = list(file.offloaded)
        self._busy_until_ns = dict.fromkeys(_WAYS.values(), 0)
        self._written = tuple(self._totals)
        self._global_step = 0
        self._lock = RLock()  # a signal handler may move bytes too

    def add(
        self, place: str, direction: str, num_bytes: int, seconds: float, *, is_alone: bool = False
    ) -> None:
        """Count a transfer that ends now, or one that had its way to itself whenever it was."""
        now = time.monotonic_ns()
        at = _WAYS[place, direction]
        lasted_ns = max(0, round(seconds * 1e9))
        with self._lock:
            if not is_alone:
                begin = max(now - lasted_ns, self._busy_until_ns[at])
                self._busy_until_ns[at] = max(now, self._busy_until_ns[at])
                lasted_ns = max(0, now - begin)
            self._totals[at] += 1
            self._totals[at + 1] += num_bytes
            self._totals[at + 2] += lasted_ns

    def after_step(self, global_step: int) -> None:
        """Write a record when an optimizer step has passed."""
        if global_step != self._global_step:
            self.write(global_step)

    def write(self, global_step: int) -> None:
        """Write the totals, unless nothing was moved since the last time and ever."""
        with self._lock:
            totals = tuple(self._totals)
        is_new_step, self._global_step = global_step != self._global_step, global_step
        if totals != self._written or (is_new_step and any(totals)):
            self._written = totals
            self._file.offload(global_step, totals)


ENDING: Final = ".experts"
"""Ending of the file; the name before it is that of the rank's file."""
WRITE_EVERY_NS: Final = 2_000_000_000
"""Reading the counts waits for the device."""


class ExpertCounter:
    """The rows of each expert by module, on the device that chooses them.

    Args:
        path: The rank's file.
        is_new: Whether it begins a run: what an earlier one has left beside it is removed.
    """

    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        self._path = path.with_suffix(ENDING)
        if is_new:
            self._path.unlink(missing_ok=True)
        self._rows: dict[str, Tensor] = {}
        self._dropped: dict[str, Tensor] = {}
        self._before: dict[str, list[int]] = {}
        self._written_ns = time.monotonic_ns()

    def add(self, name: str, chosen: Tensor, num_experts: int) -> None:
        """Count the experts that a module has chosen for its rows, without waiting for the device.

        Args:
            name: The module.
            chosen: Their numbers, of any shape.
            num_experts: Experts of the module, on all ranks.
        """
        rows = self._rows.get(name)
        if rows is None:
            rows = torch.zeros(num_experts, dtype=torch.long, device=chosen.device)
            self._rows[name] = rows
        flat = chosen.detach().reshape(-1).long()
        rows.scatter_add_(0, flat, torch.ones_like(flat))

    def drop(self, name: str, count: Tensor) -> None:
        """Count rows that a module has not sent, without waiting for the device."""
        self._dropped[name] = self._dropped.get(name, 0) + count.detach()

    def after_step(self) -> None:
        """Write the counts if it is time to."""
        if self._rows and time.monotonic_ns() - self._written_ns >= WRITE_EVERY_NS:
            self.write()

    def write(self) -> None:
        """Write the counts, and those since the last time."""
        if not self._rows:
            return
        self._written_ns = time.monotonic_ns()
        now = {name: rows.tolist() for name, rows in self._rows.items()}
        loads = []
        for name, rows in now.items():
            before = self._before.get(name, [0] * len(rows))
            recent = tuple(a - b for a, b in zip(rows, before, strict=True))
            loads.append(ExpertLoad(name, tuple(rows), recent, int(self._dropped.get(name, 0))))
        self._before = now
        content = msgspec.json.encode(loads)
        if len(content) <= MAX_JSON_BYTES:
            write_whole(self._path, content)

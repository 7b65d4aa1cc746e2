"""Raises an error that names both collectives when ranks issue different ones.

Under ZeRO each module is gathered from all ranks and its gradients are reduced over all of them,
so every rank has to run the same modules in the same order. A layer that only some ranks run
would pair the collective of one module with that of another: wrong numbers if the sizes happen to
fit, an abort or a hang if they do not.

``OrderCheck`` compares every gather and every reduction with what followed this place before. A
step that repeats the last one sends nothing; otherwise the ranks agree before they go on, see
[Note: A mismatch always has a rank that checks].

``Watchdog`` explains why a rank waits in a collective that another rank never enters, through the
failure board of their group. A rank whose next collective differs from the group's last one at this
place reports the place and its own call, and waits for the others to agree. A rank that is idle in
a collective reads the reports and answers with its own call at that place. If both calls are equal
it does not answer, so a slow rank is never mistaken for one that issued another collective. Nothing
is written while training advances; an idle rank reads one number every few seconds.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from boltmesh.errors import BoltMeshError, DivergenceError, first_of
from boltmesh.failure_board import FailureBoard
from boltmesh.process import encodable
from boltmesh.strategies.data_parallel.missing_gradients import MissingGradients, ZeroGradients
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.torch_compat.fsdp_hooks import intercept_collectives

_GATHER_ANSWERS_S: Final = 0.5
"""Seconds that a rank waits for further answers after the first one."""

_ADVICE = (
    "With sharded parameters all ranks run the same modules in the same order. Let one rank decide "
    "and broadcast, or run the module on every rank and multiply unwanted outputs by zero."
)


class RankCall(NamedTuple):
    """One rank's call at the place where the calls differ."""

    rank: int
    text: str
    """In the past tense: ``called all_gather of 'head'``."""


def describe_mismatch(calls: Iterable[RankCall]) -> str:
    """Return which ranks made which call; the call of most ranks comes last."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(set(calls)):
        by_text.setdefault(text, []).append(rank)
    # If two parties are of one size, the one with the first rank comes last.
    parties = sorted(by_text.items(), key=lambda party: (len(party[1]), -party[1][0]))
    listed = " while ".join(f"{_name_ranks(ranks)} {text}" for text, ranks in parties)
    return f"Ranks issued different collectives: {listed}. {_ADVICE}"


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {first_of(ranks, 8)}"


class _Report(msgspec.Struct, frozen=True):
    """A rank whose call is not the one that the group made here before."""

    rank: int
    index: int
    text: str


class Watchdog:
    """Reports and answers of one rank about differing collectives.

    Args:
        rank: Global rank.
        name: Name of the group, the same on all of its ranks.
        call_at: Returns this rank's call by its number from the start, None if unknown.
        patience_s: Seconds without a call after which the rank counts as idle.
        on_stuck: See ``FailureBoard``.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        call_at: Callable[[int], str | None],
        *,
        patience_s: float,
        on_stuck: Callable[[BoltMeshError], None],
    ) -> None:
        self.board = FailureBoard(
            rank,
            f"order-{name}",
            error=DivergenceError,
            on_stuck=on_stuck,
            idle_s=patience_s,
            poll_s=patience_s / 2,
            check=self._check,
        )
        self._rank, self._call_at, self._patience_s = rank, call_at, patience_s
        self._lock = threading.RLock()
        self._forget_reports()

    def _forget_reports(self) -> None:
        self._number: int | None = None
        """Number of this rank's newest report."""
        self._reported: tuple[int, str] | None = None
        self._unanswered: list[int] = []
        self._num_listed = 0
        self._own: tuple[float, str] | None = None
        """When this rank answered a report, and the mismatch between the two calls."""

    def start(self) -> None:
        """Monitor this rank, on an empty board: call it on all ranks, at the start of a run."""
        self.stop()
        self._forget_reports()
        self.board.reset()
        self.board.start()

    def stop(self) -> None:
        """Monitor this rank no longer."""
        self.board.close()

    def report_mismatch(self, index: int, text: str) -> None:
        """Report this rank's call at a place where the group made another one before.

        Once per place: all ranks may agree in the end, and differ at a later place.
        """
        text = encodable(text)  # names of modules may have what no encoding has
        with self._locked_store() as store:
            if store is None or self._reported == (index, text):
                return
            number = store.add("reports", 1)
            report = _Report(self._rank, index, text)
            store.set(f"reports/{number}", msgspec.json.encode(report).decode())
            self._number, self._reported = number, (index, text)

    def diagnose(self) -> str | None:
        """Return the explanation of a mismatch, None if none is proven."""
        self._read_board()
        return self.board.cause or (self._own[1] if self._own is not None else None)

    def diagnose_own(self, index: int, text: str) -> str | None:
        """Report this rank's call; return the explanation if a waiting rank made another one."""
        self.report_mismatch(index, text)
        self._read_board()
        explanation = self.board.cause
        if explanation is None:
            with self._locked_store() as store:
                if store is not None and store.add(f"answers/{self._number}", 0):
                    own = RankCall(self._rank, encodable(text))
                    explanation = self._explain_answers(store, own)
        if explanation is not None:
            self.stop()  # the caller raises it
        return explanation

    def _explain_answers(self, store: Store, own: RankCall) -> str | None:
        time.sleep(_GATHER_ANSWERS_S)
        num_answers = store.add(f"answers/{self._number}", 0)
        keys = [f"answers/{self._number}/{answer}" for answer in range(1, num_answers + 1)]
        answers = [
            msgspec.json.decode(store.get(key), type=RankCall) for key in keys if store.check([key])
        ]
        if not answers:
            return None
        explanation = self.conclude(describe_mismatch([own, *answers]))
        # The store may end with this rank.
        self.board.wait_for_readers(num_answers, 2 * self._patience_s)
        return explanation

    def conclude(self, explanation: str) -> str:
        """Post a proven mismatch, stop monitoring and return it."""
        self.board.post(explanation)
        self.stop()
        return explanation

    def _check(self) -> None:
        """Read reports; post this rank's own answer if the reporting rank has not concluded."""
        self._read_board()
        if self.board.cause is None and self._own is not None:
            since_s, explanation = self._own
            if time.monotonic() - since_s >= self._patience_s:
                self.board.post(explanation)

    def _read_board(self) -> None:
        """Read the cause, and answer the reports of other ranks."""
        with self._locked_store() as store:
            if store is None or self.board.peek() is not None:
                return
            num_reports = store.add("reports", 0)
            self._unanswered += range(self._num_listed + 1, num_reports + 1)
            self._num_listed = num_reports
            self._unanswered = [
                number for number in self._unanswered if not self._answer(store, number)
            ]

    def _answer(self, store: Store, number: int) -> bool:
        """Compare this rank's call with a report; return whether the comparison is done."""
        key = f"reports/{number}"
        if not store.check([key]):
            return False
        report = msgspec.json.decode(store.get(key), type=_Report)
        text = self._call_at(report.index)
        if text is None:
            return False  # this rank has not come to that place
        text = encodable(text)
        if text != report.text:
            own = RankCall(self._rank, text)
            explanation = describe_mismatch([RankCall(report.rank, report.text), own])
            self._own = self._own or (time.monotonic(), explanation)
            answer = store.add(f"answers/{number}", 1)
            store.set(f"answers/{number}/{answer}", msgspec.json.encode(own).decode())
        return True

    @contextlib.contextmanager
    def _locked_store(self) -> Iterator[Store | None]:
        with self._lock, self.board.store() as store:
            yield store


START: Final = 0

_MOST_REMEMBERED: Final = 1 << 20
"""Limit of places: a model that never repeats a step must not fill the memory with its order."""

_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


class KnownOrder:
    """Place of this rank in the order of collectives, and what followed each place last.

    [Note: A mismatch always has a rank that checks]
    Each place has one known continuation: the event that followed it last. A rank that takes
    another one has to agree with all others first. Ranks at the same place hold the same table,
    because only an agreement changes it. So of two ranks that continue differently at most one
    takes the known continuation. The other one checks, gets no agreement from the ranks that wait
    in the known collective, and never enters theirs: no collective of one module is paired with
    that of another. Which parameters a reduction includes may follow from the known continuation,
    see ``MissingGradients``: a rank then chooses between the same two.

    A place is a hash of all events since the last ``restart``.
    """

    def __init__(self) -> None:
        self._place = START
        self._next: dict[int, int] = {}

    def learn(self, event: int) -> None:
        """Make this the known continuation; all ranks do so at once."""
        if len(self._next) >= _MOST_REMEMBERED:
            self._next.clear()
        self._next[self._place] = event

    @property
    def expected(self) -> int | None:
        """The known continuation of this place."""
        return self._next.get(self._place)

    def matches_last(self, event: int) -> bool:
        """Return whether an event followed this place last; advance by it if it did."""
        if self._next.get(self._place) != event:
            return False
        self.advance(event)
        return True

    def advance(self, event: int) -> None:
        """Advance by one event."""
        self._place = (self._place * _PRIME ^ event) & _MASK

    def restart(self, place: int = START) -> None:
        """Go to a named place, whatever came before."""
        self._place = place


PATIENCE_S: Final = 10.0
"""Seconds that a rank may be idle at one place before it compares its calls with other ranks."""

_REMEMBERED_EVENTS: Final = 1 << 16
"""On a GPU the host runs ahead of a gather that never completes, by at most a few steps."""

_EVALUATION: Final = 1
"""The place at which each evaluation batch begins."""


class CollectiveEvent(NamedTuple):
    """A call that all ranks have to make in the same order."""

    key: int
    """Hash of the text, equal on every rank."""
    text: str


class OrderCheck:
    """Compares what the ranks of a group gather and reduce.

    Args:
        group: The ranks that share a model, in a group of its own, so that an agreement is never
            paired with a gather; on the CPU, so that it waits for no kernel.
        is_synchronized: Whether another mechanism makes all ranks gather the same just now, so
            that nothing is compared. Equal on all ranks.
        patience_s: In place of PATIENCE_S.
        on_stuck: See ``FailureBoard``.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        is_synchronized: Callable[[], bool] = lambda: False,
        patience_s: float | None = None,
        on_stuck: Callable[[BoltMeshError], None] = lambda _: None,
    ) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        patience_s = PATIENCE_S if patience_s is None else patience_s
        self._patience = timedelta(seconds=patience_s)
        self._group = group
        self._order = KnownOrder()
        self._events: dict[tuple[str, ...], CollectiveEvent] = {}
        self._missing = MissingGradients(group.group_name, len(self._ranks))
        # A ring, whole from the beginning, so that a long run does not grow by it.
        self._history: list[CollectiveEvent | None] = [None] * _REMEMBERED_EVENTS
        self._count = 0
        self._lock = threading.Lock()
        self._is_on = False
        self._has_failed = False
        self._is_synchronized = is_synchronized
        self._is_evaluating = False
        self._watchdog = Watchdog(
            dist.get_rank(),
            self._group.group_name,
            self.call_at,
            patience_s=patience_s,
            on_stuck=on_stuck,
        )

    def attach(self, units: Mapping[str, FSDPModule], root: Module) -> None:
        """Record what these units gather and reduce, for the life of the model.

        Args:
            units: By name, for errors; the unit of all parameters outside of other units has an
                empty name.
            root: The module that each batch goes through.
        """
        for name, unit in units.items():
            named = f"'{name}'" if name else "the parameters outside of all blocks"
            gather = self._event(f"called all_gather of {named}")
            intercept_collectives(
                unit,
                before_gather=partial(self._record, gather),
                before_reduction=partial(self._before_reduction, named),
            )
        root.register_forward_pre_hook(self._before_batch, prepend=True)

    def start(self) -> None:
        """Begin to compare, at the start of a run."""
        self._is_on, self._has_failed, self._is_evaluating = True, False, False
        self._order.restart(START)
        self._missing.begin_run()
        with self._lock:  # a run that failed may have left ranks at different places
            self._count = 0
        self._watchdog.start()

    def record(self, text: str) -> None:
        """Record what this rank does together with the others: ``called all_gather of 'head'``.

        Called before the collective; the text is in the past tense because errors quote it.

        Raises:
            DivergenceError: Another rank made a different call here.
        """
        self._record(self._event(text))

    def end_step(self) -> None:
        """Record an optimizer step; what follows is compared with what followed the last one."""
        self.record("ended an optimizer step")
        self._order.restart(START)
        self._missing.begin_backward()

    def explain(self, error: BaseException) -> None:
        """Put the mismatch into an error that is its consequence, such as a lost connection."""
        self._has_failed = True
        if not self._is_on or isinstance(error, DivergenceError):
            return
        explanation = self._watchdog.diagnose()
        if explanation is not None:
            error.args = (explanation,)

    def stop(self) -> None:
        """Compare no longer, at the end of a run. After a good run, tell ranks that still wait."""
        if self._is_on and not self._has_failed:
            self._watchdog.report_mismatch(self._count, "ended its run")
        self._is_on = False
        self._watchdog.stop()

    def call_at(self, index: int) -> str | None:
        """Return this rank's call by its number from the start; None if it is not known."""
        with self._lock:
            if not max(0, self._count - _REMEMBERED_EVENTS) <= index < self._count:
                return None
            event = self._history[index % _REMEMBERED_EVENTS]
            return None if event is None else event.text

    def _before_reduction(
        self, named: str, reduced: Sequence[str], missing: Sequence[str]
    ) -> ZeroGradients | None:
        """Record a reduction; return the parameters without a gradient that it includes."""
        zeros: set[str] = set()
        if missing and self._is_on and not self._is_synchronized():
            zeros = self._missing.to_include(named, reduced, missing, self._order.expected)
        key = (named, *sorted({*reduced, *zeros}))
        event = self._events.get(key)
        if event is None:
            text, absent = f"reduced the gradients of {named}", sorted({*missing} - zeros)
            event = self._event(f"{text} without {first_of(absent)}" if absent else text, key=key)
            self._missing.learn(event.key, named, key[1:])
        self._record(event)
        return self._missing.note(self._count, zeros) if zeros else None

    def _before_batch(self, module: Module, inputs: object) -> None:
        if self._is_synchronized():
            return
        # The place after the beginning of a batch does not depend on what came before it. So only
        # the turns between training and evaluation need an agreement, not all that follows them.
        if not torch.is_grad_enabled():
            self._is_evaluating = True
            self.record("began an evaluation batch")
            self._order.restart(_EVALUATION)
            return
        self.record("began a training batch")
        self._missing.begin_backward()
        if self._is_evaluating:
            self._is_evaluating = False
            self._order.restart(START)
            self._order.advance(self._event("began a training batch").key)

    def _event(self, text: str, *, key: tuple[str, ...] = ()) -> CollectiveEvent:
        """Return the event of a text, or of a key if the text is a shortened form of it."""
        key = key or (text,)
        event = self._events.get(key)
        if event is None:
            digest = hashlib.blake2b("\0".join(key).encode(), digest_size=7).digest()
            event = self._events[key] = CollectiveEvent(int.from_bytes(digest, "little"), text)
        return event

    def _record(self, event: CollectiveEvent) -> None:
        if not self._is_on or self._is_synchronized():
            return
        with self._lock:
            self._history[self._count % _REMEMBERED_EVENTS] = event
            self._count += 1
        self._watchdog.board.note_progress()
        if not self._order.matches_last(event.key):
            self._check(event)
            self._order.learn(event.key)
            self._order.advance(event.key)

    def _check(self, event: CollectiveEvent) -> None:
        """Compare this event with the other ranks'.

        Collective over the ranks that do not take the known continuation.
        """
        # With the place: where gathers are queued on a GPU, a rank that took the known
        # continuation may have come further before it checks.
        own = torch.tensor([event.key, self._count])
        rows = [torch.zeros_like(own) for _ in self._ranks]
        work = dist.all_gather(rows, own, group=self._group, async_op=True)
        assert work is not None
        self._wait(work, event)
        if all(torch.equal(row, own) for row in rows):
            return
        index = min(int(row[1]) for row in rows) - 1
        texts = gather_objects(self.call_at(index), self._group)
        calls = [
            RankCall(rank, text) for rank, text in zip(self._ranks, texts, strict=True) if text
        ]
        raise DivergenceError(self._watchdog.conclude(describe_mismatch(calls)))

    def _wait(self, work: Work, event: CollectiveEvent) -> None:
        while not self._is_done(work):
            explanation = self._watchdog.diagnose_own(self._count - 1, event.text)
            if explanation is not None:
                raise DivergenceError(explanation)

    def _is_done(self, work: Work) -> bool:
        """Wait for the other ranks for ``patience_s``.

        Raises:
            RuntimeError: A rank is lost.
        """
        try:
            work.wait(self._patience)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it completed just now, or raises its error
        return True

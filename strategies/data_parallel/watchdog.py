"""Explains why ranks issued different collectives, through the failure board of their group.

A rank whose next collective is not the one that the group took here before (see ``order_check.py``)
reports the place and its own call, and waits for the others to agree. A rank that is idle in a
collective reads the reports and answers with its own call at that place. If both calls are equal it
answers nothing, so a slow rank is never taken for one that issued another collective.

Nothing is written while training advances; an idle rank reads one number every few seconds.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from torch._C._distributed_c10d import Store

from boltmesh.errors import BoltMeshError, DivergenceError
from boltmesh.failure_board import FailureBoard
from boltmesh.process import encodable

_MOST_RANKS_NAMED = 8
_GATHER_ANSWERS_S: Final = 0.5
"""Seconds that a rank waits for further answers after the first one."""

_ADVICE = (
    "With sharded parameters all ranks run the same modules in the same order. Let one rank decide "
    "and broadcast, or run the module on every rank and multiply unwanted outputs by zero."
)


class RankCall(NamedTuple):
    """What one rank did at the place where the calls differ."""

    rank: int
    text: str
    """In the past tense: ``called all_gather of 'head'``."""


def describe_mismatch(calls: Iterable[RankCall]) -> str:
    """Return which ranks made which call; the call of most ranks comes last."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(set(calls)):
        by_text.setdefault(text, []).append(rank)
    # Of parties of one size the one with the first rank comes last.
    parties = sorted(by_text.items(), key=lambda party: (len(party[1]), -party[1][0]))
    listed = " while ".join(f"{_name_ranks(ranks)} {text}" for text, ranks in parties)
    return f"Ranks issued different collectives: {listed}. {_ADVICE}"


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    more = len(ranks) - _MOST_RANKS_NAMED
    return f"ranks {named}" + (f" and {more} more" if more > 0 else "")


class _Report(msgspec.Struct, frozen=True):
    """A rank whose call is not the one that the group made here before."""

    rank: int
    index: int
    text: str


class Watchdog:
    """Reports and answers of one rank.

    Args:
        rank: Global rank.
        name: Of the group; the same on all of its ranks.
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
        # With this rank the store may go.
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

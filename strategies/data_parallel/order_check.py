"""Ends a run whose ranks gather different modules with an error that names both.

Under ZeRO each module is gathered from all ranks and its gradients are reduced over all of them,
so every rank has to run the same modules in the same order. A layer that only some ranks run
would pair the collective of one module with that of another: wrong numbers where the sizes
happen to fit, an abort or a hang where they do not.

Every gather and every reduction is compared with what came at this place before. Where a step is
as the last one nothing is sent; where it is not, the ranks agree before they go on. See [Note:
Ranks part only where somebody asks] in ``route.py``. A rank that waits in a collective for one
that never comes is told by a thread of its own, see ``standstill.py``.

Which collective follows which: what ranks have agreed on once they need not agree on again.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from boltmesh.errors import DivergenceError
from boltmesh.strategies.data_parallel.watchdog import RankReport, Watchdog, describe_parting
from boltmesh.strategies.torch_compat.fsdp_hooks import intercept_collectives

START: Final = 0

_MOST_REMEMBERED: Final = 1 << 20
"""Places; a model that never does the same twice must not fill the memory with what it did."""

_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


class KnownOrder:
    """Where this rank is in the order of collectives, and what came next the last time.

    [Note: Ranks part only where somebody asks]
    At each place one continuation is free: the one that the ranks took there last. Whoever takes
    another one asks all others first. Ranks that are at one place hold one table, for it changes
    in agreement alone. So two ranks that go on differently are never both free: at least one of
    them asks, is not answered by those that took the free one, and stays away from the collective
    that these wait in. No collective of one module is ever paired with that of another.

    A place is a hash of all that was passed since the last ``restart``.
    """

    def __init__(self) -> None:
        self._place = START
        self._next: dict[int, int] = {}

    def learn(self, event: int) -> None:
        """Make this the free continuation; all ranks do so at once."""
        if len(self._next) >= _MOST_REMEMBERED:
            self._next.clear()
        self._next[self._place] = event

    def take_free(self, event: int) -> bool:
        """Go on by one event if it is the free continuation; return whether it is."""
        if self._next.get(self._place) != event:
            return False
        self._place = (self._place * _PRIME ^ event) & _MASK
        return True

    def advance(self, event: int) -> None:
        """Go on by one event."""
        self._place = (self._place * _PRIME ^ event) & _MASK

    def restart(self, place: int = START) -> None:
        """Go to a place by name, however this rank came to be here."""
        self._place = place


PATIENCE_S: Final = 10.0
"""How long a rank may stand at one place before it asks where the others are."""

_REMEMBERED_EVENTS: Final = 1 << 16
"""On a GPU the host runs ahead of a gather that never completes, by at most a few steps."""

_MOST_NAMES: Final = 3
_EVALUATION: Final = 1
"""The place where each batch of evaluation begins."""


class CollectiveEvent(NamedTuple):
    """Something that all ranks have to do in the same order."""

    key: int
    """A hash of the text that is the same on every rank."""
    text: str


class OrderCheck:
    """Compares what the ranks of a group gather and reduce. Collective to make, over the group.

    Args:
        group: The ranks that share a model.
        is_settled: Whether somebody else sees to it just now that all ranks gather alike, so that
            nothing is compared. Has to be the same on all ranks.
        patience_s: Instead of PATIENCE_S.
        timeout: How long a rank may wait for an agreement at most; None: torch's default.
        on_stuck: Told, from another thread, when this rank cannot be reached: the others have
            parted from it and its training hangs. The process ends after it returns.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        is_settled: Callable[[], bool] = lambda: False,
        patience_s: float | None = None,
        timeout: timedelta | None = None,
        on_stuck: Callable[[DivergenceError], None] = lambda _: None,
    ) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        patience_s = PATIENCE_S if patience_s is None else patience_s
        self._patience = timedelta(seconds=patience_s)
        # Of its own, so that a question is never taken for a gather, and on the CPU, so that it
        # waits for no kernel.
        self._group = dist.new_group(
            self._ranks,
            timeout,
            backend="gloo",
            use_local_synchronization=True,
            group_desc="divergence",
        )
        self._route = KnownOrder()
        self._events: dict[tuple[str, ...], CollectiveEvent] = {}
        self._history: deque[CollectiveEvent] = deque(maxlen=_REMEMBERED_EVENTS)
        self._count = 0
        self._lock = threading.Lock()
        self._moved_s = time.monotonic()
        self._is_on = False
        self._has_failed = False
        self._is_settled = is_settled
        self._is_evaluating = False
        self._standstill = Watchdog(
            dist.get_rank(),
            self._group.group_name,
            self.passed,
            self.idle_s,
            patience_s=patience_s,
            on_stuck=on_stuck,
        )

    def watch(self, units: Mapping[str, FSDPModule], root: Module) -> None:
        """Follow what these units gather and reduce, until the model goes.

        Args:
            units: By the names that errors give them; the one that gathers what no other does
                has an empty name.
            root: What each batch goes through.
        """
        for name, unit in units.items():
            named = f"'{name}'" if name else "what is in no block"
            gather = self._event(f"gathers {named}")
            intercept_collectives(
                unit,
                before_gather=partial(self._pass, gather),
                before_reduction=partial(self._before_reduction, named),
            )
        root.register_forward_pre_hook(self._before_batch, prepend=True)

    def start(self) -> None:
        """Begin to compare, at the start of a run."""
        self._is_on, self._has_failed, self._is_evaluating = True, False, False
        self._route.restart(START)
        with self._lock:  # a run that failed may have left ranks at different places
            self._history.clear()
            self._count = 0
        self._standstill.start()

    def note(self, text: str) -> None:
        """Say what this rank is about to do together with the others: ``gathers 'head'``.

        Raises:
            DivergenceError: Another rank is about to do something else.
        """
        self._pass(self._event(text))

    def end_step(self) -> None:
        """Say that an optimizer has stepped; what follows is compared with what followed then."""
        self.note("ends a step")
        self._route.restart(START)

    def explain(self, error: BaseException) -> None:
        """Put the divergence into an error that is its consequence, such as a lost connection."""
        self._has_failed = True
        if not self._is_on or isinstance(error, DivergenceError):
            return
        verdict = self._standstill.verdict or self._standstill.ask()
        if verdict is not None:
            error.args = (verdict,)

    def stop(self) -> None:
        """Compare no longer, at the end of a run; of a good one tell who still waits for this."""
        if self._is_on and not self._has_failed:
            self._standstill.leave(self._count, "has ended its run")
        self._is_on = False
        self._standstill.stop()

    def passed(self, index: int) -> str | None:
        """Return what this rank did at a place, by its number; None where it does not know."""
        with self._lock:
            at = index - (self._count - len(self._history))
            return self._history[at].text if 0 <= at < len(self._history) else None

    def idle_s(self) -> float:
        """Return how long ago this rank noted anything."""
        return time.monotonic() - self._moved_s

    def _before_reduction(self, named: str, reduced: Sequence[str], missing: Sequence[str]) -> None:
        key = (named, *reduced)
        event = self._events.get(key)
        if event is None:
            whole = f"reduces the gradients of {named}"
            said = f"{whole} without {_shorten(missing)}" if missing else whole
            event = self._event(said, of=key)
        self._pass(event)

    def _before_batch(self, module: Module, inputs: object) -> None:
        if self._is_settled():
            return
        # A batch is what it is whatever came before it, so that the turns between training and
        # evaluation are asked about and not all that follows them.
        if not torch.is_grad_enabled():
            self._is_evaluating = True
            self.note("begins a batch of evaluation")
            self._route.restart(_EVALUATION)
            return
        self.note("begins a training batch")
        if self._is_evaluating:
            self._is_evaluating = False
            self._route.restart(START)
            self._route.advance(self._event("begins a training batch").key)

    def _event(self, text: str, *, of: tuple[str, ...] = ()) -> CollectiveEvent:
        """Return the event of a text, or of what stands behind a text that was shortened."""
        key = of or (text,)
        event = self._events.get(key)
        if event is None:
            digest = hashlib.blake2b("\0".join(key).encode(), digest_size=7).digest()
            event = self._events[key] = CollectiveEvent(int.from_bytes(digest, "little"), text)
        return event

    def _pass(self, event: CollectiveEvent) -> None:
        if not self._is_on or self._is_settled():
            return
        with self._lock:
            self._history.append(event)
            self._count += 1
            self._moved_s = time.monotonic()
        if not self._route.take_free(event.key):
            self._agree(event)
            self._route.learn(event.key)
            self._route.advance(event.key)

    def _agree(self, event: CollectiveEvent) -> None:
        """Ask what the others do here. Collective over those that take no free continuation."""
        # With the place: where gathers are queued on a GPU, one that took the free continuation
        # may have come further before it asks.
        mine = torch.tensor([event.key, self._count])
        found = [torch.zeros_like(mine) for _ in self._ranks]
        work = dist.all_gather(found, mine, group=self._group, async_op=True)
        assert work is not None
        self._wait(work, event)
        if all(torch.equal(each, mine) for each in found):
            return
        at = min(int(each[1]) for each in found) - 1
        texts: list[str | None] = [None] * len(self._ranks)
        dist.all_gather_object(texts, self.passed(at), group=self._group)
        said = [
            RankReport(rank, text) for rank, text in zip(self._ranks, texts, strict=True) if text
        ]
        raise DivergenceError(self._standstill.settle(describe_parting(said)))

    def _wait(self, work: Work, event: CollectiveEvent) -> None:
        while not self._is_done(work):
            verdict = self._standstill.ask_who_stays(self._count - 1, event.text)
            if verdict is not None:
                raise DivergenceError(verdict)

    def _is_done(self, work: Work) -> bool:
        """Wait for the others as long as patience lasts; raises where one of them is lost."""
        try:
            work.wait(self._patience)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it came just now, or raises what is the matter
        return True


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")

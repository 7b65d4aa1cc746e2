"""Runs the steps of chunks on the worker: guessed, committed, corrected, taken back."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from boltmesh.strategies.offload.buckets import Bucket, Chunk, Slot
from boltmesh.strategies.offload.copies import ParameterCopies
from boltmesh.strategies.offload.gradients import BucketGradients
from boltmesh.strategies.offload.rule import ChunkStep, Update, UpdateRule
from boltmesh.strategies.offload.tiers import CHUNK_NUMEL
from boltmesh.strategies.offload.worker import Job, Worker

NUMEL_AHEAD = 3 * CHUNK_NUMEL
"""Elements to read ahead of the chunk that is stepped."""

_Action = Callable[[ChunkStep], None]


@dataclass(frozen=True)
class BucketStep:
    """All that a step of a bucket depends on."""

    rule: UpdateRule
    gradients: BucketGradients
    updates: Mapping[Slot, Update]


@dataclass
class _Guess:
    step: BucketStep
    jobs: list[tuple[Chunk, Job]] = field(default_factory=list)


class Stepper:
    """Steps buckets chunk by chunk on a thread of its own.

    Args:
        copies: Where stepped parameters go.
        num_threads: What torch may use inside of one operator there.
        device: What the thread works with.
    """

    def __init__(self, copies: ParameterCopies, *, num_threads: int, device: torch.device) -> None:
        self.counts: Counter[str] = Counter()
        """How chunks were stepped: ``plain``, ``committed``, ``corrected`` or ``undone``."""
        self.worker = Worker(num_threads=num_threads, look_ahead=_prefetch, device=device)
        # Who forgets the engine does not keep a thread, and none may be within torch when the
        # interpreter ends: that aborts the process.
        weakref.finalize(self, self.worker.close)
        self._copies = copies
        self._guesses: dict[Bucket, _Guess] = {}
        self._pending: dict[Bucket, list[Job]] = {}

    def is_guessed(self, bucket: Bucket) -> bool:
        """Whether the bucket is stepped, or about to be, without the clipping being known."""
        return bucket in self._guesses

    def guess(self, bucket: Bucket, step: BucketStep) -> None:
        """Step as if nothing was clipped."""
        guess = self._guesses[bucket] = _Guess(step)
        for chunk in bucket.chunks:
            action = partial(step.rule.apply, coefficient=1.0)
            guess.jobs.append((chunk, self._submit(chunk, step, action)))

    def step(self, bucket: Bucket, step: BucketStep, coefficient: float) -> None:
        """Step with ``coefficient`` times the gradients, whatever was guessed."""
        guess = self._guesses.get(bucket)
        is_usable = guess is not None and guess.step.updates == step.updates
        if guess is not None and not is_usable:
            self.undo(bucket)  # somebody changed a learning rate after the backward pass
            guess = None
        self._guesses.pop(bucket, None)
        guessed = dict(guess.jobs) if guess is not None else {}
        for chunk in bucket.chunks:
            job = guessed.get(chunk)
            action: _Action
            if job is None or self.worker.cancel(job):
                action, how = partial(step.rule.apply, coefficient=coefficient), "plain"
            elif coefficient == 1.0:
                self.counts["committed"] += 1
                continue
            else:
                action, how = partial(step.rule.correct, coefficient=coefficient), "corrected"
            self.counts[how] += 1
            self._submit(chunk, step, action)

    def undo(self, bucket: Bucket) -> None:
        """Take back what was guessed."""
        guess = self._guesses.pop(bucket, None)
        if guess is None:
            return
        for chunk, job in guess.jobs:
            if not self.worker.cancel(job):
                self.counts["undone"] += 1
                self._submit(chunk, guess.step, guess.step.rule.undo)

    def is_busy(self, bucket: Bucket) -> bool:
        """Whether steps of a bucket are pending."""
        return any(not job.is_done for job in self._pending.get(bucket, ()))

    def wait(self, bucket: Bucket) -> None:
        """Return when the bucket's submitted steps are done."""
        for job in self._pending.pop(bucket, ()):
            job.wait()
        self.worker.raise_error()

    def drain(self) -> None:
        """Return when everything submitted is done."""
        self.worker.drain()
        self._pending.clear()

    def _submit(self, chunk: Chunk, step: BucketStep, action: _Action) -> Job:
        job = Job(partial(self._run, chunk, step, action), chunk)
        pending = self._pending.get(chunk.bucket, [])
        self._pending[chunk.bucket] = [each for each in pending if not each.is_done] + [job]
        return self.worker.submit(job)

    def _run(self, chunk: Chunk, step: BucketStep, action: _Action) -> None:
        step.gradients.wait()
        pieces = step.gradients.pieces(chunk)
        if not pieces:
            return
        assert chunk.store is not None
        state = chunk.store.acquire(chunk.number)
        try:
            action(ChunkStep(state, chunk.start, pieces, step.updates))
            self._copies.update(chunk, state[0], pieces)
        finally:
            chunk.store.release(chunk.number, is_dirty=True)


def _prefetch(jobs: Sequence[Job]) -> None:
    ahead = 0
    for job in jobs:
        chunk = job.chunk
        if isinstance(chunk, Chunk) and chunk.store is not None:
            chunk.store.prefetch(chunk.number)
            ahead += chunk.numel
        if ahead > NUMEL_AHEAD:
            break

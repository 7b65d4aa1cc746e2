"""Runs the steps of chunks on the worker: guessed, committed, corrected, taken back.

``BucketGradients`` are what they step with: taken from the device as they arrive, kept until then.
``Worker`` is the thread that steps offloaded state while the training thread goes on. One thread is
enough: the kernels and the disk release the interpreter's lock, and the kernels are parallel
inside. Norms are urgent, since the training thread waits for them before it can clip.
"""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from boltmesh.strategies.grad_norm import tensor_norm
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.offload.buckets import Bucket, BucketChunk, Piece, Slot
from boltmesh.strategies.offload.memory_stores import ParameterCopies
from boltmesh.strategies.offload.store_api import CHUNK_NUMEL
from boltmesh.strategies.offload.streams import CopyStream, own_stream, use_device
from boltmesh.strategies.offload.update_rule import ChunkStep, PieceGradient, Update, UpdateRule
from boltmesh.strategies.topology.devices import CORES
from boltmesh.strategies.torch_compat.tensors import event_on_stream


class BucketGradients:
    """What has arrived for one step of one bucket.

    On the CPU gradients stay where FSDP2 made them. From an accelerator those of chunks that are
    not kept there are copied to ``host``, and their norm is computed before they leave.

    Args:
        bucket: Whose they are.
        device: Where they arrive.
        host: Flat memory for a copy, laid out as ``Bucket.host_offsets`` says; None on the CPU.
        lane: Where copies run.
    """

    def __init__(
        self, bucket: Bucket, device: torch.device, host: Tensor | None, lane: CopyStream
    ) -> None:
        self.bucket = bucket
        self._device = device
        self._host = host
        self._host_offsets = {} if host is None else bucket.host_offsets()
        self._lane = lane
        self._held: dict[Slot, Tensor] = {}
        self._copied: torch.Event | None = None
        self._norms: Tensor | None = None
        self._square: float | None = None
        self._is_sent = False
        self._is_on_host = False
        self.num_arrivals = 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The parameters that have a gradient."""
        return tuple(slot for slot in self.bucket.slots if slot in self._held)

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Take this rank's shard of a gradient; a second one of the same parameter is added."""
        self.num_arrivals += 1
        self._square = self._norms = None
        self._is_sent = False
        gradient = gradient.detach().reshape(-1)
        if self._is_on_host:
            gradient = gradient.cpu()  # as those that it joins
        before = self._held.get(slot)
        self._held[slot] = gradient if before is None else before.add_(gradient)

    def send(self) -> None:
        """Begin what has to happen on the device: the norm, and the copy to the host.

        Once for what has arrived: the worker may be reading what the first call has begun.
        """
        if self._device.type == "cpu" or not self._held or self._is_sent:
            return
        self._is_sent = True
        submitted = event_on_stream(self._device)
        with self._lane.after(submitted):
            norms = torch.stack([tensor_norm(each) for each in self.tensors()])
            self._norms = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
            self._norms.copy_(norms, non_blocking=True)
            copies = [
                (self._on_host(chunk, piece), _part(self._held[piece.slot], piece))
                for chunk in self._host_offsets
                for piece in chunk.pieces()
                if piece.slot in self._held
            ]
            if copies:
                with self._lane.meter.copy("write", sum(each.nbytes for _, each in copies)):
                    for into, gradient in copies:
                        into.copy_(gradient, non_blocking=True)
            self._copied = event_on_stream(self._device)

    def is_copied(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Return when the copies to the host are done."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
            if self._host is not None and len(self._host_offsets) == len(self.bucket.chunks):
                # All of them are there, as they lie in the bucket.
                self._held = {
                    slot: self._host[slot.offset : slot.offset + slot.numel] for slot in self._held
                }
                self._is_on_host = True

    def square(self) -> float:
        """The sum of squares of what this rank counts. It is computed where the gradients are."""
        if self._square is None:
            if self._norms is not None:
                self.wait()
                norms = self._norms
            else:
                norms = torch.stack([tensor_norm(each) for each in self.tensors()])
            self._square = float(norms.double().square().sum())
        return self._square

    def tensors(self) -> list[Tensor]:
        """What this rank counts of the gradients, flat, as few tensors as they lie in.

        Neighbours in one storage are one tensor: what is between them is zero.
        """
        merged: list[Tensor] = []
        expected = -1
        for slot in self.slots:
            gradient = self._held[slot]
            if not gradient.numel() or not slot.is_counted:
                continue
            here = int(gradient.storage_offset())
            if merged and _is_same_storage(merged[-1], gradient) and here == expected:
                start = int(merged[-1].storage_offset())
                numel = here + gradient.numel() - start
                merged[-1] = merged[-1].as_strided((numel,), (1,), start)
            else:
                merged.append(gradient)
            expected = here + slot.padded_numel
        return merged or [torch.zeros(1, device=self._device)]

    def held(self) -> list[Tensor]:
        """The tensors that hold them."""
        return list(self._held.values())

    def pieces(self, chunk: BucketChunk) -> list[PieceGradient]:
        """The gradients of a chunk, on the device of its state."""
        return [
            PieceGradient(
                piece,
                self._on_host(chunk, piece)
                if chunk in self._host_offsets
                else _part(self._held[piece.slot], piece),
            )
            for piece in chunk.pieces()
            if piece.slot in self._held
        ]

    def _on_host(self, chunk: BucketChunk, piece: Piece) -> Tensor:
        assert self._host is not None
        begin = self._host_offsets[chunk] - chunk.start
        return self._host[begin + piece.start : begin + piece.stop]


def _part(of_slot: Tensor, piece: Piece) -> Tensor:
    return of_slot[piece.start - piece.slot.offset : piece.stop - piece.slot.offset]


def _is_same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


CPU = torch.device("cpu")


class WorkerTask:
    """Something for the worker to do, once."""

    def __init__(
        self,
        run: Callable[[], None],
        chunk: object = None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.chunk = chunk
        self.is_ready = is_ready
        """False while it would only wait for the device; others go first then."""
        self.submitted: torch.Event | None = None
        """Passes when the device has done what was submitted before the task."""
        self._run = run
        self._is_done = threading.Event()

    def wait(self) -> None:
        """Return when it has run, or when it never will."""
        self._is_done.wait()

    @property
    def is_done(self) -> bool:
        """Whether it has run."""
        return self._is_done.is_set()

    def run(self, stream: torch.Stream | None = None) -> None:
        """Do it, on the worker; done is what the device has done."""
        try:
            self._run()
            if stream is not None:
                stream.synchronize()
        finally:
            self._run = noop  # holds gradients
            self._is_done.set()

    def drop(self) -> None:
        """It will never run."""
        self._run = noop
        self.chunk = None  # holds its store, and the thread its last job
        self._is_done.set()


class Worker:
    """Runs jobs one after the other on a thread of its own; the first error stops all."""

    def __init__(
        self,
        *,
        num_threads: int,
        look_ahead: Callable[[Sequence[WorkerTask]], None] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Start the thread.

        Args:
            num_threads: What torch may use inside of one operator there.
            look_ahead: Called on the worker before each job with those that follow.
            device: What jobs work with.
        """
        self._num_threads = num_threads
        self._look_ahead = look_ahead
        self._device = device
        self._jobs: deque[WorkerTask] = deque()
        self._urgent: deque[WorkerTask] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="boltmesh-offload", daemon=True)
        self._thread.start()

    def submit(self, job: WorkerTask, *, is_urgent: bool = False) -> WorkerTask:
        """Queue a job, before those that are not urgent if it is."""
        self.raise_error()
        job.submitted = event_on_stream(self._device)
        with self._changed:
            (self._urgent if is_urgent else self._jobs).append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: WorkerTask) -> bool:
        """Take a job out of the queue. False when it has begun: then wait for it."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
        job.drop()
        return True

    def drain(self) -> None:
        """Return when nothing is left to do.

        Raises:
            BaseException: The first that a job raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._jobs or self._urgent or self._is_busy))
        self.raise_error()

    def raise_error(self) -> None:
        """Raise what a job raised, at each call: nothing after it can be trusted."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; jobs that have not begun are dropped."""
        with self._changed:
            self._is_closed = True
            self._drop_all()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _drop_all(self) -> None:
        for job in (*self._urgent, *self._jobs):
            job.drop()
        self._urgent.clear()
        self._jobs.clear()

    def _next(self) -> WorkerTask | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._urgent or self._is_closed)
            if self._is_closed:
                return None
            self._is_busy = True
            # The host of a GPU is a whole backward pass ahead of the gradients that it waits for.
            is_urgent = self._urgent and (not self._jobs or self._urgent[0].is_ready())
            return (self._urgent if is_urgent else self._jobs).popleft()

    def _following(self) -> list[WorkerTask]:
        with self._changed:
            return list(self._jobs)

    def _work(self) -> None:
        use_device(self._device)
        torch.set_num_threads(self._num_threads)  # holds for the calling thread
        with torch.no_grad(), own_stream(self._device) as stream:
            while (job := self._next()) is not None:
                self._run(job, stream)

    def _run(self, job: WorkerTask, stream: torch.Stream | None) -> None:
        try:
            if stream is not None and job.submitted is not None:
                stream.wait_event(job.submitted)
            if self._look_ahead is not None and job.chunk is not None:
                self._look_ahead([job, *self._following()])
            job.run(stream)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            with self._changed:
                self._error = self._error or error
                self._drop_all()
        finally:
            job.drop()  # in case that looking ahead failed, and it has not run


def worker_threads(device: torch.device, ranks_per_node: int) -> int:
    """What the worker may use of the host: beside an accelerator, the cores less two."""
    if device.type == "cpu":
        return torch.get_num_threads()
    return max(1, CORES.num_cores() // max(1, ranks_per_node) - 2)


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
    jobs: list[tuple[BucketChunk, WorkerTask]] = field(default_factory=list)


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
        self._pending: dict[Bucket, list[WorkerTask]] = {}

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
        self._copies.wait_for_all()
        self._pending.clear()

    def _submit(self, chunk: BucketChunk, step: BucketStep, action: _Action) -> WorkerTask:
        job = WorkerTask(partial(self._run, chunk, step, action), chunk)
        pending = self._pending.get(chunk.bucket, [])
        self._pending[chunk.bucket] = [each for each in pending if not each.is_done] + [job]
        return self.worker.submit(job)

    def _run(self, chunk: BucketChunk, step: BucketStep, action: _Action) -> None:
        step.gradients.wait()
        pieces = step.gradients.pieces(chunk)
        if not pieces:
            return
        assert chunk.store is not None
        self._copies.wait(chunk)
        state = chunk.store.acquire(chunk.number)
        try:
            action(ChunkStep(state, chunk.start, pieces, step.updates))
            self._copies.update(chunk, state[0], pieces)
        finally:
            chunk.store.release(chunk.number, is_dirty=True)


def _prefetch(jobs: Sequence[WorkerTask]) -> None:
    ahead = 0
    for job in jobs:
        chunk = job.chunk
        if isinstance(chunk, BucketChunk) and chunk.store is not None:
            chunk.store.prefetch(chunk.number)
            ahead += chunk.numel
        if ahead > NUMEL_AHEAD:
            break

"""Runs the steps of chunks on a worker thread: speculative, committed, corrected, undone.

``BucketGradients`` holds the gradients of a step from their arrival on the device until the step.
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
    """The gradients that have arrived for one step of one bucket.

    On the CPU gradients stay where FSDP2 made them. On an accelerator those of chunks stored
    elsewhere are copied to ``host``; their norm is computed before.

    Args:
        bucket: The bucket.
        device: Device of the gradients.
        host: Buffer for copies, fp32, laid out by ``Bucket.host_offsets``; None on the CPU.
        lane: Stream for copies.
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
        """Add this rank's shard of a gradient, of the slot's shape; sums with an earlier one."""
        self.num_arrivals += 1
        self._square = self._norms = None
        self._is_sent = False
        gradient = gradient.detach().reshape(-1)
        if self._is_on_host:
            gradient = gradient.cpu()  # like those that it is added to
        before = self._held.get(slot)
        self._held[slot] = gradient if before is None else before.add_(gradient)

    def send(self) -> None:
        """Begin the work on the device: the norm, and the copy to the host.

        Once per arrival: the worker may be reading the result of the first call.
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
                # All chunks are on the host, in the layout of the bucket.
                self._held = {
                    slot: self._host[slot.offset : slot.offset + slot.numel] for slot in self._held
                }
                self._is_on_host = True

    def square(self) -> float:
        """Return the sum of squares that this rank counts, computed on the gradients' device."""
        if self._square is None:
            if self._norms is not None:
                self.wait()
                norms = self._norms
            else:
                norms = torch.stack([tensor_norm(each) for each in self.tensors()])
            self._square = float(norms.double().square().sum())
        return self._square

    def tensors(self) -> list[Tensor]:
        """Return the gradients that this rank counts, as few flat tensors as possible.

        Neighbours in one storage become one tensor: the padding between them is zero.
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
        """Return the tensors that hold the gradients, flat."""
        return list(self._held.values())

    def chunks(self) -> list[BucketChunk]:
        """Return the chunks of the bucket that have a gradient."""
        chunks = self.bucket.chunks
        return [c for c in chunks if any(each.slot in self._held for each in c.pieces())]

    def pieces(self, chunk: BucketChunk) -> list[PieceGradient]:
        """Return the gradients of a chunk, on the device of its state."""
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
    """A task for the worker, run once."""

    def __init__(
        self,
        run: Callable[[], None],
        chunk: object = None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.chunk = chunk
        self.is_ready = is_ready
        """False while the task would only wait for the device; others run first then."""
        self.submitted: torch.Event | None = None
        """Passes when the device has done the work submitted before the task."""
        self._run = run
        self._is_done = threading.Event()

    def wait(self) -> None:
        """Return when it has run or was dropped."""
        self._is_done.wait()

    @property
    def is_done(self) -> bool:
        """Whether it has run or was dropped."""
        return self._is_done.is_set()

    def run(self, stream: torch.Stream | None = None) -> None:
        """Run on the worker, and wait for the work submitted to ``stream``."""
        try:
            self._run()
            if stream is not None:
                stream.synchronize()
        finally:
            self._run = noop  # holds gradients
            self._is_done.set()

    def drop(self) -> None:
        """Mark as never to be run."""
        self._run = noop
        self.chunk = None  # it references its store, and the thread its last job
        self._is_done.set()


class Worker:
    """Runs jobs one after the other on its own thread; the first error stops all."""

    def __init__(
        self,
        *,
        num_threads: int,
        look_ahead: Callable[[Sequence[WorkerTask]], None] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Start the thread.

        Args:
            num_threads: Threads that torch may use within one operator.
            look_ahead: Called on the worker before each job, with this job and those queued.
            device: Device of the jobs.
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
        """Queue a job; urgent ones run before the others."""
        self.raise_error()
        job.submitted = event_on_stream(self._device)
        with self._changed:
            (self._urgent if is_urgent else self._jobs).append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: WorkerTask) -> bool:
        """Remove a job from the queue; False if it has begun and must be waited for."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
        job.drop()
        return True

    def drain(self) -> None:
        """Return when all jobs are done.

        Raises:
            BaseException: The first error of a job.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._jobs or self._urgent or self._is_busy))
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error of a job, at each call: later results are not reliable."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; drops jobs that have not begun."""
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
            # The host is a whole backward pass ahead of the GPU's gradients that it waits for.
            is_urgent = self._urgent and (not self._jobs or self._urgent[0].is_ready())
            return (self._urgent if is_urgent else self._jobs).popleft()

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
                with self._changed:
                    queued = list(self._jobs)
                self._look_ahead([job, *queued])
            job.run(stream)
        except BaseException as error:  # noqa: BLE001 - raised on the waiting thread
            with self._changed:
                self._error = self._error or error
                self._drop_all()
        finally:
            job.drop()  # if looking ahead failed, it has not run


def worker_threads(device: torch.device, ranks_per_node: int) -> int:
    """Return the CPU threads for the worker: beside an accelerator, this rank's cores less two."""
    if device.type == "cpu":
        return torch.get_num_threads()
    return max(1, CORES.num_cores() // max(1, ranks_per_node) - 2)


NUMEL_AHEAD = 3 * CHUNK_NUMEL
"""Elements that are read ahead of the chunk that is stepped."""

_Action = Callable[[ChunkStep], None]


@dataclass(frozen=True)
class BucketStep:
    """Rule, gradients and updates: everything that determines a bucket's step."""

    rule: UpdateRule
    gradients: BucketGradients
    updates: Mapping[Slot, Update]


@dataclass
class _Guess:
    step: BucketStep
    jobs: list[tuple[BucketChunk, WorkerTask]] = field(default_factory=list)


class Stepper:
    """Steps buckets chunk by chunk on its own thread."""

    def __init__(self, copies: ParameterCopies, *, num_threads: int, device: torch.device) -> None:
        self.counts: Counter[str] = Counter()
        """Chunks stepped by kind: ``plain``, ``committed``, ``corrected`` or ``undone``."""
        self.worker = Worker(num_threads=num_threads, look_ahead=_prefetch, device=device)
        # An engine that was dropped must not keep its thread, and no thread may be within torch
        # when the interpreter exits: that aborts the process.
        weakref.finalize(self, self.worker.close)
        self._copies = copies
        self._guesses: dict[Bucket, _Guess] = {}
        self._pending: dict[Bucket, list[WorkerTask]] = {}

    def is_guessed(self, bucket: Bucket) -> bool:
        """Whether the bucket has a speculative step, run or queued."""
        return bucket in self._guesses

    def guess(self, bucket: Bucket, step: BucketStep) -> None:
        """Step speculatively, as if nothing was clipped."""
        guess = self._guesses[bucket] = _Guess(step)
        for chunk in step.gradients.chunks():
            action = partial(step.rule.apply, coefficient=1.0)
            guess.jobs.append((chunk, self._submit(chunk, step, action)))

    def step(self, bucket: Bucket, step: BucketStep, coefficient: float) -> None:
        """Step with ``coefficient`` times the gradients, after any speculative step."""
        guess = self._guesses.get(bucket)
        is_usable = guess is not None and guess.step.updates == step.updates
        if guess is not None and not is_usable:
            self.undo(bucket)  # a learning rate was changed after the backward pass
            guess = None
        self._guesses.pop(bucket, None)
        guessed = dict(guess.jobs) if guess is not None else {}
        for chunk in step.gradients.chunks():
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
        """Undo the bucket's speculative step."""
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

"""Asynchronous saves: data are copied first, and a thread writes them.

One save at a time. The next save, and the end of the run, wait for it and raise its error.
Deletions that depend on it run after it, and not at all if it fails.

``refuse_beside`` refuses options that would read or use a checkpoint before it is complete.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.chunks import OffloadedChunk, Snapshot, own_chunks, own_part
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, save_into
from boltmesh.strategies.checkpoint.shard_writer import in_stored_order, is_written_here
from boltmesh.strategies.torch_compat.tensors import (
    event_on_stream,
    tree_flatten,
    tree_unflatten,
)


class AsyncSave:
    """The active save, if there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._behind: list[Callable[[], None]] = []
        self._is_running = False
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None], *behind: Callable[[], None]) -> None:
        """Run ``write`` in a thread, then ``behind``. No save may be active; ``wait`` first."""
        assert self._thread is None
        self._is_running = True
        self._behind = list(behind)
        # A daemon thread, so that a rank whose peers hang can end.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="boltmesh-checkpoint", daemon=True
        )
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the active save, now if there is none; never if the save fails."""
        with self._lock:
            if self._error is not None:
                return
            if self._is_running:
                self._behind.append(action)
                return
        action()

    def wait(self) -> None:
        """Wait until no save is active; raise the error of a failed one, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        action: Callable[[], None] | None = write
        while action is not None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised by ``wait``
                with self._lock:
                    self._error, self._is_running = error, False
                    self._behind.clear()
                return
            with self._lock:
                action = self._behind.pop(0) if self._behind else None
                self._is_running = action is not None


def take_snapshot(tensors: dict[str, Any], *, writes_plain: bool) -> dict[str, Any]:
    """Copy this rank's part of tensors in nested dictionaries into host memory.

    Args:
        tensors: The tensors of a checkpoint that are stored as shards.
        writes_plain: Whether this rank writes tensors that are not shards.
    """
    leaves, nesting = tree_flatten(tensors)
    copies = StagedCopies()
    copied = {
        at: _copy(leaves[at], copies, writes_plain=writes_plain)
        # Offloaded tensors are read in the order in which they are stored.
        for at in sorted(range(len(leaves)), key=lambda at: in_stored_order(leaves[at]))
    }
    made: dict[str, Any] = tree_unflatten([copied[at] for at in range(len(leaves))], nesting)
    return made


def serialised(value: Mapping[str, Any]) -> bytes:
    """Return the bytes that ``torch.save`` writes of a value."""
    with BytesIO() as stream:
        save_into(dict(value), stream)
        return stream.getvalue()


STAGED_BYTES = 64 << 20
"""Size of each of two buffers; copies of this size run at the speed of the bus."""


class StagedCopies:
    """Copies tensors from a GPU into host memory, through two page-locked buffers.

    One buffer is filled while the other is emptied. A direct copy into memory that is not locked
    takes ten times as long, and training waits for it.

    Args:
        num_bytes: Size of each buffer, in bytes.
    """

    def __init__(self, num_bytes: int = STAGED_BYTES) -> None:
        self._num_bytes = num_bytes
        self._buffers: list[Tensor] = []

    def copy(self, value: Tensor, into: Tensor) -> None:
        """Copy a tensor into one on the host, of equal shape and dtype. Waits for the copy."""
        device = value.device
        if device.type != "cuda" or value.layout != torch.strided:
            into.copy_(value)
            return
        self.copy_bytes(_bytes_of(value.contiguous()), _bytes_of(into))

    def copy_bytes(self, source: Tensor, target: Tensor) -> None:
        """Copy ``uint8`` ``(num_bytes,)`` into another tensor of this size. Waits for the copy."""
        if not self._buffers:
            is_locked = source.is_cuda
            made = partial(torch.empty, self._num_bytes, dtype=torch.uint8, pin_memory=is_locked)
            self._buffers = [made(), made()]
        pending: deque[tuple[torch.Event | None, Tensor, Tensor]] = deque()
        pairs = zip(*(torch.split(each, self._num_bytes) for each in (source, target)), strict=True)
        for number, (part, there) in enumerate(pairs):
            if len(pending) == len(self._buffers):
                _finish(*pending.popleft())
            buffer = self._buffers[number % 2][: part.numel()]
            buffer.copy_(part, non_blocking=True)
            pending.append((event_on_stream(source.device), buffer, there))
        for each in pending:
            _finish(*each)


def _finish(copied: torch.Event | None, buffer: Tensor, there: Tensor) -> None:
    if copied is not None:
        copied.synchronize()
    there.copy_(buffer)


def _bytes_of(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).view(torch.uint8)


def _copy(tensor: Tensor, copies: StagedCopies, *, writes_plain: bool) -> Snapshot:
    if not is_written_here(tensor, writes_plain=writes_plain):
        return Snapshot.of(tensor, [], None)
    part = own_part(tensor)
    value = part.read() if isinstance(part, OffloadedChunk) else part
    copied = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    with torch.no_grad():
        copies.copy(value.to_local() if isinstance(value, DTensor) else value, copied)
    return Snapshot.of(tensor, own_chunks(tensor), copied)


def refuse_beside(
    trainer: Trainer, checkpoint_io: CheckpointIO, *, keeps_state_on_disk: bool
) -> None:
    """Refuse options that do not work with ``async_save=True``.

    Args:
        trainer: The Trainer with the callbacks.
        checkpoint_io: The plugin that writes files.
        keeps_state_on_disk: Whether state is offloaded to a disk, so that a copy may not fit.

    Raises:
        ConfigError: Naming the option and what to do instead.
    """
    if keeps_state_on_disk:
        raise ConfigError(
            "async_save=True copies this rank's share of model and optimizer into host memory, and "
            "offload to 'nvme' is for what does not fit there. Leave one of them out."
        )
    if not isinstance(checkpoint_io, AtomicCheckpointIO):
        raise ConfigError(
            f"async_save=True writes checkpoints itself and would never call "
            f"{type(checkpoint_io).__name__}. Leave one of them out."
        )
    named: dict[tuple[object, object], ModelCheckpoint] = {}
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.save_last == "link":
            raise ConfigError(
                "ModelCheckpoint(save_last='link') would link to a checkpoint that async_save=True "
                "has not written yet. Use save_last=True, or leave it out: the newest complete "
                "checkpoint is the last."
            )
        place = (callback.dirpath, callback.filename)
        if place in named:
            raise ConfigError(
                f"Two ModelCheckpoints save under the same name ({callback.filename!r} in "
                f"{callback.dirpath!r}), and with async_save=True the second cannot see that the "
                f"first has taken it. Give one of them a filename or dirpath of its own."
            )
        named[place] = callback

"""Activation offload: inputs of recomputed blocks are stored off the device until backward.

Activation checkpointing keeps the input of each block on the device from forward to backward. Here
it is copied to host memory on a stream of its own, beside the computation, and freed on the device;
with a folder it is then written to a file there. The backward pass copies it back ahead of its use.
The two newest inputs stay on the device, since the backward pass begins with them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Event, Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.offload.disk.swap_file import Extent, Swap
from boltmesh.strategies.offload.host_memory import allocate_host, round_up
from boltmesh.strategies.offload.streams import CopyStream, wait_on_stream
from boltmesh.strategies.torch_compat.tensors import (
    event_on_stream,
    storage_ref,
    times_written,
    tree_leaves,
)
from boltmesh.telemetry.writer.memory import StoredBytes
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

if TYPE_CHECKING:
    from boltmesh.strategies.offload.disk.transfer import Ticket

IN_FLIGHT = 2
"""Inputs on the device beside those in use: being copied away, or back before their use."""

MIN_BYTES = 64 << 10
"""Smaller tensors stay: submitting a copy takes longer than the copy."""

NUM_THREADS = 2
"""Threads of a file, per direction."""


class OffloadSpace:
    """Host memory for inputs, and a file that host memory is copied to.

    Both are reused, also by later steps. The file is in ``folder``, if there is one.
    """

    def __init__(
        self,
        device: torch.device,
        folder: Path | None,
        *,
        rank: int,
        recorder: Recorder | NullRecorder | None,
    ) -> None:
        self.device = device
        self.stream = CopyStream(device, recorder)
        self.swap: Swap | None = None
        if folder is not None:
            self.swap = Swap(folder, rank=rank, recorder=recorder, num_threads=NUM_THREADS)
        self._hosts: dict[int, list[Tensor]] = {}
        self._extents: dict[int, list[Extent]] = {}
        self.host_bytes = 0
        """Host memory allocated so far."""
        self.disk_bytes = 0
        """Space of the file allocated so far."""

    def take_host(self, num_bytes: int) -> Tensor:
        """Return host memory for one input: ``uint8``, whole pages of at least this size."""
        free = self._hosts.setdefault(round_up(num_bytes), [])
        if free:
            return free.pop()
        self.host_bytes += round_up(num_bytes)
        return allocate_host(round_up(num_bytes), device=self.device)

    def take_extent(self, num_bytes: int) -> Extent:
        """Return a range of the file; ``num_bytes`` is the size of the host memory to write."""
        assert self.swap is not None
        free = self._extents.setdefault(num_bytes, [])
        if free:
            return free.pop()
        self.disk_bytes += num_bytes
        return self.swap.allocate("the input of a block", num_bytes)

    def copy(self, direction: Literal["read", "write"], to: Tensor, of: Tensor) -> Event | None:
        """Submit a copy after the work submitted so far; later work does not wait for it.

        Returns:
            An event that passes when the copy is done; None on the CPU, where it is done.
        """
        with self.stream.after(event_on_stream(self.device)):
            with self.stream.meter.copy(direction, of.numel() * of.element_size()):
                to.copy_(of, non_blocking=True)
            return event_on_stream(self.device)

    def recycle(self, host: Tensor | None, extent: Extent | None) -> None:
        """Make memory and a range of the file available to later inputs.

        Copies between device and host run in order on one stream, so host memory may be passed
        while it is still being copied from.
        """
        if host is not None:
            self._hosts.setdefault(host.numel(), []).append(host)
        if extent is not None:
            self._extents.setdefault(extent.num_bytes, []).append(extent)

    def close(self) -> None:
        """Free memory and file."""
        self._hosts.clear()
        self._extents.clear()
        if self.swap is not None:
            self.swap.close()


class SavedInput:
    """An input of a block: on the device, in host memory, in the file, or in transfer.

    Args:
        tensor: The input, any shape and float dtype. Its copy to host memory is submitted here.
        number: Its index among all inputs.
        space: Host memory and file.
    """

    def __init__(self, tensor: Tensor, number: int, space: OffloadSpace) -> None:
        self.number = number
        self._space = space
        self._storage = storage_ref(tensor)
        self._version = times_written(tensor)
        self._like = torch.empty_like(tensor, device="meta")  # dense, its dimensions in their order
        self._value: Tensor | None = tensor
        self._is_original = True
        self._host: Tensor | None = space.take_host(tensor.numel() * tensor.element_size())
        self._extent: Extent | None = None
        self._transfer: Ticket | None = None
        self._copied = space.copy("write", self._host_value(), tensor)

    def __del__(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        self._space.recycle(self._host, self._extent)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it was made of this memory, and the memory was not written to since."""
        return (
            not self._storage.expired()
            and self._storage == storage_ref(tensor)
            and self._version == times_written(tensor)
            and (self._like.dtype, self._like.shape) == (tensor.dtype, tensor.shape)
        )

    def leave(self) -> None:
        """Free the device's memory once the copy is done, and begin to write to the file."""
        self._refuse_writes()
        wait_on_stream(self._space.device, self._copied)
        self._value = None
        if self._space.swap is not None:
            assert self._host is not None
            self._wait_for_copy()
            self._extent = self._space.take_extent(self._host.numel())
            self._transfer = self._space.swap.write(self._extent, self._host)

    def free_host(self) -> None:
        """Free host memory once its content is in the file."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
            self._space.recycle(self._host, None)
            self._host = None

    def begin_return(self) -> bool:
        """Submit the next copy towards the device. False if there is nothing to submit."""
        if self._value is not None or self._transfer is not None:
            return False
        if self._host is not None:
            self._copy_to_device()
        else:
            assert self._extent is not None
            assert self._space.swap is not None
            self._host = self._space.take_host(self._extent.num_bytes)
            self._transfer = self._space.swap.read(self._extent, self._host)
        return True

    def cancel_return(self) -> None:
        """Free the device memory of an input that was fetched too early."""
        if not self._is_original:
            self._value = None

    def value(self) -> Tensor:
        """Return the input for work on the current stream; the caller then owns it."""
        self._refuse_writes()
        if self._value is None:
            self.begin_return()
            if self._transfer is not None:
                self._transfer.wait()
                self._transfer = None
                self._copy_to_device()
        value = self._value
        assert value is not None
        wait_on_stream(self._space.device, self._copied)
        self._value = None
        if self._extent is not None:
            self._wait_for_copy()  # the file's threads use no streams
            self._space.recycle(self._host, None)
            self._host = None
        return value

    def _host_value(self) -> Tensor:
        assert self._host is not None
        num_bytes = self._like.numel() * self._like.element_size()
        flat = self._host[:num_bytes].view(self._like.dtype)
        return flat.as_strided(self._like.shape, self._like.stride())

    def _copy_to_device(self) -> None:
        host = self._host_value()
        value = torch.empty_strided(
            host.shape, host.stride(), dtype=host.dtype, device=self._space.device
        )
        self._copied = self._space.copy("read", value, host)
        self._value, self._is_original = value, False

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _refuse_writes(self) -> None:
        """Raise if the input was written to while it may have been copied."""
        if (
            self._is_original
            and self._value is not None
            and times_written(self._value) != self._version
        ):
            raise UnsupportedError(
                "The input of a block was modified in place after the block began. "
                "activation_checkpointing runs the block again and needs the input as it was. "
                "Write to a copy: x = x + y in place of x += y."
            )


@runtime_checkable
class PartOfTensor(Protocol):
    """A tensor subclass that holds this rank's part, with autograd on the part."""

    local: Tensor

    def rebuilder(self) -> Callable[[Tensor], Tensor]:
        """Return a function that makes such a tensor of another local one, without this one."""
        ...


@dataclass(frozen=True)
class Part:
    """A saved ``PartOfTensor``."""

    local: Tensor | SavedInput
    rebuild: Callable[[Tensor], Tensor]
    requires_grad: bool


Packed = Tensor | SavedInput | Part


class ActivationOffload:
    """Keeps the inputs of blocks off the device between the forward and the backward pass.

    In host memory, or in a file in ``folder``. Results are equal to the bit.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        rank: int = 0,
        recorder: Recorder | NullRecorder | None = None,
    ) -> None:
        self._make_space = partial(OffloadSpace, folder=folder, rank=rank, recorder=recorder)
        self.space: OffloadSpace | None = None
        """Created for the device of the first input."""
        self._saved: WeakValueDictionary[int, SavedInput] = WeakValueDictionary()
        """All inputs that a backward pass may still need, by number."""
        self._by_address: WeakValueDictionary[int, SavedInput] = WeakValueDictionary()
        self._on_device: deque[SavedInput] = deque()
        self._writing: deque[SavedInput] = deque()
        self._returning: deque[SavedInput] = deque()
        self._count = 0

    @contextmanager
    def saving(self, arguments: object) -> Iterator[None]:
        """Context for a checkpointed call: the tensors that it saves leave the device.

        Only those that need a gradient. Masks and tables, which all blocks share, stay.
        """
        shared = {
            each.data_ptr()
            for each in tree_leaves(arguments)
            if isinstance(each, Parameter) or (type(each) is Tensor and not each.requires_grad)
        }
        with saved_tensors_hooks(partial(self._pack, shared), self._unpack):
            yield

    def stored_bytes(self) -> list[StoredBytes]:
        """Return the host memory and disk space allocated for inputs, in use or free."""
        if self.space is None:
            return []
        taken = [
            StoredBytes("host", self.space.host_bytes),
            StoredBytes("disk", self.space.disk_bytes),
        ]
        return [each for each in taken if each.num_bytes]

    def close(self) -> None:
        """Free memory and file."""
        for waiting in (self._on_device, self._writing, self._returning):
            waiting.clear()
        if self.space is not None:
            self.space.close()
            self.space = None

    def _pack(self, shared: set[int], tensor: Tensor) -> Packed:
        if isinstance(tensor, PartOfTensor):
            part = self._pack_plain(shared, tensor.local.detach())
            return Part(part, tensor.rebuilder(), requires_grad=tensor.local.requires_grad)
        return self._pack_plain(shared, tensor)

    def _unpack(self, packed: Packed) -> Tensor:
        if isinstance(packed, Part):
            local = self._unpack_plain(packed.local).detach()
            return packed.rebuild(local.requires_grad_(packed.requires_grad))
        return self._unpack_plain(packed)

    def _pack_plain(self, shared: set[int], tensor: Tensor) -> Tensor | SavedInput:
        if (
            type(tensor) is not Tensor  # without data
            or not tensor.is_floating_point()
            or tensor.numel() * tensor.element_size() < MIN_BYTES
            or tensor.data_ptr() in shared
        ):
            return tensor
        known = self._by_address.get(tensor.data_ptr())
        if known is not None and known.is_of(tensor):
            return known  # such as an encoder's output, which all decoder layers attend to
        if self.space is None:
            self.space = self._make_space(tensor.device)
        self._count += 1
        saved = SavedInput(tensor, self._count, self.space)
        self._saved[saved.number] = saved
        self._by_address[tensor.data_ptr()] = saved
        self._on_device.append(saved)
        if len(self._on_device) > IN_FLIGHT:
            left = self._on_device.popleft()
            left.leave()
            self._writing.append(left)
        if len(self._writing) > IN_FLIGHT:
            self._writing.popleft().free_host()
        return saved

    def _unpack_plain(self, saved: Tensor | SavedInput) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        for waiting in (self._on_device, self._writing, self._returning):
            if saved in waiting:
                waiting.remove(saved)
        value = saved.value()
        # A backward pass needs inputs in reverse order.
        for number in range(saved.number - 1, saved.number - 1 - IN_FLIGHT, -1):
            ahead = self._saved.get(number)
            if ahead is not None and ahead.begin_return():
                self._returning.append(ahead)
        while len(self._returning) > IN_FLIGHT:
            self._returning.popleft().cancel_return()
        return value

"""Activation offload: inputs of recomputed blocks wait for the backward pass off the device.

Activation checkpointing leaves the input of each block on the device, from the forward to the
backward pass. Here it is copied to host memory beside the computation, on a stream of its own, and
freed on the device; with a folder it goes on to a file there. The backward pass copies it back
ahead of its use. The two newest inputs stay where they are, since the backward pass begins with
them.

Source: ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.2, https://arxiv.org/abs/2104.07857
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
"""Inputs on the device beside those in use: on their way out, or back ahead of their use."""

MIN_BYTES = 64 << 10
"""Smaller tensors stay: a copy of them takes longer to submit than to make."""

NUM_THREADS = 2
"""Threads of a file, for each direction."""


class OffloadSpace:
    """Where inputs wait: host memory, or a file that host memory is copied to.

    What is taken is used again, by later steps too.

    Args:
        device: Where the model computes.
        folder: Folder of the file; None for host memory alone.
        rank: Whose file it is, for messages.
        recorder: Records the copies.
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
        """Host memory taken so far."""
        self.disk_bytes = 0
        """Space of the file taken so far."""

    def take_host(self, num_bytes: int) -> Tensor:
        """Return host memory for one input, ``uint8``, in whole pages."""
        free = self._hosts.setdefault(round_up(num_bytes), [])
        if free:
            return free.pop()
        self.host_bytes += round_up(num_bytes)
        return allocate_host(round_up(num_bytes), device=self.device)

    def take_extent(self, num_bytes: int) -> Extent:
        """Return a range of the file, of as many bytes as the host memory that is written there."""
        assert self.swap is not None
        free = self._extents.setdefault(num_bytes, [])
        if free:
            return free.pop()
        self.disk_bytes += num_bytes
        return self.swap.allocate("the input of a block", num_bytes)

    def copy(self, direction: Literal["read", "write"], to: Tensor, of: Tensor) -> Event | None:
        """Submit a copy, after the work submitted so far; what is submitted next does not wait.

        Returns:
            What passes when the copy is done; None on the CPU, where it is done.
        """
        with self.stream.after(event_on_stream(self.device)):
            with self.stream.meter.copy(direction, of.numel() * of.element_size()):
                to.copy_(of, non_blocking=True)
            return event_on_stream(self.device)

    def recycle(self, host: Tensor | None, extent: Extent | None) -> None:
        """Make memory and a range of the file free for later inputs.

        Copies between device and host take turns on one stream: host memory may still be copied
        from.
        """
        if host is not None:
            self._hosts.setdefault(host.numel(), []).append(host)
        if extent is not None:
            self._extents.setdefault(extent.num_bytes, []).append(extent)

    def close(self) -> None:
        """Give memory and file back."""
        self._hosts.clear()
        self._extents.clear()
        if self.swap is not None:
            self.swap.close()


class SavedInput:
    """An input of a block: on the device, in host memory, in the file, or on its way.

    Args:
        tensor: The input. Its copy to host memory is submitted here.
        number: Its place among all inputs.
        space: Where it goes.
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
        """Whether it was made of this memory, which nothing has written to since."""
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
        """Free host memory once the file has what is in it."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
            self._space.recycle(self._host, None)
            self._host = None

    def begin_return(self) -> bool:
        """Submit the next copy on the way to the device. False if there is nothing to submit."""
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
        """Free the device's memory of what was fetched too early."""
        if not self._is_original:
            self._value = None

    def value(self) -> Tensor:
        """Return the input for work on the current stream, whose caller then owns it."""
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
            self._wait_for_copy()  # threads of the file know no streams
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
        """Raise if the input was written to while its copy may have been under way."""
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
    """A tensor subclass of which this rank has a part, with autograd of the part's own."""

    local: Tensor

    def rebuilder(self) -> Callable[[Tensor], Tensor]:
        """Return what makes such a tensor of another local one, without keeping this one."""
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

    The numbers are the same to the bit.

    Args:
        folder: Folder of a file to keep them in; None keeps them in host memory.
        rank: Whose file it is, for messages.
        recorder: Records the copies.
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
        """Made for the device of the first input."""
        self._saved: WeakValueDictionary[int, SavedInput] = WeakValueDictionary()
        """All inputs that a backward pass may still ask for, by their order."""
        self._by_address: WeakValueDictionary[int, SavedInput] = WeakValueDictionary()
        self._on_device: deque[SavedInput] = deque()
        self._writing: deque[SavedInput] = deque()
        self._returning: deque[SavedInput] = deque()
        self._count = 0

    @contextmanager
    def saving(self, arguments: object) -> Iterator[None]:
        """Around a checkpointed call: what it saves of ``arguments`` leaves the device.

        Only what needs a gradient does. Masks and tables, which all blocks share, stay.
        """
        shared = {
            each.data_ptr()
            for each in tree_leaves(arguments)
            if isinstance(each, Parameter) or (type(each) is Tensor and not each.requires_grad)
        }
        with saved_tensors_hooks(partial(self._pack, shared), self._unpack):
            yield

    def stored_bytes(self) -> list[StoredBytes]:
        """Return what inputs take of host memory and of the disk, in use or free for the next."""
        if self.space is None:
            return []
        taken = [
            StoredBytes("host", self.space.host_bytes),
            StoredBytes("disk", self.space.disk_bytes),
        ]
        return [each for each in taken if each.num_bytes]

    def close(self) -> None:
        """Give memory and file back."""
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
            return known  # an encoder's output, say, that all layers of the decoder attend to
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
        # A backward pass needs inputs in the reverse order.
        for number in range(saved.number - 1, saved.number - 1 - IN_FLIGHT, -1):
            ahead = self._saved.get(number)
            if ahead is not None and ahead.begin_return():
                self._returning.append(ahead)
        while len(self._returning) > IN_FLIGHT:
            self._returning.popleft().cancel_return()
        return value

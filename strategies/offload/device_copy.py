"""Copies from host memory to the compute device, ahead of their use and beside its work."""

import torch
from torch import Tensor


class DeviceCopy:
    """A value that is on its way to the device; on the CPU it is there already."""

    def __init__(self, host: Tensor, stream: torch.Stream | None) -> None:
        self._arrived: torch.Event | None = None
        self._value: Tensor | None = host
        if stream is not None:
            accelerator = torch.get_device_module(stream.device)
            with accelerator.device(stream.device), accelerator.stream(stream):
                self._value = host.to(stream.device, non_blocking=True)
                self._arrived = stream.record_event()

    @property
    def has_value(self) -> bool:
        """Whether ``drop`` was not called yet."""
        return self._value is not None

    @property
    def num_device_bytes(self) -> int:
        """What it takes of an accelerator's memory."""
        if self._value is None or self._arrived is None:
            return 0
        return self._value.numel() * self._value.element_size()

    @property
    def is_host_free(self) -> bool:
        """Whether the host's memory may be written over as far as this copy is concerned."""
        return self._arrived is None or self._arrived.query()

    def wait_for_host(self) -> None:
        """Return once the host's memory may be written over."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def value(self) -> Tensor:
        """The value, for work on the current stream."""
        assert self._value is not None
        if self._arrived is not None:
            stream = torch.get_device_module(self._value.device).current_stream()
            stream.wait_event(self._arrived)
            # Its memory goes back to the allocator with ``drop``, perhaps before the work that is
            # submitted to the stream has begun.
            self._value.record_stream(stream)
        return self._value

    def drop(self) -> None:
        """Free the device's memory. When the host's is free remains to be asked."""
        self._value = None


def copy_stream(device: torch.device) -> torch.Stream | None:
    """A stream for ``DeviceCopy``; None where the compute device is the host."""
    return None if device.type == "cpu" else torch.get_device_module(device).Stream(device)


def use_device(device: torch.device) -> None:
    """Make a thread work with this process's device: each begins with the first of the machine."""
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)

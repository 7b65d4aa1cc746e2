"""Times, scalars and memory of a CUDA device, read without ever waiting for it.

Kernels run behind the host, so the host's clock says when work was launched, not when it ran.
Events are recorded on the stream of the computation where phases change, kept in a pool, and read
two steps later, when ``query()`` says that they have passed. Scalars (the loss) travel the same
way: they are copied into pinned memory behind the step and read once the step's last event has
passed.
Nothing here synchronises, and NCCL's own timing stays off, for it breaks the overlap
(https://github.com/pytorch/pytorch/issues/143890).
"""

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.writer.phases import BACKWARD, COMMUNICATION, StepTime

if TYPE_CHECKING:
    from types import ModuleType

MAX_WAITS: Final = 256
"""Waits for communication that are marked in a step, of either kind; the time of further ones
belongs to the phase around them. Tensor parallel layers have some hundred per microbatch."""

PINNED_SCALARS: Final = 1024


class _Tail(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event


class StepMarks(NamedTuple):
    """The events of one step, from the end of the step before to its own."""

    boundaries: list[tuple[int, torch.cuda.Event]]
    tails: list[_Tail]
    end: torch.cuda.Event

    def has_passed(self) -> bool:
        """Tell whether the device has come to the end of the step."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def read(self) -> StepTime:
        """Return the times on the device; only once it ``has_passed``."""
        totals = [0] * len(PHASES)
        ends = [event for _, event in self.boundaries[1:]] + [self.end]
        for (phase, start), end in zip(self.boundaries, ends, strict=True):
            totals[phase] += elapsed_ns(start, end)
        for tail in self.tails:
            exposed = min(elapsed_ns(tail.start, tail.end), totals[BACKWARD])
            totals[BACKWARD] -= exposed
            totals[COMMUNICATION] += exposed
        return StepTime(sum(totals), totals)


def elapsed_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    """Return the time between two events of a device that have passed."""
    return max(0, int(start.elapsed_time(end) * 1e6))


class CudaTimeline:
    """Marks phases on one stream of a device: the stream that is current where this is built.

    What is enqueued on another stream, as FSDP2's gathers are, runs beside the computation, and is
    not marked.
    """

    def __init__(self, phase: int) -> None:
        self._stream = torch.cuda.current_stream()
        self._pool: deque[torch.cuda.Event] = deque()
        self._boundaries = [(phase, self._record())]
        self._num_waits = 0
        self._tails: list[_Tail] = []
        self._tail_start: torch.cuda.Event | None = None

    def mark(self, phase: int) -> None:
        """See ``Timeline``."""
        if phase == self._boundaries[-1][0] or not self._is_marked():
            return
        if phase == COMMUNICATION:
            if self._num_waits >= MAX_WAITS:
                return
            self._num_waits += 1
        self._boundaries.append((phase, self._record()))

    def mark_enqueue(self) -> None:
        """See ``Timeline``; the last of a backward pass stays."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self._tail_start is None:
            self._tail_start = self._take()
        self._tail_start.record(self._stream)

    def mark_backward_end(self) -> None:
        """See ``Timeline``."""
        start, self._tail_start = self._tail_start, None
        if start is not None and len(self._tails) < MAX_WAITS:
            self._tails.append(_Tail(start, self._record()))

    def end_step(self, phase: int) -> StepMarks:
        """Close the step; ``phase`` is the next one."""
        marks = StepMarks(self._boundaries, self._tails, self._record())
        self._boundaries, self._tails = [(phase, self._record())], []
        self._num_waits = 0
        return marks

    def recycle(self, marks: StepMarks) -> None:
        """Take back the events of a step that was read."""
        self._pool.extend(event for _, event in marks.boundaries)
        for tail in marks.tails:
            self._pool.extend(tail)
        self._pool.append(marks.end)

    def _take(self) -> torch.cuda.Event:
        if self._pool:
            return self._pool.pop()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _is_marked(self) -> bool:
        """Whether work that is enqueued now is part of the timeline."""
        return bool(
            torch.cuda.current_stream() == self._stream
            and not torch.cuda.is_current_stream_capturing()
        )

    def _record(self) -> torch.cuda.Event:
        event = self._take()
        event.record(self._stream)
        return event


class ScalarMailbox:
    """Brings scalars from the device, to be read after an event that was recorded later."""

    def __init__(self) -> None:
        self._slots = torch.empty(PINNED_SCALARS, dtype=torch.float32, pin_memory=True)
        self._next = 0

    def send(self, value: Tensor) -> int:
        """Copy a scalar after the work that the stream has; return its slot."""
        slot = self._next % PINNED_SCALARS
        self._next += 1
        self._slots[slot].copy_(value.detach().float().mean(), non_blocking=True)
        return slot

    def read(self, slot: int) -> float:
        """Return a scalar whose copy is known to be complete."""
        return float(self._slots[slot])


def describe(device: torch.device) -> str:
    """Return, for example, ``cpu`` or ``cuda:1 (NVIDIA H100)``."""
    if device.type != "cuda":
        return str(device)
    return f"cuda:{device.index or 0} ({torch.cuda.get_device_name(device)})"


def uuid(device: torch.device) -> str | None:
    """Return the device's name as NVML spells it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    found = getattr(properties, "uuid", None)
    if not found:
        return None
    # A slice of a GPU is a device of its own, and its name ends as in "H100 MIG 1g.10gb".
    return f"{'MIG' if ' MIG ' in properties.name else 'GPU'}-{found}"


class DeviceMemory(NamedTuple):
    """Bytes of the caching allocator; None where there is no such device."""

    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None


def memory(device: torch.device) -> DeviceMemory:
    """Return the bytes that the allocator has allocated, reserved, and allocated at most."""
    if device.type != "cuda":
        return DeviceMemory()
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = stats.get("allocated_bytes", {}).get("all", {})
    reserved = stats.get("reserved_bytes", {}).get("all", {})
    return DeviceMemory(
        allocated.get("current", 0), reserved.get("current", 0), allocated.get("peak", 0)
    )


LOAD_EVERY_S: Final = 1.0


class DeviceLoad:
    """Reads how busy, how hungry for power and how hot this rank's device is.

    Args:
        device_uuid: The GPU; None for a rank on CPUs, where only utilisation is known.
    """

    def __init__(self, device_uuid: str | None) -> None:
        self._uuid = device_uuid
        self._nvml: ModuleType | None = None
        self._handle: object = None
        self._read_at, self._cpu_s = time.monotonic(), time.process_time()
        if device_uuid is not None:
            import pynvml  # a rank on CPUs never loads the driver's library

            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(device_uuid)
                self._nvml = pynvml

    def read(self) -> dict[str, float]:
        """Return utilisation in percent (of a core for a process), watts and degrees Celsius.

        It is empty where less than a second has passed, and lacks what the driver does not tell.
        """
        now, cpu_s = time.monotonic(), time.process_time()
        passed_s, used_s = now - self._read_at, cpu_s - self._cpu_s
        if passed_s < LOAD_EVERY_S:
            return {}
        self._read_at, self._cpu_s = now, cpu_s
        if self._uuid is None:
            return {"utilisation_percent": 100 * used_s / passed_s}
        nvml, found = self._nvml, {}
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):  # nothing of it is known of a slice of a GPU
                found["utilisation_percent"] = float(
                    nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
                )
            with contextlib.suppress(nvml.NVMLError):
                found["power_watts"] = nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
            with contextlib.suppress(nvml.NVMLError):
                found["temperature_celsius"] = float(
                    nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
                )
        return found

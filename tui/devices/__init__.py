"""What this host says of a job's devices and processes, read by whoever watches.

The job itself is not asked: NVML and psutil look from outside, so a reading costs training nothing.
Only what belongs to the job is reported: GPUs by the UUID that a rank recorded, processes by pid.
"""

from boltmesh.tui.devices.reader import DeviceReader
from boltmesh.tui.devices.reading import DeviceReading, GpuProcess

__all__ = ["DeviceReader", "DeviceReading", "GpuProcess"]

"""Readings of a job's devices and processes on this host, taken by the viewer.

The job takes no part: NVML and psutil look from outside, so a reading costs training nothing.
Only what belongs to the job is reported: GPUs by the UUID that a rank recorded, processes by pid.
"""

from boltmesh.tui.devices.reader import DeviceReader
from boltmesh.tui.devices.reading import DeviceReading, GpuProcess

__all__ = ["DeviceReader", "DeviceReading", "GpuProcess"]

"""A driver for the GPUs of the demo: pynvml's functions, answered by the simulated job.

The dashboard reads it by the code that reads real GPUs.
"""

# ruff: noqa: D102, N802 - functions of NVML, by its names

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pynvml
from typing_extensions import override

from boltmesh.tui.demo import DemoSource
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.devices.gpu import ALL_LINKS, KIB, Gpu
from boltmesh.tui.sources.live import Observation

UNSUPPORTED = 3
"""NVML's code for a field that a model does not have."""


class DemoNvml:
    """Stands for the module ``pynvml``; handles are UUIDs, constants are the real ones.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.readings: Mapping[str, DeviceReading] = {}
        """Readings of this moment, by UUID."""
        self._sampled = DeviceReading(kind="gpu", ranks=(), name="")
        self._clock = clock
        self._begun = clock()
        self._counters: dict[tuple[str, int | tuple[int, int]], tuple[float, float]] = {}
        """When the counter of a field was read last, and its value."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("nvmlDeviceGet", "nvmlGpm")):
            raise AttributeError(f"{name} is not answered by the demo")
        return getattr(pynvml, name)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.readings:
            raise pynvml.NVMLError_NotFound
        return uuid

    def nvmlDeviceGetName(self, gpu: str) -> str:
        return self.readings[gpu].name

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> SimpleNamespace:
        seen = self.readings[gpu]
        return SimpleNamespace(gpu=seen.utilization_percent, memory=seen.memory_utilization_percent)

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> SimpleNamespace:
        seen = self.readings[gpu]
        return SimpleNamespace(used=seen.memory_used_bytes, total=seen.memory_total_bytes)

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> float:
        return 1000 * (self.readings[gpu].power_watts or 0.0)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> float:
        return 1000 * (self.readings[gpu].power_limit_watts or 0.0)

    def nvmlDeviceGetTemperature(self, gpu: str, _: int) -> float | None:
        return self.readings[gpu].temperature_celsius

    def nvmlDeviceGetTemperatureThreshold(self, gpu: str, _: int) -> float | None:
        return self.readings[gpu].temperature_limit_celsius

    def nvmlDeviceGetClockInfo(self, gpu: str, kind: int) -> int | None:
        seen = self.readings[gpu]
        return seen.sm_clock_mhz if kind == pynvml.NVML_CLOCK_SM else seen.memory_clock_mhz

    def nvmlDeviceGetMaxClockInfo(self, gpu: str, kind: int) -> int | None:
        seen = self.readings[gpu]
        return seen.sm_clock_max_mhz if kind == pynvml.NVML_CLOCK_SM else seen.memory_clock_max_mhz

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: str) -> int:
        words = self.readings[gpu].throttle_reasons or ()
        bits = 0
        if "idle" in words:
            bits |= pynvml.nvmlClocksEventReasonGpuIdle
        if "HW thermal" in words:
            bits |= pynvml.nvmlClocksEventReasonHwThermalSlowdown
        return bits

    def nvmlDeviceGetTotalEccErrors(self, gpu: str, kind: int, _: int) -> int | None:
        seen = self.readings[gpu]
        is_corrected = kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        return seen.ecc_corrected_errors if is_corrected else seen.ecc_uncorrected_errors

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=each.pid, usedGpuMemory=each.memory_bytes)
            for each in self.readings[gpu].processes or ()
        ]

    def nvmlGpmQueryDeviceSupport(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> Any:
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleGet(self, gpu: str, _: Any) -> None:
        self._sampled = self.readings[gpu]

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        """Answer for the GPU whose sample was taken last."""
        seen = self._sampled
        values = {
            pynvml.NVML_GPM_METRIC_SM_UTIL: seen.sm_active_percent,
            pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: seen.sm_occupancy_percent,
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: seen.tensor_active_percent,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: seen.memory_bandwidth_percent,
        }
        for metric in asked.metrics[: asked.numMetrics]:
            value = values[metric.metricId]
            metric.nvmlReturn = UNSUPPORTED if value is None else pynvml.NVML_SUCCESS
            metric.value = value or 0.0

    def nvmlDeviceGetFieldValues(
        self, gpu: str, fields: Sequence[int | tuple[int, int]]
    ) -> list[SimpleNamespace]:
        """Return counters that grow by the rates of the simulated GPU."""
        seen = self.readings[gpu]
        rates = {
            (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS): (
                seen.nvlink_sent_bytes_per_second,
                KIB,
            ),
            (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS): (
                seen.nvlink_received_bytes_per_second,
                KIB,
            ),
            pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: (seen.pcie_sent_bytes_per_second, 1),
            pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: (seen.pcie_received_bytes_per_second, 1),
        }
        now = self._clock()
        found = []
        for field in fields:
            rate, scale = rates.get(field, (None, 1))
            code = UNSUPPORTED if rate is None else pynvml.NVML_SUCCESS
            at, total = self._counters.get((gpu, field), (self._begun, 0.0))
            total += (rate or 0.0) * (now - at)
            self._counters[gpu, field] = (now, total)
            value = SimpleNamespace(ullVal=int(total / scale))
            found.append(SimpleNamespace(nvmlReturn=code, value=value))
        return found


class NvmlDemoSource(DemoSource):
    """The demo with its GPUs read through a driver, one of them hot.

    Args:
        clock: The wall clock.
        monotonic: Monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock=clock, scenario="straggler")
        self._nvml = DemoNvml(monotonic)
        self._monotonic = monotonic
        self._gpus: dict[str, Gpu] = {}

    @override
    def read(self) -> Observation:
        """Return the job as it is now, its GPUs as NVML gives them."""
        seen = super().read()
        self._nvml.readings = {
            device.uuid: device for device in seen.devices if device.kind == "gpu" and device.uuid
        }
        devices = [self._through_nvml(device) for device in seen.devices]
        return msgspec.structs.replace(seen, devices=tuple(devices))

    def _through_nvml(self, device: DeviceReading) -> DeviceReading:
        if device.uuid is None or device.uuid not in self._nvml.readings:
            return device
        gpu = self._gpus.get(device.uuid)
        if gpu is None:
            nvml = cast("Any", self._nvml)
            gpu = self._gpus[device.uuid] = Gpu(nvml, device.uuid, clock=self._monotonic)
        return gpu.read(device.ranks, may_wait=False)

"""One GPU through NVML. Whatever a model, a driver or a user's rights do not give is None.

Turns counters that only grow into rates, from one look to the next.

Activity of SMs and tensor cores by the profiling counters that Hopper and later GPUs have in NVML
(GPM), the figures of DCGM without its daemon.

Why a GPU does not run at its highest clocks, in words.
"""

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from boltmesh.tui.devices.reading import DeviceReading, GpuProcess


class Rates:
    """The rates of a few counters of one thing.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, Mapping[str, float]] | None = None

    def since_last(self, counters: Mapping[str, float]) -> Mapping[str, float]:
        """Return how much each counter grew a second; nothing for one that was not known before.

        A counter that fell was reset in between, so nothing is known of it either.
        """
        now = self._clock()
        last, self._last = self._last, (now, counters)
        if last is None or now <= last[0]:
            return {}
        before = last[1]
        return {
            name: (value - before[name]) / (now - last[0])
            for name, value in counters.items()
            if name in before and value >= before[name]
        }


_WORDS = {
    "GpuIdle": "idle",
    "ApplicationsClocksSetting": "clocks set by hand",
    "SwPowerCap": "power limit",
    "HwThermalSlowdown": "HW thermal",
    "HwPowerBrakeSlowdown": "HW power brake",
    "SyncBoost": "sync boost",
    "SwThermalSlowdown": "SW thermal",
    "DisplayClockSetting": "display setting",
}
_GENERAL = "HwSlowdown"
"""Set together with the two hardware reasons above; alone it means one that has no own bit."""


def throttle_words(nvml: ModuleType, bits: int) -> tuple[str, ...]:
    """Return the reasons that NVML's bit mask names, those that no name is known for as bits."""
    words = []
    named = 0
    for name, word in _WORDS.items():
        bit = getattr(nvml, f"nvmlClocksEventReason{name}")
        named |= bit
        if bits & bit:
            words.append(word)
    general = getattr(nvml, f"nvmlClocksEventReason{_GENERAL}")
    specific = nvml.nvmlClocksEventReasonHwThermalSlowdown
    specific |= nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    if bits & general and not bits & specific:
        words.append("HW slowdown")
    unknown = bits & ~(named | general)
    if unknown:
        words.append(f"unknown reason {unknown:#x}")
    return tuple(words)


Value = TypeVar("Value")

ALL_LINKS = 2**32 - 1
"""The scope of a field that is added up over all NVLinks."""
KIB = 1024


class Activity:
    """Means of a GPU's profiling counters between two looks.

    Args:
        nvml: The module ``pynvml``, initialised.
        handle: The GPU's, by NVML.
    """

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml = nvml
        self._handle = handle
        self._metrics = {
            "sm_active": nvml.NVML_GPM_METRIC_SM_UTIL,
            "sm_occupancy": nvml.NVML_GPM_METRIC_SM_OCCUPANCY,
            "tensor_active": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "memory_bandwidth": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        self._samples: tuple[Any, Any] | None = None
        """Memory for the last sample and for the next one; None: the GPU has no such counters."""
        self._has_last = False
        try:
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._samples = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        except nvml.NVMLError:
            self._samples = None

    def since_last(self) -> Mapping[str, float]:
        """Return the percentages since the last call, of 0 to 100; those known."""
        nvml = self._nvml
        if self._samples is None:
            return {}
        last, now = self._samples
        try:
            nvml.nvmlGpmSampleGet(self._handle, now)
            had_last, self._has_last = self._has_last, True
            self._samples = now, last
            if not had_last:
                return {}
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = len(self._metrics)
            asked.sample1, asked.sample2 = last, now
            for at, number in enumerate(self._metrics.values()):
                asked.metrics[at].metricId = number
            nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError:  # such as no permission, or a GPU in MIG mode
            self._has_last = False
            return {}
        return {
            name: float(found.value)
            for name, found in zip(self._metrics, asked.metrics, strict=False)
            if found.nvmlReturn == nvml.NVML_SUCCESS and 0 <= found.value <= 100
        }


class Gpu:
    """A GPU that is looked at again and again.

    Args:
        nvml: The module ``pynvml``, initialised.
        uuid: As NVML spells it.
        clock: Monotonic, in seconds.

    Raises:
        nvml.NVMLError: There is no such GPU here.
    """

    def __init__(
        self, nvml: ModuleType, uuid: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._uuid = uuid
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._rates = Rates(clock)
        self._activity = Activity(nvml, self._handle)
        self._has_pcie_counters = False
        self._pcie: tuple[float | None, float | None] = (None, None)
        """Bytes sent and received; the newest values if GPUs are measured in turn."""
        name = self._ask(nvml.nvmlDeviceGetName)
        self._name = uuid if name is None else str(name)
        self._sm_clock_max = self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
        self._memory_clock_max = self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM)
        self._temperature_limit = self._ask(
            nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        )

    def read(self, ranks: tuple[int, ...], *, may_wait: bool = False) -> DeviceReading:
        """Return the present reading.

        Args:
            ranks: Ranks that use it.
            may_wait: Whether PCIe may be measured on a GPU that has no counters of it, for which
                the driver takes 20 ms in each direction.
        """
        nvml = self._nvml
        use = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        rates = self._rates.since_last(self._counters())
        active = self._activity.since_last()
        if self._has_pcie_counters:
            self._pcie = rates.get("pcie_sent"), rates.get("pcie_received")
        elif may_wait:
            self._pcie = self._measure_pcie()
        return DeviceReading(
            kind="gpu",
            ranks=ranks,
            name=self._name,
            uuid=self._uuid,
            utilization_percent=None if use is None else float(use.gpu),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=_thousandth(self._ask(nvml.nvmlDeviceGetPowerUsage)),
            temperature_celsius=_float(
                self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
            ),
            memory_utilization_percent=None if use is None else float(use.memory),
            sm_active_percent=active.get("sm_active"),
            sm_occupancy_percent=active.get("sm_occupancy"),
            tensor_active_percent=active.get("tensor_active"),
            memory_bandwidth_percent=active.get("memory_bandwidth"),
            power_limit_watts=_thousandth(self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit)),
            temperature_limit_celsius=_float(self._temperature_limit),
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            sm_clock_max_mhz=self._sm_clock_max,
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            memory_clock_max_mhz=self._memory_clock_max,
            throttle_reasons=self._throttle_reasons(),
            nvlink_sent_bytes_per_second=rates.get("nvlink_sent"),
            nvlink_received_bytes_per_second=rates.get("nvlink_received"),
            pcie_sent_bytes_per_second=self._pcie[0],
            pcie_received_bytes_per_second=self._pcie[1],
            ecc_corrected_errors=self._ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected_errors=self._ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            processes=self._processes(),
        )

    def _ask(self, call: Callable[..., Value], *arguments: object) -> Value | None:
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def _counters(self) -> dict[str, float]:
        """Return the bytes that the links have moved, in one call for all of them."""
        nvml = self._nvml
        fields = {
            "nvlink_sent": ((nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS), KIB),
            "nvlink_received": ((nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS), KIB),
            "pcie_sent": (nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 1),
            "pcie_received": (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 1),
        }
        values = self._ask(nvml.nvmlDeviceGetFieldValues, [field for field, _ in fields.values()])
        found = {
            name: float(scale * value.value.ullVal)
            for (name, (_, scale)), value in zip(fields.items(), values or (), strict=False)
            # Each field has its own success; without links their counters are not supported.
            if value.nvmlReturn == nvml.NVML_SUCCESS
        }
        self._has_pcie_counters = "pcie_sent" in found
        return found

    def _measure_pcie(self) -> tuple[float | None, float | None]:
        nvml = self._nvml
        sent, received = (
            self._ask(nvml.nvmlDeviceGetPcieThroughput, counter)
            for counter in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        return (
            None if sent is None else float(KIB * sent),
            None if received is None else float(KIB * received),
        )

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        nvml = self._nvml
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if bits is None:  # by the name that drivers before 535 know
            bits = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return None if bits is None else throttle_words(nvml, bits)

    def _ecc_errors(self, kind: int) -> int | None:
        return self._ask(self._nvml.nvmlDeviceGetTotalEccErrors, kind, self._nvml.NVML_VOLATILE_ECC)

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses)
        if found is None:
            return None
        return tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in found)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000

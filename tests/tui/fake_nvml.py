"""A stand-in for ``pynvml``: its functions and constants by their real names, no driver."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

NVLINK_FIELDS = {
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
}
NUM_LINKS = 18
ALL_LINKS = 2**32 - 1
SUPPORTED = 0
UNSUPPORTED = 3


def _values() -> dict[str, Any]:
    return {
        "nvmlDeviceGetName": "NVIDIA H100",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=60 * 2**30, total=80 * 2**30),
        "nvmlDeviceGetPowerUsage": 650_500,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetTemperatureThreshold": 87,
        "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap,
        "nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksEventReasonSwPowerCap,
        "nvmlGpmSampleGet": None,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=None)],
    }


class FakeNvml:
    """Gives fixed values; ``unsupported`` names the functions that this model cannot answer.

    Functions that are not of the installed ``pynvml`` cannot be called, so a name that is wrong or
    was renamed fails here as it would on a host with GPUs.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *unsupported: str, **values: Any) -> None:
        self.unsupported = unsupported
        self.values = _values() | values
        self.counters: dict[int, int] = {}
        """Of ``nvmlDeviceGetFieldValues``, by field; one that is missing is not supported."""
        self.activity: dict[int, float] = {}
        """Percentages of GPM by metric; empty: this model has no GPM."""
        self.lost: set[int] = set()
        """Numbers of GPUs that have fallen off the bus."""
        self.calls: list[str] = []
        self.is_initialised = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not callable(real) or isinstance(real, type):
            return real
        return self._function(name)

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in {"nvmlInit", "nvmlShutdown"}:
                self.is_initialised = name == "nvmlInit"
                return None
            assert self.is_initialised
            if name in self.unsupported:
                raise pynvml.NVMLError_NotSupported
            return self._answer(name, arguments)

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "nvmlDeviceGetHandleByUUID":
            if arguments[0] == "GPU-lost":
                raise pynvml.NVMLError_NotFound
            return arguments[0]
        if name == "nvmlDeviceGetHandleByIndex":
            if arguments[0] in self.lost:
                raise pynvml.NVMLError_GpuIsLost
            return f"GPU-{arguments[0]}"
        if name == "nvmlDeviceGetUUID":
            return arguments[0]
        if name == "nvmlGpmQueryDeviceSupport":
            return SimpleNamespace(isSupportedDevice=int(bool(self.activity)))
        if name == "nvmlGpmSampleAlloc":
            return pynvml.c_nvmlGpmSample_t()
        if name == "nvmlGpmMetricsGet":
            return self._answer_metrics(arguments[0])
        if name == "nvmlDeviceGetFieldValues":
            return [self._field(field) for field in arguments[1]]
        if name == "nvmlDeviceGetClockInfo":
            return {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 2619}[arguments[1]]
        if name == "nvmlDeviceGetMaxClockInfo":
            return {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}[arguments[1]]
        if name == "nvmlDeviceGetTotalEccErrors":
            return {
                pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED: 12,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: 1,
            }[arguments[1]]
        if name == "nvmlDeviceGetPcieThroughput":
            return {pynvml.NVML_PCIE_UTIL_TX_BYTES: 500, pynvml.NVML_PCIE_UTIL_RX_BYTES: 900}[
                arguments[1]
            ]
        return self.values[name]

    def _answer_metrics(self, asked: Any) -> Any:
        assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for metric in asked.metrics[: asked.numMetrics]:
            value = self.activity.get(metric.metricId)
            metric.nvmlReturn = UNSUPPORTED if value is None else SUPPORTED
            metric.value = -1.0 if value is None else value
        return asked

    def _field(self, field: int | tuple[int, int]) -> SimpleNamespace:
        number, scope = field if isinstance(field, tuple) else (field, 0)
        value = self.counters.get(number)
        if number in NVLINK_FIELDS and value is not None and scope != ALL_LINKS:
            value //= NUM_LINKS  # one link alone
        return SimpleNamespace(
            nvmlReturn=UNSUPPORTED if value is None else SUPPORTED,
            value=SimpleNamespace(ullVal=value or 0),
        )

"""Why a GPU does not run at its highest clocks, in words."""

from types import ModuleType

_WORDS = {
    "GpuIdle": "idle",
    "ApplicationsClocksSetting": "clocks set lower by hand",
    "SwPowerCap": "power limit",
    "HwThermalSlowdown": "hot: hardware slowdown",
    "HwPowerBrakeSlowdown": "power brake from outside",
    "SyncBoost": "kept equal with other GPUs",
    "SwThermalSlowdown": "hot: software slowdown",
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
        words.append("hardware slowdown")
    unknown = bits & ~(named | general)
    if unknown:
        words.append(f"unknown reason {unknown:#x}")
    return tuple(words)

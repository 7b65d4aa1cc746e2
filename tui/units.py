"""Numbers as people read them; ``-`` where nothing is known."""

import math
from collections.abc import Iterable, Mapping, Sequence

UNKNOWN = "-"


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the numbers that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def count(value: float | None) -> str:
    """1,234,567: steps and calls. A mean that is not whole keeps one decimal."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}"


def rate(value: float | None) -> str:
    """Things a second: ``3.21``, ``412``, ``28,900``, ``1.24 M``."""
    if value is None:
        return UNKNOWN
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    if value < 999_950:
        return f"{value:,.0f}"
    return f"{value / 1e6:,.2f} M"


def traffic(value: float | None) -> str:
    """Bytes that move, in decimal units as links are sold: ``26.2 MB``."""
    return _scaled(value, 1000, ("B", "kB", "MB", "GB", "TB"))


def memory(value: float | None) -> str:
    """Bytes that stay, in binary units as memory is sold: ``61.2 GiB``."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float | None, base: int, units: Sequence[str]) -> str:
    if value is None:
        return UNKNOWN
    scaled = float(value)
    last = len(units) - 1
    for place, unit in enumerate(units):
        # A value that would round up to four digits belongs to the next unit.
        if scaled < base - 0.5 or place == last:
            digits = 0 if place == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{scaled:.{digits}f} {unit}"
        scaled /= base
    raise AssertionError("the last unit takes every value")


def flops(value: float | None) -> str:
    """Floating point operations a second: ``412 TFLOP/s``."""
    names = ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s")
    return _scaled(value, 1000, names)


def percent(value: float | None) -> str:
    """``84%``."""
    return UNKNOWN if value is None else f"{value:.0f}%"


def share(value: float | None) -> str:
    """Write a share of 1 in percent, to a tenth: ``11.1%``."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def whole_share(value: float | None) -> str:
    """Write a share of 1 in whole percent: ``11%``, or ``<1%`` for what would be none."""
    if value is None:
        return UNKNOWN
    return "<1%" if 0 < value < 0.005 else percent(100 * value)


def celsius(value: float | None) -> str:
    """``61 C``."""
    return UNKNOWN if value is None else f"{value:.0f} C"


def bandwidth(value: float | None) -> str:
    """Bytes a second that move: ``26.2 MB/s``."""
    return UNKNOWN if value is None else f"{traffic(value)}/s"


def seconds(value: float | None) -> str:
    """A short time, such as a step or a phase: ``0.41 ms``, ``212 ms``, ``1.24 s``."""
    if value is None:
        return UNKNOWN
    if value >= 99.95:
        return duration(value)
    if value >= 0.9995:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    milliseconds = value * 1e3
    digits = 0 if milliseconds >= 99.95 else 1 if milliseconds >= 9.995 else 2
    return f"{milliseconds:.{digits}f} ms"


def duration(value: float | None) -> str:
    """A long time, such as a run: ``42s``, ``12m 03s``, ``1h 04m``, ``3d 02h``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole // 60 % 60:02d}m"
    return f"{whole // 86400}d {whole // 3600 % 24:02d}h"


def number(value: float | None) -> str:
    """A metric, to four or five figures: ``2.4137``, ``0.0003``, ``1.5e-07``, ``nan``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if 1 <= size < 10_000:
        return f"{value:.{4 - len(str(int(size))) + 1}f}"
    if 0.001 <= size < 1:
        return f"{value:.4f}"
    return f"{value:.3g}"


def mesh(sizes: Mapping[str, int], world_size: int, *, times: str = " x ") -> str:
    """``pipeline 2 x data 4``; axes of size one say nothing and are left out."""
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return times.join(parts) or ("1 rank" if world_size == 1 else f"{world_size} ranks")


def ranks(numbers: Iterable[int], *, most: int = 4) -> str:
    """``rank 5``, ``ranks 0-3, 8``; ``37 ranks`` where they make more than ``most`` runs."""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))  # 3, 4 is no longer
        for run in runs
    ]
    return f"ranks {', '.join(parts)}" if 0 < len(parts) <= most else f"{len(ordered)} ranks"

"""Metrics as text: the format 0.0.4 of Prometheus, and OpenMetrics 1.0.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from boltmesh.tui.sanitize import clean

Form = Literal["prometheus", "openmetrics"]
UNITS: Final = ("seconds", "bytes", "ratio", "celsius", "watts", "hertz")
"""Units that end the name of a family; a ratio is one of the base units of the specification."""

Labels = Mapping[str, str | int]
Sample = tuple[Labels, float | None]


class Family(msgspec.Struct, frozen=True):
    """One metric with all of its samples; a value of None is not known and is left out."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: tuple[Sample, ...]


def gauge(name: str, text: str, samples: Iterable[Sample]) -> Family:
    """Return a family of values that go up and down."""
    return Family(f"boltmesh_{name}", "gauge", text, tuple(samples))


def counter(name: str, text: str, samples: Iterable[Sample]) -> Family:
    """Return a family of values that only grow."""
    return Family(f"boltmesh_{name}_total", "counter", text, tuple(samples))


def text_of(families: Iterable[Family], common: Labels, form: Form = "prometheus") -> str:
    """Return the whole document, ``common`` before the labels of each sample."""
    text = "".join(_family_text(family, common, form) for family in families)
    return text + "# EOF\n" if form == "openmetrics" else text


def _family_text(family: Family, common: Labels, form: Form) -> str:
    lines: dict[str, str] = {}
    for labels, value in family.samples:
        if value is not None:
            named = ",".join(
                f'{name}="{_escaped(str(text))}"' for name, text in {**common, **labels}.items()
            )
            # Names of a job that are equal once they are cleaned are one sample, the last.
            lines[f"{family.name}{{{named}}}"] = _number(value)
    if not lines:
        return ""
    name, unit = family.name, ""
    if form == "openmetrics":
        name = name.removesuffix("_total") if family.kind == "counter" else name
        unit = name.rpartition("_")[2]
        unit = f"# UNIT {name} {unit}\n" if unit in UNITS else ""
    head = f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n{unit}"
    return head + "".join(f"{name} {value}\n" for name, value in lines.items())


def _escaped(text: str) -> str:
    return clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)

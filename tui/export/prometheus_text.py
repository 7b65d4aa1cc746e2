"""The text of Prometheus' exposition format 0.0.4, whatever the figures are.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from boltmesh.tui.clean import clean

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


def family_text(family: Family, common: Labels) -> str:
    """Return a family as text, ``common`` before the labels of each sample."""
    lines: dict[str, str] = {}
    for labels, value in family.samples:
        if value is not None:
            named = ",".join(
                f'{name}="{_escaped(str(text))}"' for name, text in {**common, **labels}.items()
            )
            # Names of a job that become alike when they are cleaned are one sample, the last.
            lines[f"{family.name}{{{named}}}"] = _number(value)
    if not lines:
        return ""
    head = f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"
    return head + "".join(f"{name} {value}\n" for name, value in lines.items())


def _escaped(text: str) -> str:
    return clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)

"""What tensor parallelism would divide, before a rank is started.

``boltmesh plan`` and ``boltmesh fit --dry-run`` print it. What a run does beside that is to prove
the plan: it runs a batch both ways and compares.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from boltmesh.errors import ConfigError
from boltmesh.plan_text import align, size_text
from boltmesh.strategies.tensor.plan_table import PlanRow, rows

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.tensor_model import TensorSummary

TENSOR = "bolt_tensor"
WHOLE = "whole"
WIDTH = 96
"""Columns of text."""


def plan_tensor(
    config: "DictConfig", ranks_per_host: int, given: Mapping[str, Any], *, source: str
) -> "TensorSummary":
    """Find what a config's model gives each rank.

    Args:
        config: The whole.
        ranks_per_host: A layer is divided within one.
        given: Of the strategy's section.
        source: The config's file, for errors.

    Raises:
        ConfigError: When model or data cannot be built, or options do not fit.
    """
    from boltmesh.tensor_model import describe_division

    size = given.get("size") or ranks_per_host
    if ranks_per_host % size:
        raise ConfigError(
            f"{source}: strategy.size={size} does not divide the {ranks_per_host} ranks of a host, "
            f"and the ranks of a layer are on one host. Set strategy.size=null, or plan for other "
            f"ranks with --devices."
        )
    return describe_division(config, size, given, source=source)


def write_tensor(summary: "TensorSummary") -> str:
    """What each rank keeps, what that asks for in every step, and why the rest is whole."""
    table = rows(summary.plan)
    asked = _grouped((each.collectives, each.pattern) for each in table if each.collectives)
    whole = _grouped((each.why, each.pattern) for each in table if each.style == WHOLE)
    kept = f"{size_text(summary.rank_bytes)} of {size_text(summary.whole_bytes)} of parameters"
    return "\n".join(
        [
            f"{summary.model} over {summary.plan.size} ranks: each keeps {kept}",
            "",
            *align(
                [
                    ("count", [str(each.count) for each in table]),
                    ("shape", ["x".join(map(str, each.shape)) for each in table]),
                    ("per rank", [size_text(each.rank_bytes) for each in table]),
                ],
                ("parameter and how it is divided", [_divided(each) for each in table]),
            ),
            *_section("asked for in every step:", asked),
            *_section("whole, and why:", whole),
            *_section("divided, and why:", _reasons(table)),
            *_section("notes:", {note: [] for note in (*summary.plan.notes, *summary.notes)}),
            "",
            "A run proves this on a batch before its first step: losses, gradients and outputs of",
            "blocks. What differs from the whole model then stays whole, and the run says so.",
        ]
    )


def _divided(row: PlanRow) -> str:
    return f"{row.pattern}  {row.style}"


def _reasons(table: Sequence[PlanRow]) -> dict[str, list[str]]:
    return _grouped((each.why, each.pattern) for each in table if each.style != WHOLE and each.why)


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key, pattern in pairs:
        groups.setdefault(key, []).append(pattern)
    return groups


def _section(title: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    if not groups:
        return []
    lines = ["", title]
    for key, patterns in groups.items():
        lines += textwrap.wrap(key, WIDTH, initial_indent="  ", subsequent_indent="  ")
        listed = ", ".join(patterns)
        lines += textwrap.wrap(
            listed, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False
        )
    return lines

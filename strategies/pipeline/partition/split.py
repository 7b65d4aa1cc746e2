"""Divides a model's units into stages of equal cost. Plain arithmetic, without torch.

The slowest stage limits the speed of a pipeline, so the cut minimises its time; among the cuts that
reach the minimum, it minimises the differences between stages. The solution is exact, by dynamic
programming over the ends of stages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from boltmesh.errors import ConfigError


@dataclass(frozen=True)
class UnitCost:
    """Cost of one unit of the model."""

    name: str
    """Dotted name in the LightningModule."""
    seconds: float
    """Time of forward and backward pass of a microbatch, in the same scale for all units."""
    num_bytes: float = 0.0
    """Bytes of parameters, gradients and optimizer state."""
    kept_bytes: float = 0.0
    """Bytes kept of one microbatch, from its forward to its backward pass."""


def balanced_split(
    units: Sequence[UnitCost],
    num_stages: int,
    *,
    max_bytes: float = math.inf,
    live: Sequence[int] | None = None,
) -> list[list[str]]:
    """Return the names of each stage's units.

    Args:
        units: Units in the order of their calls.
        num_stages: Number of stages; each gets at least one unit.
        max_bytes: Limit for the units of one stage.
        live: Most microbatches that each stage keeps at the same time; None ignores their bytes.

    Raises:
        ConfigError: There are fewer units than stages, or no cut keeps within the limit.
    """
    if not units:
        raise ConfigError(
            "The model has no layers with parameters, so there is nothing to make stages of. Use "
            "bolt_ddp or one process."
        )
    refuse_too_few([each.name for each in units], num_stages)
    seconds = [*accumulate((each.seconds for each in units), initial=0.0)]
    live = [0] * num_stages if live is None else live
    memory = [
        [*accumulate((each.num_bytes + count * each.kept_bytes for each in units), initial=0.0)]
        for count in live
    ]
    ends = _best_ends(seconds, memory, max_bytes)
    if ends is None:
        most = max(live)
        needed = [each.num_bytes + most * each.kept_bytes for each in units]
        raise ConfigError(
            f"No cut into {num_stages} stages keeps each within {max_bytes / 1e9:.3g} GB: with "
            f"gradients, Adam's state and {most} live microbatches the model needs "
            f"{sum(needed) / 1e9:.3g} GB in all, and its largest part {max(needed) / 1e9:.3g} GB. "
            f"Use more stages, smaller microbatches, or shard what a stage holds."
        )
    starts = [0, *ends[:-1]]
    return [
        [each.name for each in units[start:end]] for start, end in zip(starts, ends, strict=True)
    ]


def _best_ends(
    seconds: Sequence[float], memory: Sequence[Sequence[float]], max_bytes: float
) -> list[int] | None:
    """Return the end of each stage; costs compare the slowest stage, then the sum of squares.

    Args:
        seconds: Cumulative seconds of the units.
        memory: Cumulative bytes of the units, for each stage.
        max_bytes: Limit for one stage.
    """
    count, num_stages = len(seconds) - 1, len(memory)
    worst = (math.inf, math.inf)
    best: list[tuple[float, float]] = [(0.0, 0.0), *[worst] * count]
    choices: list[list[int]] = []
    for stage in range(1, num_stages + 1):
        reached = [worst] * (count + 1)
        chosen = [0] * (count + 1)
        for end in range(stage, count - (num_stages - stage) + 1):
            for start in range(end - 1, stage - 2, -1):
                if memory[stage - 1][end] - memory[stage - 1][start] > max_bytes:
                    break
                own = seconds[end] - seconds[start]
                if own > reached[end][0]:
                    break  # and longer ones are slower still
                slowest, squares = best[start]
                cost = (max(slowest, own), squares + own * own)
                if cost < reached[end]:
                    reached[end], chosen[end] = cost, start
        best = reached
        choices.append(chosen)
    if best[count] == worst:
        return None
    ends = [count]
    for chosen in reversed(choices[1:]):
        ends.append(chosen[ends[-1]])
    return ends[::-1]


def named_split(names: Sequence[str], units: Sequence[str]) -> list[list[str]]:
    """Return each stage's units from the user's names of the first module of every later stage.

    Args:
        names: Modules at which a new stage begins, in the order of their calls.
        units: All units, in the order of their calls.

    Raises:
        ConfigError: A name is no unit, or names are in another order.
    """
    position: Mapping[str, int] = {name: index for index, name in enumerate(units)}
    for name in names:
        if name not in position:
            raise ConfigError(
                f"split names {name!r}, where no stage can begin. It can at {_listed(units[1:])}."
            )
    ends = [position[name] for name in names]
    if ends != sorted(set(ends)) or 0 in ends:
        raise ConfigError(
            f"split={list(names)} is not in the order in which the model calls them, or begins "
            f"with its first module: name the first module of the second stage, then of the "
            f"third, and so on."
        )
    starts = [0, *ends]
    return [list(units[start:end]) for start, end in zip(starts, [*ends, len(units)], strict=True)]


def refuse_too_few(units: Sequence[str], num_stages: int) -> None:
    """Refuse a model with fewer units than stages.

    Raises:
        ConfigError: Naming the units.
    """
    if len(units) >= num_stages:
        return
    instead = f"Use stages={len(units)} or fewer." if len(units) > 1 else "Use bolt_zero3."
    raise ConfigError(
        f"stages={num_stages} was asked, but the model has {len(units)} parts that can stand in a "
        f"stage of their own ({_listed(units)}): layers outside of repeated blocks, and each of "
        f"several blocks of one class and shape in a list. {instead}"
    )


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 6:
        return ", ".join(names)
    return ", ".join([*names[:3], "...", *names[-2:]])

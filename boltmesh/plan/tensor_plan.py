"""The division of layers by tensor parallelism, before a rank is started.

``boltmesh plan`` and ``boltmesh fit --dry-run`` print it. The model is built from fake tensors, and
one batch of the data runs through it on tensors without data, as at the start of a run. What a run
does beside that is to prove the plan: it runs a batch both ways and compares.
"""

import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from boltmesh.configs.advice import located
from boltmesh.errors import ConfigError
from boltmesh.plan.dry_model import stand_in_model
from boltmesh.plan.dry_step import STEP
from boltmesh.plan.text import align, size_text
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.hugging_face import disagreements
from boltmesh.strategies.tensor.plan import TensorPlan, rows
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.telemetry.tensor_plan import PlannedParameters

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class TensorSummary:
    """A plan before it runs, and the bytes that a rank keeps by it."""

    model: str
    plan: TensorPlan
    whole_bytes: int
    """Bytes of all parameters."""
    rank_bytes: int
    """Bytes of the parameters that the fullest rank keeps."""
    notes: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {"schema": 1, "tensor": asdict(self)}


def find_division(
    module: "LightningModule", batch: Any, size: int, given: Mapping[str, Any], *, source: str
) -> TensorPlan:
    """Return how a model of stand-ins is divided, by a look at its own step.

    Args:
        module: The whole model.
        batch: A batch of its data.
        size: Ranks that share each layer.
        given: ``plan``, ``loss_parallel`` and ``sequence_parallel`` of the strategy's section.
        source: The config's file, for errors.

    Raises:
        ConfigError: When it cannot be divided as was asked.
    """
    wanted = given.get("plan")
    args = (batch, *step_arguments(module, STEP))
    rehearsal = DryRun(module, STEP, args, torch.device("cpu"))
    try:
        analysis = analyse(module, rehearsal.forward, blocks=find_blocks(module))
        return make_plan(
            analysis,
            size,
            loss_parallel=given.get("loss_parallel", "auto"),
            sequence_parallel=bool(given.get("sequence_parallel", False)),
            wanted=None if wanted in (None, "auto") else wanted,
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: strategy: {error}") from error


def summarise(
    module: "LightningModule", plan: TensorPlan, element_bytes: int, notes: Sequence[str]
) -> TensorSummary:
    """Return the bytes that ranks keep of a whole model by a plan."""
    whole = {name: each.numel() for name, each in module.named_parameters()}
    divided = {name: math.prod(each.local_shape(plan.size)) for name, each in plan.sharded.items()}
    return TensorSummary(
        model=type(module).__name__,
        plan=plan,
        whole_bytes=element_bytes * sum(whole.values()),
        rank_bytes=element_bytes * sum({**whole, **divided}.values()),
        notes=(*disagreements(plan, module), *notes),
    )


WHOLE = "whole"
WIDTH = 96
"""Columns of text where there is no terminal, and of prose in a wide one."""

LEAST_WIDTH = 40
LEAST_STEP = 28
"""Columns for the collectives of a step, where these are in the table."""

_PARTS = (
    "Parts are written as count x size: 4x32 are 4 parts of 32, 3x4x32 three times that; each "
    "rank has some of the 4."
)
_PROOF = (
    "A run proves this on a batch before its first step: losses, gradients and outputs of blocks. "
    "What differs from the whole model then stays whole, and the run says so."
)


def plan_tensor(
    config: DictConfig, ranks_per_host: int, given: Mapping[str, Any], *, source: str
) -> TensorSummary:
    """Find the part of each rank in a config's model, by the arguments of the strategy.

    A layer is divided within the ``ranks_per_host`` of one host.

    Raises:
        ConfigError: When model or data cannot be built, or options do not fit.
    """
    size = given.get("size") or ranks_per_host
    if ranks_per_host % size:
        raise ConfigError(
            f"{located(source, 'strategy.size')}={size} does not divide the {ranks_per_host} "
            f"ranks of a host, and the ranks of a layer are on one host. Set strategy.size=null, "
            f"or plan for other ranks with --devices."
        )
    with stand_in_model(config, source, needs="what can be divided is found") as made:
        plan = find_division(made.module, made.batch, size, given, source=source)
    return summarise(made.module, plan, made.types.stored.itemsize, made.notes)


def write_tensor(summary: TensorSummary, width: int | None = None) -> str:
    """Return what each rank keeps, the collectives of a step, and why the rest is whole.

    Args:
        summary: The plan.
        width: Columns of text; by default those of the terminal.
    """
    width = width or max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    table = rows(summary.plan)
    whole = _grouped((each.why, each.pattern) for each in table if each.style == WHOLE)
    kept = f"{size_text(summary.rank_bytes)} of {size_text(summary.whole_bytes)} of parameters"
    title = f"{summary.model} over {summary.plan.size} ranks: each keeps {kept}"
    notes: dict[str, list[str]] = {note: [] for note in (*summary.plan.notes, *summary.notes)}
    lines, has_steps = _table(table, width)
    if not has_steps:
        asked = _grouped((each.collectives, each.pattern) for each in table if each.collectives)
        lines += _section("requested in every step:", asked, width)
    return "\n".join(
        [
            *textwrap.wrap(title, width),
            "",
            *lines,
            *_section("whole, and why:", whole, width),
            *_section("divided, and why:", _reasons(table), width),
            *_section("notes:", notes, width),
            "",
            *textwrap.wrap(f"{_PARTS} {_PROOF}", min(width, WIDTH)),
        ]
    )


def _table(table: Sequence[PlannedParameters], width: int) -> tuple[list[str], bool]:
    """Return the table in the widest form that fits, and whether it has a step's collectives."""
    numbers = [
        ("count", [str(each.count) for each in table]),
        ("shape", ["x".join(map(str, each.shape)) for each in table]),
        ("per rank", [size_text(each.rank_bytes) for each in table]),
    ]
    names = _ljust("parameter", [each.pattern for each in table])
    styles = _ljust("how it is divided", [each.style for each in table])
    named = [f"{name}  {style}".rstrip() for name, style in zip(names, styles, strict=True)]
    lines = [line.rstrip() for line in align(numbers, (named[0], named[1:]))]
    used = max(map(len, lines)) + 2
    if width - used >= LEAST_STEP:
        steps = ["in every step", *(each.collectives for each in table)]
        return list(_with_last(lines, steps, used, width)), True
    if used - 2 <= width:
        return lines, False
    return [line for each in table for line in _stacked(each, width)], False


def _with_last(lines: Sequence[str], texts: Sequence[str], at: int, width: int) -> Iterator[str]:
    """Yield lines with one more text each, from a column on, in as many lines as it needs."""
    for line, text in zip(lines, texts, strict=True):
        parts = textwrap.wrap(text, width - at) or [""]
        yield f"{line:<{at}}{parts[0]}".rstrip()
        yield from (" " * at + part for part in parts[1:])


def _ljust(title: str, cells: Sequence[str]) -> list[str]:
    width = max(map(len, (title, *cells)))
    return [each.ljust(width) for each in (title, *cells)]


def _stacked(row: PlannedParameters, width: int) -> list[str]:
    """Return a row for a terminal that is too narrow for a table: the name, below it the rest."""
    shape = "x".join(map(str, row.shape))
    text = f"{row.count} of {shape}, {size_text(row.rank_bytes).strip()} a rank: {row.style}"
    return [row.pattern, *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")]


def _reasons(table: Sequence[PlannedParameters]) -> dict[str, list[str]]:
    return _grouped((each.why, each.pattern) for each in table if each.style != WHOLE and each.why)


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key, pattern in pairs:
        groups.setdefault(key, []).append(pattern)
    return groups


def _section(title: str, groups: Mapping[str, Sequence[str]], width: int) -> list[str]:
    if not groups:
        return []
    lines = ["", title]
    for key, patterns in groups.items():
        lines += textwrap.wrap(key, width, initial_indent="  ", subsequent_indent="  ")
        listed = ", ".join(patterns)
        lines += textwrap.wrap(
            listed, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False
        )
    return lines

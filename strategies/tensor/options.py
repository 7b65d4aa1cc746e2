"""Options of the tensor axis, checked before anything starts, and what it refuses.

``Overrides`` are a user's changes to a plan: parameters to divide or keep whole, by name patterns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Literal, get_args

from lightning.pytorch import LightningModule
from torch.distributed.tensor import DTensor

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.dry_run.unsupported import Reasons, refuse_undividable
from boltmesh.strategies.parameter_access import is_part
from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.symbolic_dims import SymbolicDim
from boltmesh.strategies.tensor.candidates import (
    Roles,
    ShardableDim,
    candidate_of,
    places,
    why_not,
)
from boltmesh.strategies.tensor.plan import LossParallel, Style

UserPlan = Literal["auto"] | Mapping[str, str]


@dataclass(frozen=True)
class TensorOptions:
    """The arguments of ``TensorParallelStrategy``; see there.

    Raises:
        ConfigError: For an unknown value of an option.
    """

    size: int | None = None
    plan: UserPlan = "auto"
    sequence_parallel: bool = False
    loss_parallel: LossParallel = "auto"

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size={self.size} holds no rank. Use 2 or more, or leave it out.")
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise ConfigError(
                f"plan={self.plan!r} is neither 'auto' nor a mapping of patterns of parameter "
                f"names to styles, such as {{'*.up.weight': 'column'}}."
            )
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                f"sequence_parallel={self.sequence_parallel!r} is neither true nor false."
            )
        if self.loss_parallel not in {True, False, "auto"}:
            raise ConfigError(
                f"loss_parallel={self.loss_parallel!r} is none of its settings. Use 'auto', true "
                f"or false."
            )


LAYERS = Reasons(
    dataloader_iter="the ranks of a tensor group compare each batch before a step with it",
    batch_size_finder=(
        "which need not be on all ranks of a tensor group at once, and those that are left wait "
        "for the others. Choose batch_size by boltmesh plan, or try sizes."
    ),
    sync_batchnorm=(
        "takes the moments of batch norms over all ranks of the job, and the ranks of a tensor "
        "group have the same batch: they would count it several times. Leave it out, or use "
        "GroupNorm or LayerNorm."
    ),
    gradients="each rank's part of the gradients",
)
"""Reasons why ranks that share layers cannot do separately what one process does."""


def refuse_parameters(module: LightningModule, *, is_divided: bool) -> None:
    """Refuse parameters that cannot be divided, or that have been divided or sharded since.

    Args:
        module: The module that is about to be divided.
        is_divided: Whether this strategy divided it before, by a plan that was verified only with a
            step that does not train.

    Raises:
        ConfigError: If any was sharded since; it names the order in which to run.
        UnsupportedError: Naming the parameter.
    """
    if is_divided and any(isinstance(each, DTensor) for each in module.parameters()):
        raise ConfigError(
            f"{type(module).__name__} was divided for an evaluation and has been sharded since, so "
            f"the parts of the plan that training needs cannot be proven any more. Call "
            f"Trainer.fit first, or build a new module and load a checkpoint; with zero_stage=0 "
            f"either order works."
        )
    for name, parameter in module.named_parameters():
        if is_part(parameter) and not is_divided:
            raise UnsupportedError(
                f"{name!r} of {type(module).__name__} was divided by another strategy object. Give "
                f"the Trainer the same object, or build a new module and load a checkpoint."
            )
    refuse_undividable(
        module,
        instead="Build a new module and load a checkpoint.",
        sparse="whose norm cannot be computed over ranks",
    )


WHOLE = "whole"
STYLES: tuple[str, ...] = (*get_args(Style), WHOLE)
"""Values that a user's mapping may have."""


@dataclass
class Overrides:
    """Axes that the user has forced to be divided, or to stay whole."""

    forced: list[ShardableDim] = field(default_factory=list)
    whole: dict[SymbolicDim, str] = field(default_factory=dict)
    """Why an axis stays whole."""


def read_overrides(
    analysis: Analysis, possible: Sequence[ShardableDim], size: int, mapping: Mapping[str, str]
) -> Overrides:
    """Find the axes that a user's mapping refers to.

    Args:
        analysis: Analysis of the model.
        possible: Axes that can be divided.
        size: Number of ranks.
        mapping: Style by pattern of the names of parameters or modules, ``*`` for any part.

    Raises:
        ConfigError: If a pattern matches nothing, or something that cannot be divided that way.
    """
    overrides = Overrides()
    for pattern, style in mapping.items():
        if style not in STYLES:
            raise ConfigError(
                f"plan says {style!r} for {pattern!r}. A style is one of {', '.join(STYLES)}."
            )
        for names in _matched(analysis, pattern, is_deep=style == WHOLE):
            if style == WHOLE:
                overrides.whole.update(
                    {
                        each.atom: f"the plan that was given says {WHOLE!r} for {pattern!r}"
                        for each in possible
                        if each.parameters & set(names)
                    }
                )
                continue
            division = _divided(analysis, possible, size, names, style)
            if isinstance(division, str):
                raise ConfigError(
                    f"plan says {style!r} for {pattern!r}, but {names[0]} cannot be divided so: "
                    f"{division}. Take {pattern!r} out of plan."
                )
            if all(each.atom is not division.atom for each in overrides.forced):
                overrides.forced.append(division)
    _refuse_both(overrides)
    return overrides


def _matched(analysis: Analysis, pattern: str, *, is_deep: bool) -> list[list[str]]:
    """Return the first names of matched parameters by module; deep: children of a module, too."""
    names = {name: facts.name for facts in analysis.parameters.values() for name in facts.names}
    exact = [[first] for name, first in names.items() if fnmatchcase(name, pattern)]
    modules: dict[str, list[str]] = {}
    for name, first in names.items():
        owner = name.rpartition(".")[0]
        around = [*_ancestors(owner)] if is_deep else [owner]
        if [first] not in exact and any(fnmatchcase(each, pattern) for each in around if each):
            modules.setdefault(owner, []).append(first)
    found = [*exact, *modules.values()]
    if not found:
        known = [*names, *(name.rpartition(".")[0] for name in names)]
        close = get_close_matches(pattern, known, n=1)
        advice = f"Did you mean {close[0]!r}?" if close else f"Names are such as {known[0]!r}."
        raise ConfigError(f"plan has the pattern {pattern!r}, which matches no parameter. {advice}")
    return found


def _ancestors(module: str) -> Iterator[str]:
    """Yield a module's name and those of its ancestors."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _divided(
    analysis: Analysis,
    possible: Sequence[ShardableDim],
    size: int,
    names: Sequence[str],
    style: str,
) -> ShardableDim | str:
    """Return the axis along which one of the parameters is divided in a style, or why not."""
    for each in possible:
        if any(m.parameter in names and m.style == style for m in each.members):
            return each
    roles = Roles(analysis)
    whys: dict[str, None] = {}
    for atom, found in places(analysis).items():
        here = [each for each in found if each.parameter in names]
        if not any(roles.style(each.parameter, each.dim, atom) == style for each in here):
            continue
        why = why_not(atom, found, roles, size, trusted=analysis.trace.without_rule)
        if not why and all(at == 0 for each in here for at in each.at):
            return candidate_of(analysis, atom, found, roles)
        whys.setdefault(why or "it lies inside of something else")
    return "; ".join(whys) or "the step does not use it so"


def _refuse_both(overrides: Overrides) -> None:
    for one, other in combinations(overrides.forced, 2):
        both = sorted(one.parameters & other.parameters)
        if both:
            raise ConfigError(
                f"plan divides {both[0]} in two dimensions. Take one of the patterns that match it "
                f"or what it is divided together with out of plan."
            )
    for each in overrides.forced:
        if each.atom in overrides.whole:
            raise ConfigError(
                f"plan divides {min(each.parameters)} and leaves something whole that is divided "
                f"together with it: {', '.join(sorted(each.parameters))}. Give them all one style."
            )

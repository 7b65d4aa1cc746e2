"""Finds the modules that are gathered as units, and their dtypes.

A unit's parameters are gathered when its forward begins and may be freed when it ends, so a unit
must be a module that is *called*. Parameters outside of units are gathered once around the whole
step. Small units bound memory, large ones use the links better; a block that the model repeats is
nearly always the right size, and no number has to be chosen.

Under autocast a block is gathered in autocast's dtype, as its matrix products would make that copy
anyway. Norms and embeddings are not multiplied: autocast reads them in fp32, and refuses a layer
norm of mixed dtypes on the CPU. One collective has one dtype, so the root, which stays in fp32,
gathers these few (``full_precision_modules``).
"""

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.blocks import can_be_block, find_blocks


def find_units(root: Module, patterns: Sequence[str] | None = None) -> dict[str, Module]:
    """Return the units by dotted name, parents before what is in them.

    Args:
        root: The whole model; never a unit itself.
        patterns: Names, or patterns of which ``*`` stands for one part of a dotted name. None
            takes the repeated blocks: children of a list that occur in the same shape again, with
            their siblings of the same class; else modules that an ``nn.Sequential`` calls, and
            siblings of the same class and shapes. Blocks that share a parameter with something
            outside stay with the root, which gathers it for both.

    Raises:
        ConfigError: When a pattern matches nothing that can be a unit.
    """
    if patterns is not None:
        return _named_units(root, patterns)
    names = _Names(root)
    found = find_blocks(root)
    return {name: unit for name, unit in found.items() if names.find_tie(unit) is None}


class _Names:
    """Dotted names of parameters and modules, all of them if they are shared."""

    def __init__(self, root: Module) -> None:
        self.parameters: dict[Parameter, list[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(parameter, []).append(name)
        self.modules: dict[Module, list[str]] = {}
        for name, module in root.named_modules(remove_duplicate=False):
            self.modules.setdefault(module, []).append(name)

    def find_tie(self, unit: Module) -> tuple[str, str] | None:
        """Return a shared parameter's names inside and outside of a unit; None if there is none."""
        places = tuple(f"{path}." for path in self.modules[unit])
        for parameter in unit.parameters():
            inside = [name for name in self.parameters[parameter] if name.startswith(places)]
            outside = [name for name in self.parameters[parameter] if not name.startswith(places)]
            if outside:
                return inside[0], outside[0]
        return None


def _named_units(root: Module, patterns: Sequence[str]) -> dict[str, Module]:
    modules = {name: each for name, each in root.named_modules() if name}
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in modules if _matches(name, pattern)]
        if not matched:
            raise ConfigError(_explain_no_match(root, pattern, modules))
        usable = [name for name in matched if can_be_block(modules[name])]
        if not usable:
            raise ConfigError(_explain_no_use(pattern, matched[0], modules[matched[0]]))
        chosen.update(usable)
    units = {name: each for name, each in modules.items() if name in chosen}
    names = _Names(root)
    for name, unit in units.items():
        if tie := names.find_tie(unit):
            raise ConfigError(
                f"blocks={list(patterns)} makes {name!r} a unit, and its parameter {tie[0]!r} is "
                f"also {tie[1]!r}, outside of it: a parameter is gathered with one unit only. "
                f"Leave {name!r} out of blocks, or name a module that holds both."
            )
    return units


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _explain_no_match(root: Module, pattern: str, modules: dict[str, Module]) -> str:
    families = dict.fromkeys(
        re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        for name, each in modules.items()
        if can_be_block(each)
    )
    near = difflib.get_close_matches(pattern, families, n=1, cutoff=0.3)
    hint = f"Did you mean {near[0]!r}?" if near else "Leave blocks out to have them found."
    return f"blocks={pattern!r} matches no module of {type(root).__name__}. {hint}"


def _explain_no_use(pattern: str, name: str, module: Module) -> str:
    kind = type(module).__name__
    if next(module.parameters(), None) is None:
        return (
            f"blocks={pattern!r} is {name!r}, a {kind} without parameters: there is nothing to "
            f"shard. Name a module that has some."
        )
    return (
        f"blocks={pattern!r} is {name!r}, a {kind} without a forward of its own: it is never "
        f"called, so nothing could gather it in time. Name what it holds: '{name}.*'."
    )


_MULTIPLYING = (
    nn.Bilinear,
    nn.Linear,
    nn.MultiheadAttention,
    nn.PReLU,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvNd,  # noqa: SLF001 - the base of all convolutions
)
"""Modules of torch whose parameters autocast casts, vectors included."""

_LOOKING_UP = (nn.Embedding, nn.EmbeddingBag)


def full_precision_modules(unit: Module) -> list[Module]:
    """Return the modules of a unit whose own parameters stay in fp32 under autocast.

    A matrix of an author's own module is taken for a factor of a product, which large ones are.
    """
    return [owner for owner in unit.modules() if _owns_shardable(owner) and not _is_cast(owner)]


def is_any_cast(unit: Module) -> bool:
    """Whether autocast casts parameters of a unit, so that gathering them cast pays."""
    return any(_is_cast(owner) for owner in unit.modules() if _owns_shardable(owner))


def _is_cast(module: Module) -> bool:
    if isinstance(module, _LOOKING_UP):
        return False
    if isinstance(module, _MULTIPLYING):
        return True
    return any(param.dim() > 1 for param in module.parameters(recurse=False))


def _owns_shardable(module: Module) -> bool:
    """Whether a module has parameters itself that no unit within has taken."""
    return any(not isinstance(param, DTensor) for param in module.parameters(recurse=False))


def precision_policy(compute_dtype: torch.dtype | None, *, is_cast: bool) -> MixedPrecisionPolicy:
    """Return in which types a unit is gathered and reduced; ``compute_dtype`` is autocast's.

    Blocks are gathered in that type, for half the traffic and memory, the root as it is. Gradients
    are reduced in fp32. Inputs stay as they are: autocast decides about those.
    """
    if compute_dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype if is_cast else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )

"""Finds the modules whose calls a stage runs or leaves out as a whole."""

from collections.abc import Iterator

from torch.nn import Module, Parameter

from boltmesh.strategies.blocks import find_blocks, has_forward


def find_stage_units(root: Module) -> dict[str, Module]:
    """Return what may be given to stages, by dotted name: no unit lies within another one.

    Units are the repeated blocks, and every outermost other module with parameters that holds no
    block: embeddings, a final norm, a head. What has no parameters is code between units, as the
    step itself is, but for layers that keep running statistics.
    """
    blocks = set(find_blocks(root).values())
    return dict(_within(root, "", blocks, set()))


def parameter_names(root: Module) -> dict[Parameter, str]:
    """Return the first dotted name of every parameter, a shared one once."""
    return {parameter: name for name, parameter in root.named_parameters()}


def unit_parameters(root: Module, units: dict[str, Module]) -> dict[str, frozenset[str]]:
    """Return which parameters each unit holds, by their first names in ``root``."""
    names = parameter_names(root)
    return {
        unit: frozenset(names[parameter] for parameter in module.parameters())
        for unit, module in units.items()
    }


def _within(
    module: Module, prefix: str, blocks: set[Module], seen: set[Module]
) -> Iterator[tuple[str, Module]]:
    for name, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        path = f"{prefix}{name}"
        holds_blocks = child not in blocks and any(each in blocks for each in child.modules())
        if holds_blocks or not has_forward(child):
            yield from _within(child, f"{path}.", blocks, seen)
        elif next(child.parameters(), None) is not None or _keeps_statistics(child):
            yield path, child


def _keeps_statistics(module: Module) -> bool:
    """Whether calls change its buffers: left to every stage, it would see what none computed."""
    return any(
        getattr(each, "track_running_stats", False) and next(each.buffers(), None) is not None
        for each in module.modules()
    )

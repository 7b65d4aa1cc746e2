"""``boltmesh advise``: the choice of a layout in words, and the first change to make."""

from collections.abc import Iterator

from boltmesh.advisor.layouts import PlannedLayout
from boltmesh.advisor.report import command_line, head_lines, memory_text, nothing_lines, words
from boltmesh.advisor.search import ConfigSearch
from boltmesh.plan.text import size_text

MATTERS = 0.10
"""Layouts that differ by less are taken as equal."""


def advice_lines(found: ConfigSearch, line: str) -> Iterator[str]:
    """Yield the advice as lines of text.

    Args:
        found: Layouts of the config.
        line: The config with its overrides, as the user gave them.
    """
    yield from head_lines(found)
    yield ""
    chosen = found.best(20)
    room = size_text(round(room_gib(found) * 2**30)).strip()
    fits = ", ".join(f"{words(each)} ({memory_text(each)})" for each in chosen)
    yield f"Fits into the {room} of a rank: {fits or 'nothing'}."
    kinds = {each.layout.division for each in chosen}
    large: dict[object, PlannedLayout] = {}
    for each in found.candidates:
        if each.layout.division not in kinds:
            large.setdefault(each.layout.division, each)
    if large:
        too_large = ", ".join(f"{words(each)} ({memory_text(each)})" for each in large.values())
        yield f"Does not fit: {too_large}."
    yield from (f"Cannot run: {what}: {why}" for what, why in found.refused)
    yield f"The usual rule: {rule(found)}"
    if chosen:
        agrees = follows_rule(found, chosen[0])
        said = "agree" if agrees else f"say otherwise: {words(chosen[0])}"
        yield f"The numbers {said}."
    yield ""
    yield from _first_change(found, chosen, line)


def room_gib(found: ConfigSearch) -> float:
    """Return the memory that a rank has."""
    machine = found.hardware.machine
    return (machine.host_gib if found.hardware.is_cpu else machine.device_gib) or 0.0


def rule(found: ConfigSearch) -> str:
    """Return what the usual decision flow says of the case."""
    hardware = found.hardware
    replicas_fit = _fits_replicated(found)
    if hardware.num_ranks == 1:
        return (
            "one device and the model fits: train."
            if replicas_fit
            else "one device and the model does not fit: ZeRO with offload to the host or a disk."
        )
    if replicas_fit:
        return "the model fits into one device: DDP or ZeRO."
    block = max((each.numel for each in found.model.units if each.name), default=0)
    if 4 * 4 * block > room_gib(found) * 2**30:
        return "one block does not fit into a device: tensor groups, or ZeRO-3 with tiled linears."
    if hardware.num_nodes == 1:
        return "one node and the model does not fit into a device: ZeRO, pipeline or tensor groups."
    return "several nodes: ZeRO over a fast network; else tensor groups in a node, and a pipeline."


def follows_rule(found: ConfigSearch, best: PlannedLayout) -> bool:
    """Whether the best layout is one that the usual rule names."""
    if _fits_replicated(found):
        return not best.layout.is_divided
    return best.layout.name != "bolt_ddp"


def _fits_replicated(found: ConfigSearch) -> bool:
    return any(
        each.fits and each.layout.name == "bolt_ddp" and not each.layout.arguments
        for each in found.candidates
    )


def _first_change(found: ConfigSearch, chosen: list[PlannedLayout], line: str) -> Iterator[str]:
    if not chosen:
        yield from nothing_lines(found)
        changes = [f"{words(each)} needs {memory_text(each)}" for each in found.smallest(2)]
        yield f"Change first what needs least memory: {'; '.join(changes)}."
        if found.enough_ranks is not None:
            yield f"With {found.enough_ranks} ranks of this kind ZeRO-3 fits."
        yield "bolt_zero3_nvme keeps parameters and optimizer state on a disk; see docs/zero.md."
        return
    best = chosen[0]
    own = found.own
    if own is None:
        yield f"The config's own strategy was not predicted. The best is: {words(best)}."
    elif not own.fits:
        yield f"Change first: the config's own layout, {words(own)}, does not fit."
    elif own.seconds <= best.seconds * (1 + MATTERS):
        yield (
            f"Change nothing: the config's own layout, {words(own)}, is as fast as the best within "
            f"the error of the prediction."
        )
        return
    else:
        faster = own.seconds / best.seconds
        yield (
            f"Change first: {words(best)} is predicted {faster:.2f} x as fast as the config's "
            f"own layout, {words(own)}. Measure both with boltmesh tune."
        )
    yield f"  {command_line(found, best, line)}"

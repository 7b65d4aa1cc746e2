"""Backends of a plan's blocks, and the rest of the plan if some blocks stay whole."""

from collections.abc import Iterable
from dataclasses import replace

from boltmesh.strategies.tensor.plan import Backend, TensorPlan, Unsharded

_ORDER: tuple[Backend, ...] = ("local", "region", "replicated")
"""In the order in which they are tried; the last one always works."""

OUTSIDE = ""
"""Name for parameters outside of repeated blocks."""


def backend_of(plan: TensorPlan, block: str) -> Backend:
    """Return a block's backend: that of the first of its kind; ``local`` by default."""
    return plan.backends.get(plan.kinds.get(block, block), "local")


def backends_of_axes(plan: TensorPlan) -> list[Backend]:
    """Return the backend of each axis.

    Blocks that share an axis, such as those that share T5's position bias, use the same backend:
    the latest in the order among theirs.
    """
    known: dict[str, Backend] = {
        block: backend_of(plan, block) for axis in plan.axes for block in _blocks(axis.blocks)
    }
    is_settled = False
    while not is_settled:
        is_settled = True
        for axis in plan.axes:
            hardest = _hardest(known[block] for block in _blocks(axis.blocks))
            for block in _blocks(axis.blocks):
                if known[block] != hardest:
                    known[block] = hardest
                    is_settled = False
    return [_hardest(known[block] for block in _blocks(axis.blocks)) for axis in plan.axes]


def block_of(plan: TensorPlan, name: str) -> str:
    """Return the block that contains a module or parameter, or ``OUTSIDE``."""
    known = {block for axis in plan.axes for block in axis.blocks} | plan.kinds.keys()
    return next((each for each in known if f"{name}.".startswith(f"{each}.")), OUTSIDE)


def without_replicated(plan: TensorPlan) -> TensorPlan:
    """Return the plan without divisions in blocks that stay whole. Axes keep their indices."""
    backends = backends_of_axes(plan)
    whole = {index for index, backend in enumerate(backends) if backend == "replicated"}
    if not whole:
        return plan
    blocks = {block for index in whole for block in _blocks(plan.axes[index].blocks)}

    def stays(name: str) -> bool:
        return block_of(plan, name) not in blocks

    dropped = [each for each in plan.sharded.values() if each.axis in whole]
    return replace(
        plan,
        sharded={name: each for name, each in plan.sharded.items() if each.axis not in whole},
        whole=plan.whole
        + tuple(Unsharded(each.name, "its block did not verify") for each in dropped),
        partial=tuple(filter(stays, plan.partial)),
        boundaries=tuple(filter(stays, plan.boundaries)),
        fed=tuple(filter(stays, plan.fed)),
        local_dropouts=tuple(filter(stays, plan.local_dropouts)),
        attributes=tuple(each for each in plan.attributes if stays(each.module)),
        region_axes=tuple(each for each in plan.region_axes if each not in whole),
    )


def without_sequence(plan: TensorPlan) -> TensorPlan:
    """Return the plan with whole sequences, without the consequences of dividing them."""
    if plan.sequence is None:
        return plan
    return replace(
        plan,
        sequence=None,
        partial=plan.sequence.plain_partial,
        boundaries=plan.sequence.plain_boundaries,
        local_dropouts=plan.sequence.plain_local_dropouts,
    )


def _blocks(blocks: tuple[str, ...]) -> tuple[str, ...]:
    return blocks or (OUTSIDE,)


def _hardest(backends: Iterable[Backend]) -> Backend:
    return max(backends, key=_ORDER.index)

"""Tries a user's optimizer on small parameters, to find what the step of an element depends on.

The optimizer itself, its state and the run's random states do not change.

Each function compares trials of some steps with the same values and gradients:

``mixes_elements``: steps of the two halves of a parameter are not the halves of its step. Muon
and Shampoo need full matrices, LARS and LAMB norms of full parameters, Adafactor rows and columns;
optimizers that mix parameters mix halves too. Tensor ranks and offload then step whole parameters.

``mixes_parameters``: the step of one parameter depends on another one: Prodigy, D-Adaptation, SAM,
an Adam that clips by its own norm. A pipeline refuses them: a rank has only its stages.

``matrix_use``: the step multiplies or factors matrices. torch would gather shards for that, in an
order and precision that depend on the number of ranks. ZeRO then steps whole parameters.

``shard_mismatch``: steps of DTensor shards fail, or are not the shards of the step. Norms and sums
of DTensors are those of the whole; flat views, items and rows often are not. ZeRO then steps whole
parameters.

``steps_in_rounds``: steps of one parameter after the other are one step of all. Most are; those
that count their calls in an attribute are not. Exchanges of whole parameters then overlap with it.

``needs_all_ranks``: the step calls collectives itself, or draws random numbers. Refused where
each rank steps whole parameters that only it owns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.optimizer_trial import (
    FEW_STEPS,
    STEPS,
    WIDE,
    Group,
    Leaf,
    calls_evenly,
    draw_leaves,
    inner_optimizers,
    is_near,
    kinds_of_groups,
    run_trial,
    steps_one_by_one,
)
from boltmesh.strategies.random_state import random_state_unchanged
from boltmesh.strategies.torch_compat.tensors import OperatorsSeen

_MIX_PARAMETERS = {"LBFGS": "takes products of whole gradients"}
"""Optimizers of torch, which need no trial, and what they do."""

_MIX_ELEMENTS = _MIX_PARAMETERS | {
    "Adafactor": "squares norms of rows in place",
    "Muon": "makes whole matrices orthogonal",
}


def find_mixing(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that step parts of parameters differently from the whole.

    Raises:
        UnsupportedError: Naming an optimizer that cannot step whole parameters one by one.
    """
    mixing = [each for each in optimizers if mixes_elements(each)]
    for optimizer in mixing:
        why = needs_all_ranks(optimizer)
        if why is None and mixes_parameters(optimizer):
            why = "steps by all gradients at once, of which a tensor rank has parts"
        if why is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__} {why}. Use bolt_ddp, or an optimizer that works on "
                f"each element by itself, such as AdamW."
            )
    return mixing


def mixes_elements(optimizer: Optimizer) -> bool:
    """Whether steps of two halves of a parameter differ from the halves of its step.

    True if it cannot be tried, since it does not work on small matrices: then whole parameters are
    stepped, which is always right. One that steps another optimizer is then judged by that one.
    """

    def differs_in(group: Group, leaves: list[Leaf], steps: int = STEPS) -> bool:
        whole = run_trial(group, leaves, steps)
        halves = [run_trial(group, [leaf.half(at) for leaf in leaves], steps) for at in range(2)]
        return not all(
            is_near(torch.cat(parts, leaf.dim + 1), change)
            for leaf, change, *parts in zip(leaves, whole, *halves, strict=True)
        )

    def differs(group: Group) -> bool:
        wide = draw_leaves([WIDE], group.is_matrices)
        return differs_in(group, group.leaves) or differs_in(group, wide, FEW_STEPS)

    return _is_any(optimizer, differs, mixes_elements, _MIX_ELEMENTS, untried=True)


def mixes_parameters(optimizer: Optimizer) -> bool:
    """Whether a parameter's step depends on the gradient or the value of another one.

    False if it cannot be tried, as with ``mixes_elements``.
    """

    def differs(group: Group) -> bool:
        first, *others = group.leaves
        changed = [each.otherwise() for each in others]
        return not is_near(
            run_trial(group, [first, *changed])[0], run_trial(group, group.leaves)[0]
        )

    return _is_any(optimizer, differs, mixes_parameters, _MIX_PARAMETERS)


def steps_in_rounds(optimizer: Optimizer) -> bool:
    """Whether steps of parameters one after the other are one step of all.

    Plain settings of groups, such as a counter of steps, are restored between them. False if it
    cannot be tried, or if it counts its calls elsewhere.
    """

    def differs(group: Group) -> bool:
        return not steps_one_by_one(group)

    def inner(optimizer: Optimizer) -> bool:
        return not steps_in_rounds(optimizer)

    if inner_optimizers(optimizer) and not calls_evenly(optimizer):
        return False
    return not _is_any(optimizer, differs, inner, _MIX_PARAMETERS, untried=True)


def matrix_use(optimizer: Optimizer) -> str | None:
    """Return what a step needs whole matrices for, None if no use was found.

    The reason is part of a sentence for a message: "multiplies or factors whole matrices".
    """

    def multiplies(group: Group) -> bool:
        seen = OperatorsSeen(_is_product)
        try:
            with seen:
                run_trial(group, [each for each in group.leaves if each.value.dim() > 1])
        except Exception:
            if not seen.is_any:
                raise
        return seen.is_any

    def inner(optimizer: Optimizer) -> bool:
        return matrix_use(optimizer) is not None

    if not _is_any(optimizer, multiplies, inner, _MIX_ELEMENTS):
        return None
    return _known(optimizer, _MIX_ELEMENTS) or "multiplies or factors whole matrices"


def shard_mismatch(
    optimizer: Optimizer, mesh: DeviceMesh, placements: Sequence[Placement]
) -> str | None:
    """Return why steps of shards are not the shards of the step; None if they are.

    Collective over ``mesh``; every rank returns the same. Also None if it cannot be tried on small
    matrices.
    """
    why: list[str] = []

    def fails(group: Group) -> bool:
        ranks = mesh.size()
        rows = 3 * ranks - 1  # the last rank has fewer, and none has no row
        many = max(3, -(-WIDE[0] // ranks)) * ranks - 1
        even = 2 * ranks  # a mean over shards of one size is another kind of sum to DTensor
        shapes = (
            (((rows, 6), (rows, 4), (rows,)), STEPS),
            (((many, WIDE[1]),), FEW_STEPS),
            (((even, 6), (even,)), FEW_STEPS),
        )
        for several, steps in shapes:
            leaves = draw_leaves(several, group.is_matrices, mesh.device_type)
            whole = run_trial(group, leaves, steps)
            try:
                parts = run_trial(group, [each.shard(mesh, placements) for each in leaves], steps)
                if not all(is_near(one, other) for one, other in zip(parts, whole, strict=True)):
                    why.append("steps shards differently from whole parameters")
            except Exception:  # noqa: BLE001 - whatever its step raises
                why.append("computes with whole parameters, and fails on shards")
            if why:
                return True
        return False

    def inner(optimizer: Optimizer) -> bool:
        mismatch = shard_mismatch(optimizer, mesh, placements)
        why.extend([mismatch] if mismatch else [])
        return mismatch is not None

    _is_any(optimizer, fails, inner, {})
    return why[0] if why else None


def needs_all_ranks(optimizer: Optimizer) -> str | None:
    """Return why ranks cannot step different parameters; None if they can.

    Some forms of Muon call collectives in their step, and other optimizers draw random numbers,
    which would differ by rank.
    """
    own = set(map(id, optimizer.param_groups))
    stepped = (group for each in inner_optimizers(optimizer) for group in each.param_groups)
    if any(id(group) not in own for group in stepped):
        return "steps other optimizers, which have parameter groups of their own"
    reasons = {
        "communicates in its step, and ranks step other parameters here": _is_collective,
        "draws random numbers in its step, and ranks step other parameters here": _is_random,
    }

    def runs(is_one: Callable[[Any], bool], group: Group) -> bool:
        seen, leaves = OperatorsSeen(is_one), group.leaves
        with seen:
            run_trial(group, leaves)
        return seen.is_any

    for why, is_one in reasons.items():
        of_inner: Any = needs_all_ranks
        if _is_any(optimizer, partial(runs, is_one), of_inner, {}):
            return why
    return None


def _is_any(
    optimizer: Optimizer,
    question: Callable[["Group"], bool],
    of_inner: Callable[[Optimizer], bool],
    known: Mapping[str, str],
    *,
    untried: bool = False,
) -> bool:
    """Return the answer of a trial for any group; torch's own optimizers are looked up instead.

    If it cannot be tried, the optimizers that it steps inside are asked; without any the answer is
    ``untried``.
    """
    if _known(optimizer, known) is not None:
        return True
    if type(optimizer).__module__.startswith("torch.") or not hasattr(optimizer, "param_groups"):
        return False
    try:
        with random_state_unchanged():
            return any(map(question, kinds_of_groups(optimizer)))
    except Exception:  # noqa: BLE001 - it needs other parameters, as a real step will show
        inner = inner_optimizers(optimizer)
        return any(map(of_inner, inner)) if inner else untried


def _known(optimizer: Optimizer, known: Mapping[str, str]) -> str | None:
    kinds = [each for each in type(optimizer).__mro__ if each.__module__.startswith("torch.")]
    return next((known[each.__name__] for each in kinds if each.__name__ in known), None)


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "cholesky", "inverse", "matrix_exp"}
_FACTORS = ("linalg_", "_linalg_")
_NORMS = {"linalg_vector_norm"}


def _is_collective(func: Any) -> bool:
    return func.namespace in {"c10d", "_c10d_functional"}


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_product(func: Any) -> bool:
    name: str = func.overloadpacket.__name__
    return name in _PRODUCTS or (name.startswith(_FACTORS) and name not in _NORMS)

"""Optimizer state that is stored in one place for all stages."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from boltmesh.strategies.checkpoint.optimizer_state import PARAMS, PENDING


def joined_state(state: dict[str, Any], stores: Callable[[str], bool]) -> dict[str, Any]:
    """Return an optimizer's state with other ranks' counters and the like. Collective over all.

    Args:
        state: By names of parameters, with ``param_groups``; tensors of this rank alone.
        stores: Whether this rank writes what belongs to a parameter into checkpoints.

    Returns:
        The same with the small values of all ranks, which the first rank writes into one file, and
        the tensors that this rank writes.
    """
    own = {name: values for name, values in state["state"].items() if stores(name)}
    small = {
        name: {key: each for key, each in values.items() if not _is_stored_apart(each)}
        for name, values in own.items()
    }
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, small)
    joined = {name: values for others in told for name, values in others.items()}
    names = sorted({*joined, *own})
    return {**state, "state": {name: joined.get(name, {}) | own.get(name, {}) for name in names}}


def add_pending(
    state: dict[str, Any], parameters: Mapping[str, Parameter], pending: Mapping[int, Tensor]
) -> None:
    """Add gradients that were not applied yet to the state of one optimizer.

    Args:
        state: By names of parameters, with ``param_groups``.
        parameters: Of the module, by name.
        pending: By identity of the parameter.
    """
    for group in state["param_groups"]:
        for name in group[PARAMS]:
            gradient = pending.get(id(parameters.get(name)))
            if gradient is not None:
                state["state"][name] = {**state["state"].get(name, {}), PENDING: gradient}


def _is_stored_apart(value: Any) -> bool:
    return isinstance(value, DTensor) or (isinstance(value, Tensor) and value.dim() > 0)

"""Optimizer state by the names of parameters, which are the same in every layout.

torch numbers the parameters of an optimizer in the order of its groups; Lightning's files hold
these numbers. Both forms can be loaded into any layout: every rank loads its own part of the stored
state, and existing state, such as offloaded state, is filled in place.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.chunks import (
    DimDivision,
    ElementStretch,
    OffloadedChunk,
    TensorPart,
    own_part,
)
from boltmesh.strategies.checkpoint.shard_reader import divided, held
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.torch_compat.tensors import tree_leaves

PARAMS = "params"

_KEYS = {"state", "param_groups"}

PENDING = "boltmesh.pending_gradient"
"""Key in the state of a parameter for a gradient that is not applied yet, in a run whose
schedule applies gradients one step late."""

Take = Callable[[torch.nn.Parameter, Tensor], None]
"""Receives a parameter and its pending gradient, of the same shape."""

Divide = Callable[[str], DimDivision | None]
"""Returns a parameter's division by name; None if this rank has no part in a plain tensor."""

KeepsWhole = Callable[[Tensor], bool | None]
"""Returns whether this rank keeps the whole state of a parameter of which it has a shard; None
if each rank keeps the state of its shard."""


def parameter_names(module: Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters by group; ``#group.index`` for unnamed ones."""
    names = {id(each): name for name, each in module.named_parameters()}
    return [
        [names.get(id(each), f"#{group}.{at}") for at, each in enumerate(settings[PARAMS])]
        for group, settings in enumerate(optimizer.param_groups)
    ]


def named_state(
    module: Module,
    optimizer: Optimizer,
    *,
    divide: Divide = lambda _: None,
    keeps_whole: KeepsWhole = lambda _: None,
) -> dict[str, Any]:
    """Return an optimizer's state like its ``state_dict``, with names for numbers. No copies.

    Tensors with the shape of a parameter that ``divide`` knows become a ``TensorPart``, as do those
    that this rank alone keeps whole.

    Raises:
        CheckpointError: If a state tensor is divided unlike its parameter, so that no other
            number of ranks could load it, or if an optimizer saves more than its ``state``.
    """
    refuse_own_form(optimizer)
    names = parameter_names(module, optimizer)
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in _pairs(names, optimizer):
        if keeps_whole(parameter):
            own = optimizer.state.get(parameter)
            state |= {name: as_parts(own)} if own else {}
            continue
        division = divide(name)
        for key, value in optimizer.state.get(parameter, {}).items():
            is_large = isinstance(value, Tensor) and value.dim() > 0
            is_sharded = isinstance(value, DTensor) or (division is not None and is_large)
            if is_sharded and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name} as shards of the shape "
                    f"{tuple(value.shape)}, and the parameter has {tuple(parameter.shape)}: they "
                    f"cannot be stored. Use an optimizer whose state has the shape of its "
                    f"parameters, such as AdamW."
                )
            kept = TensorPart.of(value, division) if division is not None and is_large else value
            state.setdefault(name, {})[key] = kept
    groups = [
        {**settings, PARAMS: members}
        for settings, members in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def refuse_own_form(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose ``state_dict`` holds more than its ``state``.

    Raises:
        CheckpointError: Naming the optimizer and what to use instead.
    """
    if getattr(type(optimizer), "state_dict", None) is Optimizer.state_dict:
        return
    saved = optimizer.state_dict()
    if saved.keys() <= _KEYS and _num_tensors(saved["state"]) <= _num_tensors(optimizer.state):
        return
    name = type(optimizer).__name__
    raise CheckpointError(
        f"{name}.state_dict saves more than {name}.state holds, such as the state of another "
        f"optimizer, and a checkpoint of shards stores that alone. Use an optimizer without a "
        f"state_dict of its own, or bolt_ddp."
    )


def _num_tensors(state: Mapping[Any, Any]) -> int:
    return sum(isinstance(each, Tensor) for each in tree_leaves(list(state.values())))


def joined_state(state: dict[str, Any], stores: Callable[[str], bool]) -> dict[str, Any]:
    """Return an optimizer's state with other ranks' small values. Collective over all ranks.

    Args:
        state: As ``named_state`` returns it, with this rank's tensors.
        stores: Whether this rank writes the state of a parameter, by name.

    Returns:
        The state with the small values of all ranks, which the first rank writes into one file, and
        the tensors that this rank writes.
    """
    own = {name: values for name, values in state["state"].items() if stores(name)}
    small = {
        name: {key: each for key, each in values.items() if not is_stored_apart(each)}
        for name, values in own.items()
    }
    of_ranks = gather_objects(small)
    joined = {name: values for others in of_ranks for name, values in others.items()}
    names = sorted({*joined, *own})
    return {**state, "state": {name: joined.get(name, {}) | own.get(name, {}) for name in names}}


def is_stored_apart(value: Any) -> bool:
    """Whether a value of an optimizer's state is stored among the shards: no counter or number."""
    return isinstance(value, DTensor) or (isinstance(value, Tensor) and value.dim() > 0)


def as_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter that only this rank has, with ``TensorPart`` for tensors.

    Args:
        state: State of the parameter, by key.
    """
    parts = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            rows = (ElementStretch(0, 0, value.shape[0]),)
            parts[key] = TensorPart.of(value, DimDivision(value.shape, 0, rows))
    return parts


def is_named(saved: Mapping[str, Any]) -> bool:
    """Whether a saved state uses names, rather than torch's numbers."""
    members = [each for group in saved["param_groups"] for each in group[PARAMS]]
    return bool(members) and isinstance(members[0], str)


def load_states(
    module: Module,
    optimizers: Sequence[Optimizer],
    saved: Sequence[Mapping[str, Any]],
    *,
    holds: Callable[[str], bool] = lambda _: True,
    take: Take | None = None,
    divide: Divide = lambda _: None,
    keeps_whole: KeepsWhole = lambda _: None,
) -> None:
    """Load the saved states of all optimizers; see ``load_state``."""
    values = (each for state in saved for each in state["state"].values())
    if take is None and any(PENDING in each for each in values):
        warnings.warn(
            "The checkpoint holds a gradient that was not applied yet, as schedule="
            "'pipedream_2bw' leaves one. This run applies gradients at once, and drops it.",
            stacklevel=2,
        )
    if len(optimizers) != len(saved):
        raise CheckpointError(
            f"The checkpoint holds the state of {len(saved)} optimizers, and configure_optimizers "
            f"makes {len(optimizers)}. Make the same, or load the weights alone into a new run."
        )
    for optimizer, state in zip(optimizers, saved, strict=True):
        load_state(
            module,
            optimizer,
            state,
            holds=holds,
            take=take,
            divide=divide,
            keeps_whole=keeps_whole,
        )


def load_state(
    module: Module,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    *,
    holds: Callable[[str], bool] = lambda _: True,
    take: Take | None = None,
    divide: Divide = lambda _: None,
    keeps_whole: KeepsWhole = lambda _: None,
) -> None:
    """Load a saved state of any layout into an optimizer.

    Groups keep their identity, since schedulers and offload refer to them. Parameters that
    this rank does not hold, by ``holds``, get no state; those that ``divide`` knows get their
    part. Parameters that ``keeps_whole`` knows get whole state on one rank and none on the
    others. Pending gradients are not state of the optimizer: ``take`` receives them.

    Raises:
        CheckpointError: If the groups are not those of the optimizer, or if more than groups and
            state was saved.
    """
    if beside := sorted(saved.keys() - _KEYS):
        raise CheckpointError(
            f"The checkpoint holds {beside[0]!r} beside the state of {type(optimizer).__name__}, "
            f"and shards of an optimizer are loaded from its state alone. Resume with bolt_ddp, or "
            f"load the weights alone into a new run."
        )
    names = parameter_names(module, optimizer)
    _check_groups(names, saved, type(optimizer).__name__)
    _check_settings(optimizer, saved)
    stored = _by_name(names, saved)
    for settings, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        _update(settings, {key: value for key, value in group.items() if key != PARAMS})
    keeps_step_on_cpu = {
        id(each): not (settings.get("capturable") or settings.get("fused"))
        for settings in optimizer.param_groups
        for each in settings[PARAMS]
    }
    with torch.no_grad():
        for name, parameter in _pairs(names, optimizer):
            is_whole = keeps_whole(parameter)
            is_here = holds(name) and is_whole is not False
            values = dict(stored.get(name, {})) if is_here else {}
            if (division := divide(name)) is not None and not is_whole:
                values = {
                    key: divided(each, division, f"The optimizer state {name}.{key}")
                    for key, each in values.items()
                }
            pending = values.pop(PENDING, None)
            if take is not None and pending is not None:
                take(parameter, torch.empty_like(parameter).copy_(held(pending)))
            _forget(optimizer, parameter, keeps=values.keys())
            if not values:
                continue
            state = optimizer.state[parameter]
            for key, value in values.items():
                is_step = key == "step"
                state[key] = _load_value(
                    value,
                    parameter,
                    state.get(key),
                    f"{name}.{key}",
                    is_step=is_step,
                    stays=is_step and keeps_step_on_cpu[id(parameter)],
                    is_whole=bool(is_whole),
                )


def _forget(optimizer: Optimizer, parameter: Tensor, *, keeps: Collection[str]) -> None:
    """Drop state that is not in the checkpoint; offloaded tensors beside kept ones are zeroed."""
    state = optimizer.state.get(parameter)
    if state is None:
        return
    for key in [each for each in state if each not in keeps]:
        is_kept = bool(keeps) and isinstance(state[key], Tensor)
        if is_kept and isinstance(part := own_part(state[key]), OffloadedChunk):
            part.write(torch.zeros(part.shape))
        else:
            del state[key]
    if not state:
        del optimizer.state[parameter]


def _load_value(
    value: Any,
    parameter: Tensor,
    current: Any,
    name: str,
    *,
    is_step: bool,
    stays: bool,
    is_whole: bool,
) -> Any:
    if not isinstance(value, Tensor):
        return value
    source = held(value)
    if isinstance(current, Tensor) and current.shape == value.shape:
        destination = current
    elif value.shape == parameter.shape and (
        value.dim() > 0 or (isinstance(parameter, DTensor) and not is_step)
    ):
        # As torch does, also for a checkpoint of another precision.
        dtype = parameter.dtype if value.is_floating_point() else value.dtype
        like = parameter.detach()
        destination = (
            torch.empty(value.shape, dtype=dtype, device=like.device)
            if is_whole
            else torch.empty_like(like, dtype=dtype)
        )
    elif not is_whole and isinstance(parameter, DTensor) and value.numel() > 1:
        raise CheckpointError(
            f"The optimizer state {name} has the shape {tuple(value.shape)} and its parameter "
            f"{tuple(parameter.shape)}: nothing says how it would be cut into shards. Resume "
            f"with a strategy that does not shard, such as bolt_ddp."
        )
    else:
        device = torch.device("cpu") if stays else parameter.device
        destination = torch.empty(value.shape, dtype=value.dtype, device=device)
    destination.copy_(source)
    return destination


def _by_name(names: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved states by the current names of the parameters."""
    if is_named(saved):
        return dict(saved["state"])
    now = [name for group in names for name in group]
    then = [number for group in saved["param_groups"] for number in group[PARAMS]]
    return {
        name: saved["state"][number]
        for name, number in zip(now, then, strict=True)
        if number in saved["state"]
    }


def _check_groups(names: Sequence[Sequence[str]], saved: Mapping[str, Any], optimizer: str) -> None:
    advice = "Make the same groups, or load the weights alone into a new run."
    groups = saved["param_groups"]
    if len(names) != len(groups):
        raise CheckpointError(
            f"The checkpoint holds {len(groups)} parameter groups for {optimizer}, and "
            f"configure_optimizers makes {len(names)}. {advice}"
        )
    for number, (now, group) in enumerate(zip(names, groups, strict=True)):
        then = group[PARAMS]
        if len(now) != len(then):
            raise CheckpointError(
                f"Parameter group {number} of {optimizer} has {len(now)} parameters, and the "
                f"checkpoint's has {len(then)}. {advice}"
            )
        different = sorted(set(now) - set(then)) if is_named(saved) else []
        if different:
            raise CheckpointError(
                f"Parameter group {number} of {optimizer} holds {different[0]}, and the "
                f"checkpoint's does not. {advice}"
            )


def _check_settings(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse groups of another optimizer: both have settings that the other does not have."""
    for settings, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        unknown = sorted(group.keys() - settings.keys())
        missing = sorted(optimizer.defaults.keys() - group.keys())
        if unknown and missing:
            raise CheckpointError(
                f"The checkpoint holds the state of another optimizer: it has {unknown[0]!r}, and "
                f"{type(optimizer).__name__} has {missing[0]!r}. Make the same optimizer, or load "
                f"the weights alone into a new run."
            )


def _update(settings: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set hyper-parameters; one that is a tensor keeps its identity."""
    for key, value in saved.items():
        current = settings.get(key)
        if isinstance(current, Tensor) and isinstance(value, Tensor):
            current.copy_(value)
        else:
            settings[key] = value


def _pairs(
    names: Sequence[Sequence[str]], optimizer: Optimizer
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for group, settings in zip(names, optimizer.param_groups, strict=True):
        yield from zip(group, settings[PARAMS], strict=True)

"""The private state of FSDP2's units, the modules that ``fully_shard`` was applied to."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn import Module, Parameter

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.torch_compat.autograd import own_gradient, set_own_gradient


def prepare_class(kind: type[Module]) -> None:
    """Make the class that ``fully_shard`` gives to modules of a class.

    Copies are refused with a reason, and it exists for classes whose first base is no ``Module``.

    [Note: Layout of a class]
    ``fully_shard`` gives a module a class with the bases ``FSDPModule`` and the module's own class.
    Python lets an object change its class only between equal layouts, which a class takes from its
    first base; that of ``ABC`` or ``Generic`` has no ``__dict__``. Here the module's class comes
    first among the bases and second in the method resolution order.
    """
    base = kind
    while base.__base__ is not None and base.__base__.__dictoffset__:
        base = base.__base__
    classes = _fully_shard.cls_to_fsdp_cls
    if kind in classes:
        return
    members: dict[str, Any] = {"__deepcopy__": _refuse_copy, "__module__": FSDPModule.__module__}
    if base.__base__ is object:
        classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), members)
        return

    def mro(cls: type) -> list[type]:
        own = [each for each in kind.__mro__ if each is not object]
        return [cls, FSDPModule, *own, object]

    meta = type(f"{type(kind).__name__}Layout", (type(kind),), {"mro": mro})
    classes[kind] = meta(f"FSDP{kind.__name__}", (kind, FSDPModule), members)


def _refuse_copy(unit: Module, memo: dict[int, Any]) -> NoReturn:
    raise UnsupportedError(
        f"copy.deepcopy was called for {type(unit).__name__.removeprefix('FSDP')} in a run under "
        f"ZeRO, where ranks hold shards of its parameters. Copy it before the run, in __init__ or "
        f"configure_model, or use bolt_ddp."
    )


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a unit: one gather and one reduction each."""
    return _groups_of_state(unit._get_fsdp_state())


def _groups_of_state(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # a list from torch 2.13 on
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _params(unit: FSDPModule) -> Iterator[Any]:
    for group in parameter_groups(unit):
        yield from group.fsdp_params


def unsharded_parameter(param: Any) -> Parameter | None:
    """Return the unsharded parameter of an ``FSDPParam``, None before its first gather.

    FSDP2 keeps the object and frees its memory.
    """
    return getattr(param, "_unsharded_param", None)


def is_gathered(unit: FSDPModule) -> bool:
    """Whether a unit's parameters are unsharded, so that its next forward gathers nothing."""
    return all(group.is_unsharded for group in parameter_groups(unit))


def unit_parameters(unit: FSDPModule) -> list[tuple[Parameter, Parameter | None]]:
    """Return a unit's sharded parameters, each with its unsharded one if that exists."""
    return [(param.sharded_param, unsharded_parameter(param)) for param in _params(unit)]


def unsharded_gradients(unit: FSDPModule) -> list[Tensor]:
    """Return a unit's gradients that are not reduced yet, in the parameters' full shapes."""
    pending = [getattr(param, "unsharded_accumulated_grad", None) for param in _params(unit)]
    unsharded = [unsharded_parameter(param) for param in _params(unit)]
    pending += [own_gradient(each) for each in unsharded if each is not None]
    return [gradient for gradient in pending if gradient is not None]


def forget_step(root: FSDPModule) -> None:
    """Reset the state of a step that ended in an error, so that the next one is a first one.

    Otherwise FSDP2 takes the end of its next backward pass for already queued, and a unit whose
    inputs need no gradients, such as the first, is never reduced again. Its own remedy leaves
    unsharded gradients, and is new in torch 2.13.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:
        return  # no step has begun
    has_remedy = hasattr(root, "reset_iter_state")
    if has_remedy:
        root.reset_iter_state()
    else:
        state._comm_ctx.post_forward_order.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
    for unit_state in state._state_ctx.all_states:
        for group in _groups_of_state(unit_state):
            _forget_gradients(group)
            if not has_remedy:
                group.finalize_backward()
                group._training_state = TrainingState.IDLE
                group._partial_reduce_output = None
        if not has_remedy:
            unit_state._training_state = TrainingState.IDLE


def _forget_gradients(group: Any) -> None:
    group.forget_filled()
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if (unsharded := unsharded_parameter(param)) is not None:
            set_own_gradient(unsharded, None)


def gather_units(root: FSDPModule, units: Iterable[FSDPModule]) -> None:
    """Gather all units of a model, for steps that do not run through them. Collective.

    Args:
        root: The unit that contains the others.
        units: All of them, in the same order on all ranks; gathered ones are skipped.
    """
    root._get_fsdp_state()._lazy_init()
    before: Any = None
    for unit in units:
        if is_gathered(unit):
            continue
        handle = unit.unshard(async_op=True)
        if before is not None:
            before.wait()  # its copy overlaps with the next one's messages
        before = handle
    if before is not None:
        before.wait()


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients of all units' unsharded parameters into those of shards, and reshard.

    For steps that did not run through the units; this is what FSDP2 does at the end of a backward
    pass. Collective over the ranks that share the units, which must have gradients of the same
    parameters.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


class StepUnits:
    """The units of a model with their parameter groups, looked up once for all steps."""

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._groups = [(unit, group) for unit in units for group in parameter_groups(unit)]

    def reshard(self) -> None:
        """Free gathered parameters."""
        for unit, group in self._groups:
            if not group.is_sharded:
                unit.reshard()

    def forget_gradients(self) -> None:
        """Drop gradients that were not reduced: ``zero_grad`` only reaches those of shards."""
        for _, group in self._groups:
            _forget_gradients(group)

    def follow_shards(self) -> None:
        """Set ``requires_grad`` of gathered parameters to that of their shards.

        FSDP2 determines once, before the first forward pass, which parameters get gradients. A unit
        that is entirely frozen then has no reduction dtype, and would not cast its gradients if it
        was trained later: here it is determined again.
        """
        for _, group in self._groups:
            if getattr(group, "_orig_dtype", torch.float32) is None:  # not determined yet
                group._init_mp_dtypes()
            for param in group.fsdp_params:
                unsharded = unsharded_parameter(param)
                is_trained = param.sharded_param.requires_grad
                if unsharded is not None and unsharded.requires_grad != is_trained:
                    unsharded.requires_grad_(is_trained)


def take_away_unused(units: Iterable[FSDPModule]) -> Callable[[Tensor], None]:
    """Return a function for hooks on gradients of shards: it takes away one that no rank had.

    Args:
        units: Instrumented ones, see ``fsdp_hooks``.
    """
    groups = [group for unit in units for group in parameter_groups(unit)]
    places = {each.sharded_param: (group, each) for group in groups for each in group.fsdp_params}

    def take_away(shard: Tensor) -> None:
        group, param = places.get(shard, (None, None))
        if group is not None:
            group.take_away_filled([param])

    return take_away


@dataclass(frozen=True)
class UnitShard:
    """One parameter of a unit, and FSDP2's state of this rank's shard of it."""

    parameter: Parameter
    compute_dtype: torch.dtype
    """Dtype that it is gathered in."""
    padded_shape: tuple[int, ...]
    """Shape of the largest shard, which every rank contributes to an all-gather."""
    _fsdp_parameter: Any

    def replace(self, local: Tensor, flat: Tensor) -> None:
        """Give FSDP2 another shard, and free its own.

        Args:
            local: The new local tensor of the parameter, in the shard's shape.
            flat: A plain tensor over the same storage, ``(padded_numel,)``. If the addresses of
                both storages are equal, FSDP2 treats the shard as padded already.
        """
        param = self._fsdp_parameter
        param.sharded_param._local_tensor = local
        param._sharded_param_data = flat
        param._init_extensions()


def unit_shards(unit: FSDPModule) -> list[UnitShard]:
    """Return the shards of a unit, in the order in which FSDP2 reduces their gradients."""
    return [
        UnitShard(
            parameter=param.sharded_param,
            compute_dtype=group.mp_policy.param_dtype or param.sharded_param.dtype,
            padded_shape=tuple(param.padded_sharded_param_size),
            _fsdp_parameter=param,
        )
        for group in parameter_groups(unit)
        for param in group.fsdp_params
    ]


def unit_parameter_names(unit: FSDPModule) -> list[str]:
    """Return the names of a unit's parameters within the full model, after its first run."""
    return [param._param_fqn or "" for param in _params(unit)]

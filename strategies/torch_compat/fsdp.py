"""What FSDP2 keeps of the modules that ``fully_shard`` was applied to, called units."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn import Parameter

from boltmesh.strategies.torch_compat.autograd import share_gradient_hooks


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return how FSDP2 groups a unit's parameters: one gather and one reduction each."""
    return _groups_of_state(unit._get_fsdp_state())


def _groups_of_state(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # a list from torch 2.13 on
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def is_gathered(unit: FSDPModule) -> bool:
    """Whether a unit's whole parameters are there, so that its next forward gathers nothing."""
    return all(group.is_unsharded for group in parameter_groups(unit))


def unit_parameters(unit: FSDPModule) -> list[tuple[Parameter, Parameter | None]]:
    """Return a unit's sharded parameters, each with its whole one where that exists."""
    return [
        (each.sharded_param, getattr(each, "_unsharded_param", None))
        for group in parameter_groups(unit)
        for each in group.fsdp_params
    ]


def share_hooks(unit: FSDPModule) -> None:
    """Run hooks on the gradients of a unit's parameters, and give the whole ones their attributes.

    What is differentiated are the whole parameters, which nobody can get hold of. As under
    ``DistributedDataParallel`` a hook is given the whole gradient, of this rank alone.
    """
    for group in parameter_groups(unit):
        for each in group.fsdp_params:
            each.init_unsharded_param = _sharing_hooks(each, each.init_unsharded_param)


def _sharing_hooks(parameter: Any, make_whole: Callable[[], None]) -> Callable[[], None]:
    def make() -> None:
        is_new = not hasattr(parameter, "_unsharded_param")
        make_whole()
        whole, shard = parameter._unsharded_param, parameter.sharded_param
        if is_new:
            vars(whole).update(vars(shard))
        share_gradient_hooks(shard, whole)

    return make


class WriteDetector:
    """Finds parameters that somebody writes to while they are gathered.

    What is written to the whole one is gone when that is freed, and what is written to the shard
    is not in the whole one. Writes that autograd does not count (``.data``) are not found.

    Args:
        units: Of ``fully_shard``.
        lost: Given the name, within the root, of a whole one that was written to and is freed.
    """

    def __init__(self, units: Iterable[FSDPModule], lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._units = [(unit, group) for unit in units for group in parameter_groups(unit)]
        self._versions: dict[Any, tuple[int, int]] = {}
        for _, group in self._units:
            for each in group.fsdp_params:
                each.init_unsharded_param = partial(self._gather, each, each.init_unsharded_param)
                each.to_sharded = partial(self._free, each, each.to_sharded)

    def _gather(self, parameter: Any, make_whole: Callable[[], None]) -> None:
        make_whole()
        self._versions[parameter] = _versions(parameter)

    def _free(self, parameter: Any, free: Callable[[], None]) -> None:
        known = self._versions.pop(parameter, None)
        is_lost = known is not None and known[1] != _versions(parameter)[1]
        free()
        if is_lost:
            self._versions.clear()  # one is told of; the run ends, and has to free the others
            self._lost(parameter._param_fqn)

    def stale(self) -> dict[str, FSDPModule]:
        """Return units whose shards were written to since they were gathered, by those's names."""
        return {
            each._param_fqn: unit
            for unit, group in self._units
            if not group.is_sharded
            for each in group.fsdp_params
            if each in self._versions and self._versions[each][0] != _versions(each)[0]
        }


def _versions(parameter: Any) -> tuple[int, int]:
    whole = parameter._unsharded_param
    # What is made in inference mode counts no writes.
    return parameter.sharded_param._version, 0 if whole.is_inference() else whole._version


def whole_gradients(unit: FSDPModule) -> list[Tensor]:
    """Return the gradients of a unit that no rank has reduced yet."""
    parameters = [each for group in parameter_groups(unit) for each in group.fsdp_params]
    found = [getattr(each, "unsharded_accumulated_grad", None) for each in parameters]
    found += [getattr(getattr(each, "_unsharded_param", None), "grad", None) for each in parameters]
    return [each for each in found if each is not None]


def forget_step(root: FSDPModule) -> None:
    """Let the next step begin as the first did, whatever an error has left of one.

    FSDP2 otherwise takes the end of its next backward pass for announced, and a unit whose inputs
    need no gradients, as the first, is not reduced ever after. Its own remedy leaves gradients that
    were whole, and is new in torch 2.13.

    Args:
        root: The unit that holds the others.
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
    for each in state._state_ctx.all_states:
        for group in _groups_of_state(each):
            if not has_remedy:
                group.finalize_backward()
                group._training_state = TrainingState.IDLE
                group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
        if not has_remedy:
            each._training_state = TrainingState.IDLE


def gather_units(root: FSDPModule, units: Iterable[FSDPModule]) -> None:
    """Gather all units of a model at once, for steps that do not run through them. Collective.

    Args:
        root: The unit that holds the others.
        units: All of them, in the same order on all ranks; those that are gathered already stay.
    """
    root._get_fsdp_state()._lazy_init()
    before: Any = None
    for unit in units:
        if is_gathered(unit):
            continue
        handle = unit.unshard(async_op=True)
        if before is not None:
            before.wait()  # its copy goes beside this one's messages
        before = handle
    if before is not None:
        before.wait()


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients of all units' whole parameters to those of shards, and free the whole.

    For steps that did not run through the units. Collective over the ranks that share them, which
    need to have gradients of the same parameters. What FSDP2 does at the end of a backward pass.

    Args:
        root: The unit that holds the others.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


class StepUnits:
    """Units as every step wants something of them: what FSDP2 keeps of them is looked up once.

    Args:
        units: Of ``fully_shard``.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._groups = [(unit, group) for unit in units for group in parameter_groups(unit)]

    def reshard(self) -> None:
        """Free what is gathered."""
        for unit, group in self._groups:
            if not group.is_sharded:
                unit.reshard()

    def follow_shards(self) -> None:
        """Make what is gathered require gradients where its shards do.

        FSDP2 looks once, before the first forward pass, which parameters get gradients. A unit that
        is wholly frozen then has no types to reduce in, and would not cast its gradients if it was
        trained later: it is made to look again.
        """
        for _, group in self._groups:
            if getattr(group, "_orig_dtype", torch.float32) is None:  # unset until it has looked
                group._init_mp_dtypes()
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                is_trained = each.sharded_param.requires_grad
                if whole is not None and whole.requires_grad != is_trained:
                    whole.requires_grad_(is_trained)


@dataclass(frozen=True)
class UnitShard:
    """One parameter of a unit, as FSDP2 keeps this rank's shard of it."""

    parameter: Parameter
    compute_dtype: torch.dtype
    """What it is gathered in."""
    padded_shape: tuple[int, ...]
    """The shape of the largest shard: what every rank puts into an all-gather."""
    _fsdp_parameter: Any

    def replace(self, local: Tensor, flat: Tensor) -> None:
        """Give FSDP2 another shard, and free its own.

        Args:
            local: The new local tensor of the parameter.
            flat: A plain flat tensor over the same storage. FSDP2 takes equal addresses of both
                storages to mean that the shard is padded as it is.
        """
        each = self._fsdp_parameter
        each.sharded_param._local_tensor = local
        each._sharded_param_data = flat
        each._init_extensions()


def unit_shards(unit: FSDPModule) -> list[UnitShard]:
    """Return the shards of a unit, in the order in which FSDP2 reduces their gradients."""
    return [
        UnitShard(
            parameter=each.sharded_param,
            compute_dtype=group.mp_policy.param_dtype or each.sharded_param.dtype,
            padded_shape=tuple(each.padded_sharded_param_size),
            _fsdp_parameter=each,
        )
        for group in parameter_groups(unit)
        for each in group.fsdp_params
    ]


def unit_parameter_names(unit: FSDPModule) -> list[str]:
    """Return the names of a unit's parameters within the whole model, once that has run."""
    parameters = [each for group in parameter_groups(unit) for each in group.fsdp_params]
    return [each._param_fqn or "" for each in parameters]

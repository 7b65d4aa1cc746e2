"""Parameters and buffers that a rank of a pipeline holds, and their agreement between ranks.

``StageParameters`` has the rank's parameters, and the names of those that other ranks hold.
``TiedWeights`` are parameters that several stages use: equal values, and summed gradients.

``NonStageState`` has the buffers and attributes that the code between layers changes, with the
values of one process. Every stage runs that code for every microbatch, up to the end of its part.
The value written into a buffer comes from the stage that has its inputs, and is broadcast after the
batch. Values without inputs from layers (a count of batches) are kept from one stage of each rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from boltmesh.strategies.checkpoint.optimizer_state import PARAMS, PENDING
from boltmesh.strategies.checkpoint.state_dict_guard import StateGuard
from boltmesh.strategies.dry_run.no_side_effects import CONTAINERS, refill
from boltmesh.strategies.grad_norm import HeldShare
from boltmesh.strategies.object_collectives import broadcast_object
from boltmesh.strategies.parameter_access import register_stages
from boltmesh.strategies.pipeline.microbatch_runs import During
from boltmesh.strategies.pipeline.options import PipelineContext
from boltmesh.strategies.pipeline.partition.placement import StageAssignment
from boltmesh.strategies.pipeline.stage.cut import ANY_STAGE, StagePlan
from boltmesh.strategies.pipeline.stage.units import AbsentError, make_absent
from boltmesh.strategies.torch_compat.communication import sum_flags
from boltmesh.strategies.torch_compat.modules import ParametersInPlace, hooks_unchanged
from boltmesh.strategies.torch_compat.tensors import local_tensor


def broadcast(tensor: Tensor, rank: int, group: ProcessGroup) -> None:
    """Copy a rank's tensor into those of all ranks, in place. Collective over ``group``.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks, any of both, on the group's device.
            It is sent as bytes, for dtypes that a backend does not support (bool, float8).
        rank: Source rank within the group.
        group: The ranks.
    """
    if group.size() == 1 or not tensor.numel():
        return
    value = tensor.detach().resolve_conj().resolve_neg().contiguous()
    source = dist.get_global_rank(group, rank)
    dist.broadcast(value.reshape(-1).view(torch.uint8), source, group=group)
    if value.data_ptr() != tensor.data_ptr() and group.rank() != rank:
        with torch.no_grad():
            tensor.copy_(value)


def gathered(
    state: Mapping[str, Any],
    holder: Callable[[str], int],
    group: ProcessGroup,
    device: torch.device,
    *,
    keeps: bool,
) -> dict[str, Any]:
    """Return the whole state, on the CPU, of which every rank has parts. Collective over ``group``.

    Args:
        state: State of a module, with the same names, shapes and dtypes on all ranks.
        holder: Returns the rank within ``group`` that has the value of a name.
        group: Ranks that together have all values.
        device: Device of the group's communication.
        keeps: Whether this rank gets the state, else an empty one.
    """
    whole: dict[str, Any] = {}
    for name, value in state.items():
        source = holder(name)
        if isinstance(value, Tensor):
            if group.rank() == source:
                passed = value.detach().to(device).contiguous()
            else:
                passed = torch.empty(value.shape, dtype=value.dtype, device=device)
            broadcast(passed, source, group)
            made: Any = passed.cpu() if keeps else None
        else:
            made = broadcast_object(value, dist.get_global_rank(group, source), group)
        if keeps:
            whole[name] = made
    return whole


def add_pending(
    state: dict[str, Any], parameters: Mapping[str, Parameter], pending: Mapping[int, Tensor]
) -> None:
    """Add gradients that are not applied yet to the state of one optimizer.

    Args:
        state: State by names of parameters, with ``param_groups``; changed in place.
        parameters: Parameters of the module, by name.
        pending: Gradients, with the shapes of their parameters, by identity of the parameter.
    """
    for group in state["param_groups"]:
        for name in group[PARAMS]:
            gradient = pending.get(id(parameters.get(name)))
            if gradient is not None:
                state["state"][name] = {**state["state"].get(name, {}), PENDING: gradient}


_FLAG = torch.int32


class TiedWeights:
    """Parameters of stages on several ranks: tied weights, and those of code between units.

    Each of their ranks holds them whole and computes a part of their gradient; the parts are summed
    after each batch, so that ranks take equal steps. Made collectively over the pipeline.

    Args:
        parameters: The shared parameters that this rank holds.
        ranks: Ranks within the pipeline that hold each shared parameter of the model, by name;
            equal on all ranks.
        group: The ranks of the pipeline.
        new_group: Makes a group of some of its ranks, for all pipelines at once.
    """

    def __init__(
        self,
        parameters: ParametersInPlace,
        ranks: Mapping[str, tuple[int, ...]],
        group: ProcessGroup,
        new_group: Callable[[tuple[int, ...]], ProcessGroup | None],
    ) -> None:
        self._parameters = parameters
        self._members: list[tuple[ProcessGroup, list[str]]] = []
        for members in sorted(set(ranks.values())):
            # Called on all ranks, though only some are members: ranks that have made different
            # numbers of groups may hang in the next one (gloo, torch 2.13).
            made = new_group(members)
            if made is None:
                continue
            held = [name for name in sorted(ranks) if ranks[name] == members]
            self._members.append((made, held))

    def _held(self) -> list[tuple[ProcessGroup, list[Parameter]]]:
        """Return the groups and their shared parameters."""
        named = self._parameters.named()
        return [(group, [named[name] for name in names]) for group, names in self._members]

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that sum gradients."""
        return [group for group, _ in self._members]

    def size_per_batch(self) -> tuple[int, int]:
        """Return bytes and calls of ``sum_gradients``, with a gradient for every parameter."""
        trained = [
            [parameter for parameter in held if parameter.requires_grad] for _, held in self._held()
        ]
        flags = [len(held) * _FLAG.itemsize for held in trained if held]
        gradients = [
            parameter.numel() * parameter.element_size() for held in trained for parameter in held
        ]
        return sum(flags) + sum(gradients), len(flags) + len(gradients)

    def sum_gradients(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sum gradients over the ranks that hold the same parameter; return the sums.

        Collective over those ranks. A rank without a gradient adds zeros.

        Args:
            gradients: Gradients by identity of the parameter, with its shape; summed in place.

        Returns:
            The sums by identity of the parameter, in its shape; none if no rank has a gradient.
        """
        sums: dict[int, Tensor] = {}
        for group, parameters in self._held():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            if not trained:
                continue
            grads = [gradients.get(id(parameter)) for parameter in trained]
            # No gradient on any rank stays none, which optimizers distinguish from zeros.
            counts = sum_flags(
                [gradient is not None for gradient in grads], group, trained[0].device, dtype=_FLAG
            )
            for parameter, own, count in zip(trained, grads, counts, strict=True):
                if count:
                    gradient = torch.zeros_like(parameter) if own is None else own
                    dist.all_reduce(gradient, group=group)
                    sums[id(parameter)] = gradient
        return sums

    def size_of_gradients(self) -> tuple[int, int]:
        """Return bytes and calls of ``broadcast_gradients``, with one for every parameter."""
        parts = [
            local_tensor(parameter.detach())
            for _, held in self._held()
            for parameter in held
            if parameter.requires_grad
        ]
        return sum(part.numel() * part.element_size() for part in parts), len(parts)

    def broadcast_gradients(self) -> None:
        """Broadcast the first holder's gradients, from which others differ by rounding at most.

        Collective over the ranks that hold the same parameter. All of them or none have a gradient.
        """
        for group, parameters in self._held():
            source = dist.get_process_group_ranks(group)[0]
            for parameter in parameters:
                if parameter.grad is not None:
                    dist.broadcast(local_tensor(parameter.grad), source, group=group)

    def broadcast(self) -> None:
        """Broadcast the first holder's values. Collective over the ranks that hold a parameter."""
        for group, parameters in self._held():
            source = dist.get_process_group_ranks(group)[0]
            for parameter in parameters:
                # Holders with the same data rank have the same shard.
                dist.broadcast(local_tensor(parameter.detach()), source, group=group)


class StageParameters:
    """Frees the parameters that other ranks hold, and knows the holders of all.

    Args:
        module: The whole model.
        division: The assignment of the model to ranks.
        context: Context of the pipeline.
    """

    def __init__(self, module: Module, division: StageAssignment, context: PipelineContext) -> None:
        group = context.group
        self._division = division
        self._group = group
        rank = group.rank()
        holders = division.ranks_of_parameter
        named = dict(module.named_parameters())
        first_names = {id(parameter): name for name, parameter in named.items()}
        self._first_names = {
            name: first_names[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        self._names = frozenset(name for name in named if rank in holders[name])
        self.parameters = ParametersInPlace(module, (name for name in named if name in self._names))
        """The parameters that this rank has values of."""
        self._absent = [parameter for name, parameter in named.items() if name not in self._names]
        self._all = ParametersInPlace(module, named)
        make_absent(self._absent)
        absent = [name for name, first in self._first_names.items() if rank not in holders[first]]
        self.guard = StateGuard(module, absent)
        shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        own = [name for name, ranks in shared.items() if rank in ranks]
        held_by_several = ParametersInPlace(module, own)
        self.shared = TiedWeights(held_by_several, shared, group, context.new_group)
        elsewhere = [name for name in own if shared[name][0] != rank]
        self.norm_share = HeldShare(group, ParametersInPlace(module, elsewhere), held_by_several)

    def move_absent(self, device: torch.device) -> None:
        """Set the device of absent parameters, before the model is moved to it."""
        make_absent(self._absent, device)

    def let_gather(self) -> None:
        """Register the parameters for ``gathered_parameters``, which gives all ranks their values.

        Called when parameters are the objects that they stay between steps.
        """
        if self._group.size() == 1:
            return
        register_stages(
            {
                parameter: _Holders(
                    self._group, self._division.ranks_of_parameter[name][0], name in self._names
                )
                for name, parameter in self._all.named().items()
            }
        )

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the ranks of the pipeline that have the values of a parameter or other state.

        Args:
            name: Key in the module's state dict; any of them for a parameter with several.
        """
        known = self._first_names.get(name)
        if known is not None:
            return self._division.ranks_of_parameter[known]
        # Every rank has all buffers and extra state; the first one has the model's values.
        first = self._division.rank_of_state(name)
        return (first, *(rank for rank in range(self._group.size()) if rank != first))

    def has_buffer(self, name: str) -> bool:
        """Whether this rank has the model's value of a buffer; all ranks do outside of units."""
        return (
            name in self._division.loose_buffers
            or self._division.rank_of_state(name) == self._group.rank()
        )

    def refuse_unheld(self, plans: Iterable[StagePlan]) -> None:
        """Refuse a step that uses parameters of other ranks in stages of this rank.

        The model was divided for a step that uses others.

        Raises:
            AbsentError: The step does; not raised on every rank of the pipeline.
        """
        rank = self._group.rank()
        for plan in plans:
            if self._division.rank_of_stage[plan.stage] != rank:
                continue
            missing = sorted(plan.parameters - self._names)
            if missing:
                raise AbsentError(
                    f"stage {plan.stage} uses {missing[0]!r} in this step, and the model was "
                    f"divided by a batch whose step does not: rank {rank} of the pipeline does "
                    f"not hold it. Let every step use the same parameters outside of layers, put "
                    f"{missing[0]!r} into a layer of its own, or begin with the run that uses it."
                )


@dataclass(frozen=True)
class _Holders:
    """Holders of one parameter, for ``gathered_parameters``."""

    group: ProcessGroup
    """The ranks of the pipeline."""
    first: int
    """The first rank within it that has values."""
    is_held: bool
    """Whether this rank has values."""

    def broadcast_value(self, value: Tensor) -> Tensor:
        """Return a copy of the first holder's value, in its shape. Collective over the pipeline."""
        # Not ``empty_like``: an absent parameter has one element of memory, and so would the copy.
        copy = value.clone() if self.is_held else value.new_empty(value.shape)
        broadcast(copy, self.first, self.group)
        return copy


class NonStageState:
    """Buffers and attributes outside of units that a step changes.

    Args:
        root: The whole model.
        stages: Stages of this rank.
        rank_of_stage: The rank of each stage, within ``group``.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        root: Module,
        stages: Iterable[int],
        rank_of_stage: Sequence[int],
        group: ProcessGroup,
    ) -> None:
        self._root = root
        self._keeper = max(stages)
        """The last stage of this rank."""
        self._rank_of_stage = rank_of_stage
        self._group = group
        self._replaced: dict[str, Tensor] = {}
        """The model's own buffers that are replaced by copies now, by name."""

    def during(
        self,
        inner: During,
        plans: Sequence[StagePlan],
        keeps: Callable[[int], bool],
    ) -> During:
        """Return the context of a stage's microbatches.

        Args:
            inner: Another context, which it includes.
            plans: Plans of the stage, by microbatch.
            keeps: Returns whether changes by a microbatch are kept. Flags that the step sets and
                caches that it fills are kept of the last one, so that all take one path.
        """
        self._keep_buffers()  # after a batch that ended by an error
        if not any(plan.changed_buffers or plan.changed_attributes for plan in plans):
            return inner  # nearly all models; it is entered for each microbatch

        @contextmanager
        def both(microbatch: int) -> Iterator[None]:
            is_last = microbatch == len(plans) - 1
            with inner(microbatch), self._around(plans[microbatch], keeps(microbatch), is_last):
                yield

        return both

    @contextmanager
    def _around(self, plan: StagePlan, keeps: bool, is_last: bool) -> Iterator[None]:
        """Return a context for a stage, after which only the changes to keep remain.

        Each microbatch writes into copies: backward passes of others need the values they read.
        """
        is_kept = keeps and plan.stage == self._keeper
        attributes = plan.attributes_of_last if is_kept else plan.changed_attributes
        keeps_turned = is_last and plan.stage == self._keeper
        if keeps_turned:
            attributes -= plan.trace.turned_attributes
        else:
            attributes |= plan.trace.turned_attributes
        buffers = self._buffers(plan.changed_buffers)
        copies = {id(buffer): buffer.detach().clone() for _, buffer in buffers}
        kept = [self._kept(*attribute) for attribute in attributes]
        for name, buffer in buffers:
            self._set_buffer(name, copies[id(buffer)])
        try:
            # Models of transformers set an attribute after they have registered hooks.
            with nullcontext() if keeps_turned else hooks_unchanged(self._root.modules()):
                yield
        finally:
            for name, buffer in buffers:
                owner = plan.changed_buffers[name]
                if keeps and plan.stage == (self._keeper if owner == ANY_STAGE else owner):
                    self._replaced.setdefault(name, buffer)
                else:
                    self._set_buffer(name, buffer)
            for container, key, present, value, members in kept:
                _restore(container, key, present, value, members)

    def _keep_buffers(self) -> None:
        """Put the model's own buffers back, with the last microbatch's values."""
        for name, buffer in self._replaced.items():
            now = self._root.get_buffer(name)
            if now.shape == buffer.shape and now.dtype == buffer.dtype:
                buffer.data.copy_(now.detach())
                self._set_buffer(name, buffer)
        self._replaced = {}

    def share(self, plans: Iterable[StagePlan], *, is_joined: bool = False) -> None:
        """Broadcast each changed buffer from the stage that has it. Collective over the pipeline.

        Args:
            plans: Plans of all microbatches that were run, each of any stage.
            is_joined: Whether the last stage has run the step on the whole batch.
        """
        self._keep_buffers()
        end = len(self._rank_of_stage) - 1
        owners = {
            name: end if is_joined else owner
            for plan in plans
            for name, owner in plan.changed_buffers.items()
            if owner != ANY_STAGE or is_joined
        }
        for name, buffer in self._buffers(sorted(owners)):
            broadcast(buffer, self._rank_of_stage[owners[name]], self._group)

    def broadcast(self, names: Iterable[str]) -> None:
        """Broadcast the first rank's values of some buffers. Collective over the pipeline."""
        for _, buffer in self._buffers(names):
            broadcast(buffer, 0, self._group)

    def _buffers(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        return [(name, self._root.get_buffer(name)) for name in names]

    def _set_buffer(self, name: str, tensor: Tensor) -> None:
        holder, _, key = name.rpartition(".")
        setattr(self._root.get_submodule(holder), key, tensor)

    def _kept(self, module: str, key: str) -> tuple[dict[str, Any], str, bool, Any, Any]:
        attributes = vars(self._root.get_submodule(module))
        value: Any = attributes.get(key)
        members = value.copy() if type(value) in CONTAINERS else None
        return attributes, key, key in attributes, value, members


def _restore(
    attributes: dict[str, Any], key: str, was_present: bool, value: Any, members: Any
) -> None:
    if not was_present:
        attributes.pop(key, None)
        return
    attributes[key] = value
    if members is not None:
        refill(value, members)

"""Parameters and buffers that a rank of a pipeline holds, kept equal to those of the others.

``StageParameters`` has the rank's parameters, and the names of those that other ranks hold.
``TiedWeights`` are parameters that several stages use: equal values, and gradients added up.

``NonStageState`` has the buffers and attributes that the code between layers changes, kept as one
process would. Every stage runs that code for every microbatch, up to where it hands on. What it
writes into a buffer of its own counts once: on the stage that has what is written, from where all
other ranks get it after the batch. What it only counts (batches seen, say) is kept from one stage
of each rank.
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
    """Put a rank's value into the tensors of all. Collective over ``group``.

    Args:
        tensor: Equal in shape and type on all ranks, on the group's device. Types that a backend
            does not know (bool, float8) pass as bytes.
        rank: Within the group.
        group: At least one rank.
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
    """Return a state that every rank has parts of, whole and on the CPU. Collective over ``group``.

    Args:
        state: A module's, with the same names and, of tensors, the same shapes on all ranks.
        holder: The rank within ``group`` that has what a name stands for.
        group: Ranks that together have everything.
        device: That the group communicates from.
        keeps: Whether this rank wants it; else it gets an empty one.
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
    """Add gradients that were not applied yet to the state of one optimizer.

    Args:
        state: By names of parameters, with ``param_groups``.
        parameters: Those of the module, by name.
        pending: By identity of the parameter.
    """
    for group in state["param_groups"]:
        for name in group[PARAMS]:
            gradient = pending.get(id(parameters.get(name)))
            if gradient is not None:
                state["state"][name] = {**state["state"].get(name, {}), PENDING: gradient}


_FLAG = torch.int32


class TiedWeights:
    """Parameters of stages on more than one rank: tied weights, and what code between units uses.

    Each of their ranks holds them whole and makes a part of their gradient; the parts are added
    up after each batch, so that equal steps follow. Collective to make, over the pipeline.

    Args:
        parameters: Those that this rank holds and shares.
        ranks: By name of every shared parameter of the model, the ranks that hold it, counted
            within the pipeline; equal on all ranks.
        group: The pipeline.
        new_group: Makes a group of some of its ranks, for all pipelines at once.
    """

    def __init__(
        self,
        parameters: ParametersInPlace,
        ranks: Mapping[str, tuple[int, ...]],
        group: ProcessGroup,
        new_group: Callable[[tuple[int, ...]], ProcessGroup | None],
    ) -> None:
        self.names = frozenset(parameters.named())
        """Parameters that this rank shares."""
        self._parameters = parameters
        self._members: list[tuple[ProcessGroup, list[str]]] = []
        for members in sorted(set(ranks.values())):
            # By all ranks, though only some are in it: ranks that have made different numbers of
            # groups may never meet in the next one (gloo, torch 2.13).
            made = new_group(members)
            if made is None:
                continue
            held = [name for name in sorted(ranks) if ranks[name] == members]
            self._members.append((made, held))

    def _held(self) -> list[tuple[ProcessGroup, list[Parameter]]]:
        """Return the groups, and what their ranks share."""
        named = self._parameters.named()
        return [(group, [named[name] for name in names]) for group, names in self._members]

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that gradients are added up in."""
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

    def sum_gradients(self, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        """Sum gradients over the ranks that hold the same parameter; return the sums.

        Collective over those ranks. A rank that made none adds nothing.

        Args:
            gradients: By identity of the parameter.
        """
        sums: dict[int, Tensor] = {}
        for group, parameters in self._held():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            if not trained:
                continue
            found = [gradients.get(id(parameter)) for parameter in trained]
            # Without a gradient on any rank there is none, which optimizers tell from zeros.
            counts = sum_flags(
                [gradient is not None for gradient in found], group, trained[0].device, dtype=_FLAG
            )
            for parameter, own, count in zip(trained, found, counts, strict=True):
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
        """Give every holder the gradients of the first one, which differ by roundings at most.

        Collective over the ranks that hold the same parameter. All of them have one, or none has.
        """
        for group, parameters in self._held():
            source = dist.get_process_group_ranks(group)[0]
            for parameter in parameters:
                if parameter.grad is not None:
                    dist.broadcast(local_tensor(parameter.grad), source, group=group)

    def broadcast(self) -> None:
        """Give every holder the values of the first one."""
        for group, parameters in self._held():
            source = dist.get_process_group_ranks(group)[0]
            for parameter in parameters:
                # The shard of each rank is that of the holder beside it.
                dist.broadcast(local_tensor(parameter.detach()), source, group=group)


class StageParameters:
    """Lets go of the parameters that other ranks hold, and knows who holds what.

    Args:
        module: The whole model.
        division: The ranks that hold each part of it.
        context: Where the pipeline finds itself.
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
        """Those that this rank has values of."""
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
        """Make what other ranks hold seem to be on a device, before the model is moved to it."""
        make_absent(self._absent, device)

    def let_gather(self) -> None:
        """Let ``gathered_parameters`` show every rank what some hold.

        To be called when parameters have become the objects that they are to be between steps.
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
        """Return which ranks of the pipeline have the values of a parameter or other state.

        Args:
            name: In the module's state; any name of a parameter that has several.
        """
        known = self._first_names.get(name)
        if known is not None:
            return self._division.ranks_of_parameter[known]
        # Every rank has all buffers and extra state, and one of them the model's.
        first = self._division.rank_of_state(name)
        return (first, *(rank for rank in range(self._group.size()) if rank != first))

    def has_buffer(self, name: str) -> bool:
        """Whether this rank has the model's value of a buffer; of those outside of units all do."""
        return (
            name in self._division.loose_buffers
            or self._division.rank_of_state(name) == self._group.rank()
        )

    def refuse_unheld(self, plans: Iterable[StagePlan]) -> None:
        """Refuse a step that uses parameters of other ranks in stages of this one.

        The model was divided by what another step does with another batch.

        Raises:
            AbsentError: Not on every rank of the pipeline.
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
    """Data of one parameter that ``gathered_parameters`` needs."""

    group: ProcessGroup
    """The pipeline."""
    first: int
    """A rank within it that has values."""
    is_held: bool
    """Whether this rank has."""

    def broadcast_value(self, value: Tensor) -> Tensor:
        """Return what the first holder has. Collective over the pipeline."""
        # What is absent is one element in memory, and its like would be as well.
        copy = value.clone() if self.is_held else value.new_empty(value.shape)
        broadcast(copy, self.first, self.group)
        return copy


class NonStageState:
    """State that a step leaves behind outside of units.

    Args:
        root: The whole model.
        stages: Those of this rank.
        rank_of_stage: The rank of each stage, within ``group``.
        group: The pipeline.
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
        """The stage of this rank that comes furthest in the step."""
        self._rank_of_stage = rank_of_stage
        self._group = group
        self._replaced: dict[str, Tensor] = {}
        """The model's own buffers, by the names under which copies of them stand now."""

    def during(
        self,
        inner: During,
        plans: Sequence[StagePlan],
        keeps: Callable[[int], bool] = lambda _: True,
    ) -> During:
        """Return what microbatches of a stage are run in.

        Args:
            inner: What they are run in besides.
            plans: The stage's, by microbatch.
            keeps: Whether what a microbatch changed stays.
        """
        self._keep_buffers()  # of a batch that an error ended
        if not any(plan.changed_buffers or plan.changed_attributes for plan in plans):
            return inner  # nearly all models; it is entered for each microbatch

        @contextmanager
        def both(microbatch: int) -> Iterator[None]:
            with inner(microbatch), self._around(plans[microbatch], keeps(microbatch)):
                yield

        return both

    @contextmanager
    def _around(self, plan: StagePlan, keeps: bool) -> Iterator[None]:
        """Within, a stage runs; afterwards stands what it has to leave behind, and no more.

        Each microbatch writes into copies: backward passes of others still need what these read.
        """
        is_kept = keeps and plan.stage == self._keeper
        attributes = plan.attributes_of_last if is_kept else plan.changed_attributes
        buffers = self._buffers(plan.changed_buffers)
        copies = {id(buffer): buffer.detach().clone() for _, buffer in buffers}
        kept = [self._kept(*attribute) for attribute in attributes]
        for name, buffer in buffers:
            self._set_buffer(name, copies[id(buffer)])
        try:
            # Models of transformers note in an attribute that they have registered hooks.
            with nullcontext() if is_kept else hooks_unchanged(self._root.modules()):
                yield
        finally:
            for name, buffer in buffers:
                owner = plan.changed_buffers[name]
                if keeps and plan.stage == (self._keeper if owner == ANY_STAGE else owner):
                    self._replaced.setdefault(name, buffer)
                else:
                    self._set_buffer(name, buffer)
            for container, key, present, value, members in kept:
                _put_back(container, key, present, value, members)

    def _keep_buffers(self) -> None:
        """Let the model have its own buffers again, with the last microbatch's values."""
        for name, buffer in self._replaced.items():
            now = self._root.get_buffer(name)
            if now.shape == buffer.shape and now.dtype == buffer.dtype:
                buffer.data.copy_(now.detach())
                self._set_buffer(name, buffer)
        self._replaced = {}

    def share(self, plans: Iterable[StagePlan], *, is_joined: bool = False) -> None:
        """Give all ranks the buffers that one stage has. Collective over the pipeline.

        Args:
            plans: Those of all microbatches that were run, each of any stage.
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
        """Give all ranks the first one's values of some buffers. Collective over the pipeline."""
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


def _put_back(
    attributes: dict[str, Any], key: str, was_present: bool, value: Any, members: Any
) -> None:
    if not was_present:
        attributes.pop(key, None)
        return
    attributes[key] = value
    if members is not None:
        refill(value, members)

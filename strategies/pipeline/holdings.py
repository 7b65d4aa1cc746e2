"""What this rank of a pipeline holds of a model, and what keeps that one model with the others'."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.strategies.access import know_stages
from boltmesh.strategies.checkpoint.guard import StateGuard
from boltmesh.strategies.joint_norms import HeldShare
from boltmesh.strategies.pipeline.broadcasting import broadcast
from boltmesh.strategies.pipeline.context import PipelineContext
from boltmesh.strategies.pipeline.placement import Division
from boltmesh.strategies.pipeline.replay.absent import AbsentError, make_absent
from boltmesh.strategies.pipeline.replay.stage_plan import StagePlan
from boltmesh.strategies.pipeline.sharing import SharedParameters
from boltmesh.strategies.torch_compat import ParametersInPlace


class Holdings:
    """Lets go of the parameters that other ranks hold, and knows who holds what.

    Args:
        module: The whole model.
        division: What stands where of it.
        context: Where the pipeline finds itself.
    """

    def __init__(self, module: Module, division: Division, context: PipelineContext) -> None:
        group = context.group
        self._division = division
        self._group = group
        rank = group.rank()
        holders = division.ranks_of_parameter
        named = dict(module.named_parameters())
        first_names = {id(each): name for name, each in named.items()}
        self._first_names = {
            name: first_names[id(each)]
            for name, each in module.named_parameters(remove_duplicate=False)
        }
        self._names = frozenset(name for name in named if rank in holders[name])
        self.parameters = ParametersInPlace(module, (each for each in named if each in self._names))
        """Those that this rank has values of."""
        self._absent = [each for name, each in named.items() if name not in self._names]
        self._all = ParametersInPlace(module, named)
        make_absent(self._absent, context.device)
        absent = [each for each, first in self._first_names.items() if rank not in holders[first]]
        self.guard = StateGuard(module, absent)
        shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        own = [name for name, ranks in shared.items() if rank in ranks]
        held_by_several = ParametersInPlace(module, own)
        self.shared = SharedParameters(held_by_several, shared, group, context.new_group)
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
        know_stages(
            {
                each: _Holders(
                    self._group, self._division.ranks_of_parameter[name][0], name in self._names
                )
                for name, each in self._all.named().items()
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
        return (first, *(each for each in range(self._group.size()) if each != first))

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
    """What ``gathered_parameters`` needs of one parameter."""

    group: ProcessGroup
    """The pipeline."""
    first: int
    """A rank within it that has values."""
    is_held: bool
    """Whether this rank has."""

    def told(self, value: Tensor) -> Tensor:
        """Return what the first holder has. Collective over the pipeline."""
        # What is absent is one element in memory, and its like would be as well.
        copy = value.clone() if self.is_held else value.new_empty(value.shape)
        broadcast(copy, self.first, self.group)
        return copy

"""Puts a plan on a model: shards in the place of parameters, and wrappers around modules."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module, Parameter

from boltmesh.errors import LayoutError
from boltmesh.strategies.blocks import has_forward
from boltmesh.strategies.tensor.backends import OUTSIDE, backends_of_axes, without_replicated
from boltmesh.strategies.tensor.execution.attention import Heads
from boltmesh.strategies.tensor.execution.attributes import divide_sizes, divide_width, widths_of
from boltmesh.strategies.tensor.execution.borders import (
    AlikeBorder,
    Border,
    Fed,
    Scope,
    SequenceBorder,
)
from boltmesh.strategies.tensor.execution.changes import Around, Changes
from boltmesh.strategies.tensor.execution.dropout import Draws, divide_draws
from boltmesh.strategies.tensor.execution.group import TensorGroup
from boltmesh.strategies.tensor.execution.local import Column, Inside, Row
from boltmesh.strategies.tensor.execution.owners import (
    Owner,
    block_around,
    caller_of,
    owners_of,
    scope_of,
)
from boltmesh.strategies.tensor.execution.region import (
    AlongParameters,
    Region,
    RegionColumn,
    RegionRow,
    Table,
)
from boltmesh.strategies.tensor.execution.sequence import SequenceParts
from boltmesh.strategies.tensor.execution.sharding import join_shards, shard_parameters
from boltmesh.strategies.tensor.execution.stacks import Stacks
from boltmesh.strategies.tensor.execution.views import (
    Boundary,
    PartialGradients,
)
from boltmesh.strategies.tensor.execution.vocabulary import (
    divide_vocabularies,
    gathered,
    left_whole,
)
from boltmesh.strategies.tensor.execution.vocabulary_part import LossParallel, Vocabulary
from boltmesh.strategies.tensor.plan import ShardedParameter, TensorPlan

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""What calls the layers of a LightningModule that has no forward of its own."""


@dataclass
class AppliedPlan:
    """A plan that a model runs by."""

    module: Module
    plan: TensorPlan
    """Without what its backends leave whole."""
    group: TensorGroup
    changes: Changes = field(default_factory=Changes, repr=False)
    vocabularies: list[Vocabulary] = field(default_factory=list, repr=False)
    """They count for which functions logits were gathered."""
    sequences: list[SequenceParts] = field(default_factory=list, repr=False)
    """Of each stack of blocks between which sequences are divided."""

    @property
    def sharded(self) -> dict[Parameter, ShardedParameter]:
        """The parameters of which this rank has a shard. Tied names are one."""
        return {self.module.get_parameter(name): entry for name, entry in self.plan.sharded.items()}

    def join(self, name: str, shard: Tensor) -> Tensor:
        """Return the whole of which each rank has a shard, as a new tensor. Collective.

        Args:
            name: Of the parameter that is divided so; its first one.
            shard: The parameter, its gradient, or a state of its optimizer.
        """
        entry = self.plan.sharded[name]
        ranks = range(self.group.size)
        shards = [shard.new_empty(entry.local_shape(self.group.size, rank)) for rank in ranks]
        shards[self.group.rank] = shard.detach().contiguous()
        for rank in ranks:
            source = dist.get_global_rank(self.group.process_group, rank)
            dist.broadcast(shards[rank], source, group=self.group.process_group)
        return join_shards(shards, entry)

    def cut_into_stages(self, modules: Mapping[str, Module]) -> None:
        """Prepare for ranks that run some of the modules each, and hand on what those give.

        Whole logits are given where they would be divided, and sequences have to divide evenly.

        Args:
            modules: By dotted name.
        """
        for parts in self.sequences:
            parts.is_cut_by_stages = True
        names = [
            name
            for entry in self.plan.sharded.values()
            if entry.style == "vocabulary"
            for name in entry.names
        ]
        for name, module in modules.items():
            if any(each.startswith(f"{name}.") for each in names):
                self.changes.wrap(module, _gather_output)

    def remove(self) -> None:
        """Take the wrappers off. Parameters stay shards."""
        self.changes.undo()


def apply_plan(
    module: Module,
    plan: TensorPlan,
    group: TensorGroup,
    *,
    loss_parallel: LossParallel = "auto",
    tell: Callable[[str], None] = lambda _: None,
) -> AppliedPlan:
    """Let a model run on this rank's part. No communication; all ranks have to do the same.

    Args:
        module: Its parameters are whole and alike on all ranks, or shards already. They become
            shards in place: the objects, their names and their order stay.
        plan: How. Blocks that its backends name ``replicated`` stay whole.
        group: The ranks that share the model, as many as the plan is for.
        loss_parallel: What to do where code needs logits of the whole vocabulary.
        tell: Hears once of each function that had logits gathered.

    Raises:
        LayoutError: The plan is not one of this model, or of this number of ranks.
    """
    if plan.size != group.size:
        raise LayoutError(
            f"The tensor plan is for {plan.size} ranks, and the group has {group.size}."
        )
    kept = left_whole(without_replicated(plan), module)
    shard_parameters(module, kept.sharded.values(), size=group.size, rank=group.rank)
    applied = AppliedPlan(module, kept, group)
    application = _Application(module, kept, group, applied.changes)
    application.run()
    applied.sequences = [each.parts for each in application.stacks.all]
    applied.vocabularies = divide_vocabularies(
        module, kept, group, applied.changes, loss_parallel=loss_parallel, tell=tell
    )
    return applied


class _Application:
    """One plan that is put on one model."""

    def __init__(
        self, root: Module, plan: TensorPlan, group: TensorGroup, changes: Changes
    ) -> None:
        self.root = root
        self.plan = plan
        self.group = group
        self.changes = changes
        self.draws = Draws(group)
        self.backends = backends_of_axes(plan)
        self.scopes: dict[str, set[bool]] = defaultdict(set)
        """By module name, whether an axis that it holds is run as DTensors."""
        self.stacks = Stacks(root, plan, group)

    def run(self) -> None:
        grouped: dict[tuple[int, str], list[Owner]] = defaultdict(list)
        for owner in owners_of(self.root, self.plan):
            block = block_around(owner.name, self.plan.axes[owner.axis].blocks)
            grouped[owner.axis, block].append(owner)
        every = [owner for owners in grouped.values() for owner in owners]
        self._divide_sizes(every)
        self.widths = widths_of(every)
        for (axis, _), owners in grouped.items():
            self._put_axis(owners, is_region=self._is_region(axis))
        self._put_views()
        self._put_draws()
        self.stacks.put_on(self.changes)

    def _is_region(self, axis: int) -> bool:
        return self.backends[axis] == "region" and axis in self.plan.region_axes

    def _put_axis(self, owners: list[Owner], *, is_region: bool) -> None:
        """Wrap the modules of one axis in one block, and the module that holds them."""
        border = self._border(owners)
        for owner in owners:
            is_fed = owner.name in self.plan.fed and not is_region  # where there are no boundaries
            is_fed = is_fed or self.stacks.is_fed(owner.name)
            of_owner = Fed(border) if is_fed else border
            self._put_owner(owner, of_owner, is_region=is_region)
        name = scope_of(self.root, [owner.name for owner in owners])
        self.scopes[name].add(is_region)
        scope = self.root.get_submodule(name)
        for method in ["forward"] if has_forward(scope) else _STEPS:
            if callable(getattr(scope, method, None)):
                self.changes.wrap(scope, Scope(border), method)
                if is_region:
                    is_in_stack = isinstance(border, SequenceBorder)
                    region = Region(self.group, self.draws, shares_gradients=is_in_stack)
                    self.changes.wrap(scope, region, method)

    def _border(self, owners: list[Owner]) -> Border:
        stacks = {self.stacks.around(owner.name) for owner in owners}
        stack = stacks.pop()
        if stacks:
            raise LayoutError(
                f"'{owners[0].name}' is divided together with modules outside of the blocks whose "
                f"sequences are divided. Set strategy.sequence_parallel=false."
            )
        return SequenceBorder(self.group, stack.parts) if stack else AlikeBorder(self.group)

    def _put_owner(self, owner: Owner, border: Border, *, is_region: bool) -> None:
        module, styles = owner.module, owner.styles
        if isinstance(module, nn.MultiheadAttention):
            Heads(module, border, self.group, self.draws).put_on(self.root, self.changes)
        elif "expert" in styles or {"column", "row"} <= styles:
            self.changes.wrap(module, Inside(border))
        elif "column" in styles:
            matrix = owner.leading("column")
            names = self.widths.get(type(module), ())
            divide_width(module, matrix, names, self.group.size, self.changes)
            column = (
                RegionColumn(border, matrix.sections, _channels(module), self.group)
                if is_region
                else Column(border)
            )
            self.changes.wrap(module, column)
        elif "row" in styles:
            row = (RegionRow if is_region else Row)(module, owner.attributes, border)
            self.changes.wrap(module, row)
        elif "table" in styles:
            self._put_table(owner, is_region=is_region)
        elif is_region:
            around = AlongParameters(module, owner.entries, self.group)
            self.changes.wrap(self._caller(owner.name), around)

    def _put_table(self, owner: Owner, *, is_region: bool) -> None:
        if getattr(owner.module, "max_norm", None) is not None:
            raise LayoutError(
                f"'{owner.name}' scales rows of its table to max_norm, for which it needs them "
                f"whole. Leave it out of the tensor plan."
            )
        if is_region:
            self.changes.wrap(owner.module, Table(owner.leading("table").sections, self.group))

    def _divide_sizes(self, owners: list[Owner]) -> None:
        """Divide the sizes that code on plain shards names.

        A module of one matrix product knows its part by the shapes of its weight; see
        ``divide_width``. One that computes with several parts runs on shards in either backend.
        """
        in_region = {
            block
            for axis, planned in enumerate(self.plan.axes)
            for block in planned.blocks or (OUTSIDE,)
            if self.backends[axis] == "region"
        }
        blocks = {block for planned in self.plan.axes for block in planned.blocks}
        single = {owner.name for owner in owners if len(owner.styles & {"column", "row"}) == 1}
        several = {owner.name for owner in owners} - single
        divide_sizes(
            self.root,
            [
                each
                for each in self.plan.attributes
                if each.module not in single
                and (each.module in several or block_around(each.module, blocks) not in in_region)
            ],
            self.group.size,
            self.changes,
        )

    def _put_views(self) -> None:
        by_owner: dict[str, list[str]] = defaultdict(list)
        for name in self.plan.partial:
            # DTensors sum what they need themselves, but not for parts of a sequence beside them.
            if self._runs_on_parts(name):
                owner, _, attribute = name.rpartition(".")
                by_owner[owner].append(attribute)
        for owner, attributes in by_owner.items():
            module = self.root.get_submodule(owner)
            around = PartialGradients(module, tuple(attributes), self.group)
            self.changes.wrap(self._caller(owner), around)
        for name in self.plan.boundaries:
            if not self._lies_in_region(name):
                self.changes.wrap(self.root.get_submodule(name), Boundary(self.group))

    def _put_draws(self) -> None:
        listed = {self.root.get_submodule(name) for name in self.plan.local_dropouts}
        for name in self.plan.local_dropouts:
            if self._runs_on_parts(name):
                divide_draws(self.root.get_submodule(name), listed, self.draws, self.changes)

    def _runs_on_parts(self, name: str) -> bool:
        return not self._lies_in_region(name) or self.stacks.around(name) is not None

    def _lies_in_region(self, name: str) -> bool:
        """Whether a module runs on DTensors, which know what to draw and what to sum."""
        return any(
            held == {True} and (not scope or f"{name}.".startswith(f"{scope}."))
            for scope, held in self.scopes.items()
        )

    def _caller(self, name: str) -> Module:
        return self.root.get_submodule(caller_of(self.root, name))


def _gather_output(forward: Around, *args: Any, **kwargs: Any) -> Any:
    return gathered(forward(*args, **kwargs))


def _channels(module: Module) -> int:
    """The dimension of a module's output that its weight's outputs are."""
    kernel = getattr(module, "kernel_size", ())
    return -1 - len(kernel) if isinstance(kernel, tuple) else -1

"""Applies a plan to a model: replaces parameters by shards, and wraps modules.

``owners_of`` finds the modules that have divided parameters, ``widths_of`` the attributes that hold
the sizes of their outputs, which are set to those of this rank's part.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torch.nn import Module, Parameter

from boltmesh.errors import LayoutError
from boltmesh.strategies.blocks import has_forward
from boltmesh.strategies.patch import Around, Changes
from boltmesh.strategies.tensor.plan import (
    OUTSIDE,
    LossParallel,
    ShardedParameter,
    Style,
    TensorPlan,
    backends_of_axes,
    block_around,
    block_of,
    region_blocks,
    without_replicated,
)
from boltmesh.strategies.tensor.runtime.boundaries import (
    BlockBoundary,
    BlockScope,
    GradSummedUpstream,
    SequenceBoundary,
)
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.dropout import Draws, divide_draws
from boltmesh.strategies.tensor.runtime.dtensor import (
    AlongParameters,
    Region,
    RegionColumn,
    RegionRow,
    Table,
)
from boltmesh.strategies.tensor.runtime.param_swap import (
    PartialGradients,
    ReplicatedOutput,
    broadcast_whole,
    shard_parameters,
)
from boltmesh.strategies.tensor.runtime.plain_shards import Column, ColumnRow, Heads, Row
from boltmesh.strategies.tensor.runtime.sequence import SequenceParts, Stacks
from boltmesh.strategies.tensor.runtime.signatures import Signature, SignatureGuard, Verified
from boltmesh.strategies.tensor.runtime.vocab_modules import divide_vocabularies, left_whole
from boltmesh.strategies.tensor.runtime.vocab_tensor import gathered


@dataclass(frozen=True)
class Owner:
    """A module with divided parameters of its own."""

    name: str
    module: Module
    axis: int
    entries: tuple[ShardedParameter, ...]
    """Each under the name that this owner has for it."""

    @property
    def styles(self) -> frozenset[Style]:
        """Styles of its parameters."""
        return frozenset(entry.style for entry in self.entries)

    @property
    def attributes(self) -> frozenset[str]:
        """Attribute names of the parameters on the module."""
        return frozenset(entry.name.rpartition(".")[2] for entry in self.entries)

    def leading(self, style: Style) -> ShardedParameter:
        """Return the parameter of a style with the most dims: the matrix, not its bias."""
        return max(
            (entry for entry in self.entries if entry.style == style),
            key=lambda entry: len(entry.shape),
        )


def owners_of(root: Module, plan: TensorPlan) -> list[Owner]:
    """Return the modules whose parameters a plan divides, in the plan's order.

    Without tables and heads, whose tokens are divided outside of blocks.
    """
    by_module: dict[str, list[ShardedParameter]] = defaultdict(list)
    for entry in plan.sharded.values():
        for name in entry.names:
            if entry.style != "vocabulary":
                by_module[name.rpartition(".")[0]].append(replace(entry, name=name))
    return [
        Owner(name, root.get_submodule(name), entries[0].axis, tuple(entries))
        for name, entries in by_module.items()
    ]


def scope_of(root: Module, names: Sequence[str]) -> str:
    """Return the innermost module with a forward that contains all of these modules.

    At the latest it is the root. A single name is the module itself, unless it has no forward, as
    a ``ParameterList`` that is indexed and not called: its parameters are read in the result.
    """
    levels = zip(*(name.split(".") for name in names), strict=False)
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    while common and not has_forward(root.get_submodule(".".join(common))):
        common.pop()
    return ".".join(common)


_PRODUCTS = {"column", "row", "expert"}
"""Styles of the matrices in a module's products."""


def widths_of(owners: Iterable[Owner]) -> dict[type[Module], set[str]]:
    """Return, by class, the attributes in which column modules store the width of their output.

    Such as ``nf`` of GPT-2's Conv1D, the width of q, k and v together. An attribute that equals the
    width only in some modules of the class, such as an index, does not count. Torch's layers have
    known names for their sizes, and use the shapes of their weights.
    """
    by_class: dict[type[Module], set[str]] = {}
    for owner in owners:
        kind = type(owner.module)
        if owner.styles & _PRODUCTS != {"column"} or kind.__module__.startswith("torch.nn."):
            continue
        length = owner.leading("column").length
        own = {
            name
            for name, value in vars(owner.module).items()
            if type(value) is int and value == length
        }
        by_class[kind] = by_class.get(kind, own) & own
    return by_class


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods that call the layers of a LightningModule without a forward of its own."""


@dataclass
class AppliedPlan:
    """A plan applied to a model."""

    module: Module
    plan: TensorPlan
    """Without the parameters that its backends leave whole."""
    group: TensorGroup
    changes: Changes = field(default_factory=Changes, repr=False)
    sequences: list[SequenceParts] = field(default_factory=list, repr=False)
    """One for each stack of blocks between which sequences are divided."""
    guards: list[SignatureGuard] = field(default_factory=list, repr=False)
    """Verify blocks again for calls of other kinds."""

    @property
    def sharded(self) -> dict[Parameter, ShardedParameter]:
        """Divided parameters, tied ones once."""
        return {self.module.get_parameter(name): entry for name, entry in self.plan.sharded.items()}

    def join(self, name: str, shard: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has a shard, as a new tensor. Collective.

        Args:
            name: First name of the parameter that is divided in the same way.
            shard: The parameter, its gradient, or a state of its optimizer; a shard of its shape.
        """
        return broadcast_whole(shard, self.plan.sharded[name], self.group)

    def cut_into_stages(self, modules: Mapping[str, Module]) -> None:
        """Prepare for pipeline stages: ranks run some of the modules and send their outputs on.

        Outputs with divided logits are gathered, and lengths of sequences must divide evenly.

        Args:
            modules: Pipeline units by dotted name.
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
        """Remove the wrappers. Parameters stay shards."""
        self.changes.undo()


def apply_plan(
    module: Module,
    plan: TensorPlan,
    group: TensorGroup,
    *,
    loss_parallel: LossParallel = "auto",
    verified: Mapping[str, Iterable[tuple[Signature, bool]]] | None = None,
) -> AppliedPlan:
    """Make a model run on this rank's part. No communication; all ranks must do the same.

    Args:
        module: Its parameters are whole and equal on all ranks, or shards already. They become
            shards in place: the objects, their names and their order do not change.
        plan: The plan. Blocks that its backends name ``replicated`` stay whole.
        group: The ranks that share the model, as many as the plan is for.
        loss_parallel: What to do if code needs logits of the whole vocabulary.
        verified: Signatures of the calls that the plan was verified with, and whether gradients
            were enabled, by name of the block. Other calls are verified when they occur. None
            verifies nothing.

    Raises:
        LayoutError: The plan is for another model or another number of ranks.
    """
    if plan.size != group.size:
        raise LayoutError(
            f"The tensor plan is for {plan.size} ranks, and the group has {group.size}."
        )
    kept = left_whole(without_replicated(plan), module)
    shard_parameters(module, kept.sharded.values(), size=group.size, rank=group.rank)
    applied = AppliedPlan(module, kept, group)
    application = _Application(applied)
    application.run(verified)
    applied.sequences = [each.parts for each in application.stacks.all]
    divide_vocabularies(module, kept, group, applied.changes, loss_parallel=loss_parallel)
    for guard in applied.guards:
        guard.originals = applied.changes.originals_of(guard.block)
    return applied


class _Application:
    """Applies one plan to one model."""

    def __init__(self, applied: AppliedPlan) -> None:
        self.root, self.plan, self.group = applied.module, applied.plan, applied.group
        self.changes, self.guards = applied.changes, applied.guards
        self.draws = Draws(self.group)
        self.backends = backends_of_axes(self.plan)
        self.scopes: dict[str, set[bool]] = defaultdict(set)
        """Whether axes run as DTensors, by name of the module that contains them."""
        self.stacks = Stacks(self.root, self.plan, self.group)

    def run(self, verified: Mapping[str, Iterable[tuple[Signature, bool]]] | None) -> None:
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
        if verified is not None:
            self._put_guards(verified)
        self.stacks.put_on(self.changes)

    def _is_region(self, axis: int) -> bool:
        return self.backends[axis] == "region" and axis in self.plan.region_axes

    def _put_axis(self, owners: list[Owner], *, is_region: bool) -> None:
        """Wrap the modules of one axis in one block, and the module that contains them."""
        boundary = self._boundary(owners)
        for owner in owners:
            is_fed = owner.name in self.plan.fed and not is_region  # where there are no boundaries
            is_fed = is_fed or self.stacks.is_fed(owner.name)
            of_owner = GradSummedUpstream(boundary) if is_fed else boundary
            self._put_owner(owner, of_owner, is_region=is_region)
        name = scope_of(self.root, [owner.name for owner in owners])
        self.scopes[name].add(is_region)
        scope = self.root.get_submodule(name)
        for method in ["forward"] if has_forward(scope) else _STEPS:
            if callable(getattr(scope, method, None)):
                self.changes.wrap(scope, BlockScope(boundary), method)
                if is_region:
                    is_in_stack = isinstance(boundary, SequenceBoundary)
                    region = Region(self.group, self.draws, shares_gradients=is_in_stack)
                    self.changes.wrap(scope, region, method)

    def _boundary(self, owners: list[Owner]) -> BlockBoundary:
        stacks = {self.stacks.around(owner.name) for owner in owners}
        stack = stacks.pop()
        if stacks:
            raise LayoutError(
                f"'{owners[0].name}' is divided together with modules outside of the blocks whose "
                f"sequences are divided. Set strategy.sequence_parallel=false."
            )
        return SequenceBoundary(self.group, stack.parts) if stack else BlockBoundary(self.group)

    def _put_owner(self, owner: Owner, boundary: BlockBoundary, *, is_region: bool) -> None:
        module, styles = owner.module, owner.styles
        if isinstance(module, nn.MultiheadAttention):
            Heads(module, boundary, self.group, self.draws).put_on(self.root, self.changes)
        elif "expert" in styles or {"column", "row"} <= styles:
            self.changes.wrap(module, ColumnRow(boundary))
        elif "column" in styles:
            matrix = owner.leading("column")
            for name in self.widths.get(type(module), ()):  # it reshapes its output by them
                self.changes.set(module, name, matrix.local_shape(self.group.size)[matrix.dim])
            column = (
                RegionColumn(boundary, matrix.sections, _channels(module), self.group)
                if is_region
                else Column(boundary)
            )
            self.changes.wrap(module, column)
        elif "row" in styles:
            row = (RegionRow if is_region else Row)(module, owner.attributes, boundary)
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
        """Divide the size attributes of modules that run on plain shards.

        A module of one matrix product takes the size of its part from its weight; see
        ``widths_of``. One that computes with several parts runs on shards in either backend.
        Attributes that changed since the plan was made are left alone.
        """
        in_region = region_blocks(self.plan)
        blocks = {block for planned in self.plan.axes for block in planned.blocks}
        single = {owner.name for owner in owners if len(owner.styles & {"column", "row"}) == 1}
        several = {owner.name for owner in owners} - single
        for each in self.plan.attributes:
            if each.module in single:
                continue
            if each.module not in several and block_around(each.module, blocks) in in_region:
                continue
            module = self.root.get_submodule(each.module)
            if vars(module).get(each.name) == each.value:
                self.changes.set(module, each.name, each.value // self.group.size)

    def _put_views(self) -> None:
        by_owner: dict[str, list[str]] = defaultdict(list)
        for name in self.plan.partial:
            # DTensors sum their gradients themselves, except beside parts of a sequence.
            if self._runs_on_parts(name):
                owner, _, attribute = name.rpartition(".")
                by_owner[owner].append(attribute)
        for owner, attributes in by_owner.items():
            module = self.root.get_submodule(owner)
            around = PartialGradients(module, tuple(attributes), self.group)
            self.changes.wrap(self._caller(owner), around)
        for name in self.plan.boundaries:
            if not self._lies_in_region(name):
                self.changes.wrap(self.root.get_submodule(name), ReplicatedOutput(self.group))

    def _put_draws(self) -> None:
        listed = {self.root.get_submodule(name) for name in self.plan.local_dropouts}
        for name in self.plan.local_dropouts:
            if self._runs_on_parts(name):
                divide_draws(self.root.get_submodule(name), listed, self.draws, self.changes)

    def _put_guards(self, verified: Mapping[str, Iterable[tuple[Signature, bool]]]) -> None:
        of_kinds: dict[str, Verified] = {}
        for name, kind in self.plan.kinds.items():
            start = f"{name}."
            entries = {
                own.removeprefix(start): replace(entry, name=own)
                for entry in self.plan.sharded.values()
                for own in entry.names
                if own.startswith(start)
            }
            if not entries:
                continue
            depends_on, passed = self._depends_on(name), self.plan.passed.get(name, ())
            if kind not in of_kinds:
                of_kinds[kind] = Verified(has_sizes=depends_on is None and not passed)
            for signature, has_gradient in verified.get(name, ()):
                of_kinds[kind].add(signature, has_gradient=has_gradient, is_right=True)
            guard = SignatureGuard(
                name, self.root.get_submodule(name), entries, self.group, of_kinds[kind],
                depends_on, self.stacks.around(name), passed=passed,
            )  # fmt: skip
            self.changes.wrap(guard.block, guard)
            self.guards.append(guard)

    def _depends_on(self, block: str) -> str | None:
        """Return what is divided together with a block, for a message; None if nothing is."""
        others = {name for name in self.plan.boundaries if block_of(self.plan, name) != block}
        for number, axis in enumerate(self.plan.axes):
            is_known = self.backends[number] == "local" and bool(self.plan.passed.get(block))
            if block in axis.blocks and len(axis.blocks) > 1 and (others or not is_known):
                other = next(each for each in axis.blocks if each != block)
                return f"{other} computes with the same divided dim"
        for name in self.plan.boundaries:
            if block_of(self.plan, name) == OUTSIDE:
                return f"it uses {name}, whose gradient is summed over the ranks"
        return None

    def _runs_on_parts(self, name: str) -> bool:
        return not self._lies_in_region(name) or self.stacks.around(name) is not None

    def _lies_in_region(self, name: str) -> bool:
        """Whether a module runs on DTensors, which handle random numbers and sums themselves."""
        return any(
            held == {True} and (not scope or f"{name}.".startswith(f"{scope}."))
            for scope, held in self.scopes.items()
        )

    def _caller(self, name: str) -> Module:
        return self.root.get_submodule(scope_of(self.root, [name]))


def _gather_output(forward: Around, *args: Any, **kwargs: Any) -> Any:
    return gathered(forward(*args, **kwargs))


def _channels(module: Module) -> int:
    """Return the dim of a module's output that corresponds to its weight's outputs."""
    kernel = getattr(module, "kernel_size", ())
    return -1 - len(kernel) if isinstance(kernel, tuple) else -1

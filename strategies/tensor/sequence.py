"""Sequence parallelism: divides the sequence between the matrix products of stacked blocks.

Between a row-parallel product and the next column-parallel one, norms, dropouts and residual sums
use one token at a time, so each rank may have some of the tokens. Before the columns the sequence
is gathered, once per module if everything that the module computes from it is divided; after the
rows it is scattered where it was summed. A mixture of experts runs on the whole sequence: its
router may compare tokens, and a loss that balances experts counts all of them.

The gather sums its gradient over the ranks. So within it a replicated parameter has a part of its
gradient, and nothing is summed a second time: neither before columns nor at boundaries.

``Walk`` follows one divided sequence through a stack of blocks, operator by operator;
``divide_sequence`` does so for all stacks.

Source: Reducing Activation Recomputation in Large Transformer Models, Korthikanti et al. 2022,
section 4.2, https://arxiv.org/abs/2205.05198
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.arithmetic_rules import RANDOM
from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Reason,
    SymbolicDim,
    leaves,
    representative,
)
from boltmesh.strategies.tensor.analysis.trace import Operand, OperatorRecord
from boltmesh.strategies.tensor.plan import (
    ExitPoint,
    GatherPoint,
    SequencePlan,
    Style,
    WholePoint,
)
from boltmesh.strategies.tensor.propagation import PRODUCTS, axes_of


class NoSequence(Exception):  # noqa: N818  # a reason rather than an error
    """The reason why the sequence of a stack cannot be divided."""


class Walk:
    """Classifies each activation of a stack: divided by tokens, gathered, or independent of tokens.

    Attributes:
        gathers: Points at which the sequence is gathered.
        partial: Whole parameters used with some of the tokens, or whose gradient a gather sums.
        fed: Column modules whose inputs are gathered activations.
        drawing: Modules that draw random numbers for some of the tokens.
        gathered: Keys of activations after a gather and before the rows.
        whole: Modules that run on the whole sequence.
    """

    def __init__(
        self,
        analysis: Analysis,
        styles: Mapping[str, Style],
        followed: Set[SymbolicDim],
        stack: "BlockStack",
        mixtures: Mapping[str, Set[int]],
    ) -> None:
        self.trace = analysis.trace
        self.styles = styles
        self.followed = followed
        self.stack = stack
        self.tokens = set(leaves(stack.entry.dims[stack.dim]))
        self.divided = {stack.entry.key}
        self.consumers = self.trace.consumers()
        self.gathers: list[GatherPoint] = []
        self.partial: set[str] = set()
        self.fed: list[str] = []
        self.drawing: list[str] = []
        self.gathered: set[int] = set()
        self.whole: dict[str, WholePoint] = {}
        self._mixtures = mixtures

    def run(self) -> None:
        """Follow the sequence from the entry of the stack to its exit.

        Raises:
            NoSequence: If an operator uses several tokens where it is divided.
        """
        if not self.tokens:
            raise NoSequence("the batch has sequences of one token")
        for step in self.trace.steps:
            self._pass(step)
        if self.stack.exit.key not in self.divided:
            raise NoSequence(f"{self.stack.blocks[-1]} gives no divided sequence")

    def divided_modules(self) -> Iterator[str]:
        """Yield the modules of the stack that return some of the tokens, except the last block."""
        starts = tuple(f"{block}." for block in self.stack.blocks)
        for name, given in self.trace.module_outputs.items():
            is_inside = f"{name}.".startswith(starts) and name != self.stack.blocks[-1]
            if is_inside and any(operand.key in self.divided for operand in given.values()):
                yield name

    def _pass(self, step: OperatorRecord) -> None:
        mixture = next((module for module in step.modules if module in self._mixtures), None)
        if mixture is not None and any(block in step.modules for block in self.stack.blocks):
            if mixture not in self.whole:
                self.whole[mixture] = self._whole_point(mixture)
            return
        divided = [operand for operand in step.inputs if self._is_divided(operand, step)]
        points = [self._gather_points(operand, step) for operand in divided]
        gathered = any(operand.key in self.gathered for operand in step.inputs) or any(points)
        if not divided and not gathered:
            return
        self.gathers += [p for several in points for p in several if p not in self.gathers]
        if gathered and not all(points):
            raise NoSequence(
                f"{Reason(step.operator, step.module)} needs all tokens and some of them"
            )
        self.partial |= {
            operand.parameter
            for operand in step.inputs
            if operand.parameter is not None and operand.parameter not in self.styles
        }
        if not gathered:
            self._check_tokenwise(step)
            self.divided |= {out.key for out in step.outputs}
        elif step.operator in PRODUCTS and "row" in self._styles(step):
            self._check_scattered(step)
            self.divided |= {out.key for out in step.outputs}
        else:
            self.gathered |= {out.key for out in step.outputs}
            if step.operator in PRODUCTS and self._styles(step) and step.module not in self.fed:
                self.fed.append(step.module)

    def _whole_point(self, module: str) -> WholePoint:
        """Return where a module takes the sequence, and where it gives it."""
        taken = [
            (place, operand.key)
            for place, operand in self.trace.module_inputs.get(module, {}).items()
            if operand.key in self.divided
        ]
        given = [
            (place, operand.key)
            for place, operand in self.trace.module_outputs.get(module, {}).items()
            if self._has_sequence(operand)
        ]
        if len(taken) != 1 or len(given) != 1:
            raise NoSequence(f"{module} does not take one sequence of tokens, and give one")
        (argument, entered), (place, left) = taken[0], given[0]
        sums = entered in self._mixtures[module]
        if sums:
            self.gathered.add(entered)
        self.divided.add(left)
        return WholePoint(module, argument, place, sums)

    def _styles(self, step: OperatorRecord) -> set[Style]:
        names = {operand.parameter for operand in step.inputs}
        return {style for name, style in self.styles.items() if name in names}

    def _is_divided(self, operand: Operand, step: OperatorRecord) -> bool:
        """Whether an operator gets only some of the tokens of an operand."""
        if operand.key not in self.divided:
            return False
        blocks = [block for block in self.stack.blocks if block in step.modules]
        if operand.key == self.stack.entry.key:  # divided at the first block's input
            return self.stack.blocks[0] in blocks
        if not blocks and operand.key != self.stack.exit.key:
            raise NoSequence(f"{step.operator} looks at the sequence between blocks")
        return bool(blocks)

    def _gather_points(self, operand: Operand, step: OperatorRecord) -> list[GatherPoint]:
        """Return the points of the outermost module that turns an activation into divided results.

        One point for each of its arguments that is the activation; all its results are divided.
        """
        for module in step.modules:
            taken = self.trace.module_inputs.get(module, {}).items()
            points = [
                GatherPoint(module, place) for place, given in taken if given.key == operand.key
            ]
            if points and self._is_all_divided(module, operand.key):
                return points
        return []

    def _is_all_divided(self, module: str, key: int) -> bool:
        """Whether all results of a module from an activation have a divided axis in the end."""
        outputs = {out.key for out in self.trace.module_outputs.get(module, {}).values()}
        waiting, seen, has_any = [key], {key}, False
        while waiting:
            current = waiting.pop()
            for step in self.consumers.get(current, ()):
                if module not in step.modules:
                    if current != key:
                        return False
                    continue
                floating = [out for out in step.outputs if out.is_floating]
                if any(axes_of(out.dims, self.followed) for out in floating):
                    has_any = True
                    continue
                if any(out.key in outputs for out in floating):
                    return False
                waiting += [out.key for out in floating if out.key not in seen]
                seen.update(out.key for out in floating)
        return has_any

    def _check_tokenwise(self, step: OperatorRecord) -> None:
        where = Reason(step.operator, step.module)
        if self.tokens & {representative(atom) for atom in step.needed}:
            raise NoSequence(f"{where} looks at several tokens")
        for out in step.outputs:
            if axes_of(out.dims, self.followed):
                raise NoSequence(f"{where} has columns whose module takes other things as well")
        for operand in step.inputs:
            if operand.key not in self.divided and axes_of(operand.dims, self.tokens):
                if not any(name.startswith(f"{step.module}.") for name in self.styles):
                    raise NoSequence(
                        f"{step.module} is whole on every rank, mostly because they do not divide "
                        f"its heads, and computes with all tokens ({step.operator})"
                    )
                raise NoSequence(f"{where} adds something of all tokens")
        if step.operator in RANDOM and step.module not in self.drawing:
            self.drawing.append(step.module)

    def _check_scattered(self, step: OperatorRecord) -> None:
        given = self.trace.module_outputs.get(step.module, {}).values()
        if not any(map(self._has_sequence, given)):
            raise NoSequence(f"{step.module} does not give the sequence in a dimension of its own")

    def _has_sequence(self, operand: Operand) -> bool:
        """Whether the dim of the sequence holds all tokens and nothing else."""
        dim = self.stack.dim
        return len(operand.dims) > dim and set(leaves(operand.dims[dim])) == self.tokens


@dataclass(frozen=True)
class BlockStack:
    """Blocks of one list, each of which takes the output of the one before."""

    blocks: tuple[str, ...]
    argument: int | str
    """Argument of the first block."""
    entry: Operand
    exit: Operand
    place: int | str | None
    """Index or key of the exit in the last block's output."""
    dim: int
    """Dimension of the sequence."""


@dataclass
class SequenceDivision:
    """Consequences of dividing the sequences of all stacks."""

    plan: SequencePlan
    partial: set[str]
    drawing: list[str]
    """Modules that draw random numbers for some of the tokens."""
    gathered: set[int]
    """Keys of activations after a gather and before the rows."""


def divide_sequence(
    analysis: Analysis,
    styles: Mapping[str, Style],
    followed: Set[SymbolicDim],
    mixtures: Mapping[str, Set[int]],
) -> SequenceDivision:
    """Return the division of sequences, with its consequences.

    Args:
        analysis: Analysis of the model.
        styles: Style of each parameter that is divided.
        followed: Axes that activations have within blocks.
        mixtures: Modules that have to see all tokens, with the keys of activations whose gradient
            each rank has a part of.

    Raises:
        NoSequence: If a stack's cannot be divided.
    """
    stacks = list(_stacks(analysis))
    if not stacks:
        raise NoSequence("no stack of blocks passes one activation on")
    if len({stack.dim for stack in stacks}) > 1:
        raise NoSequence("the sequence is another dimension in other stacks")
    walks = [Walk(analysis, styles, followed, stack, mixtures) for stack in stacks]
    for walk in walks:
        walk.run()
    plan = SequencePlan(
        tuple((stack.blocks[0], stack.blocks[-1]) for stack in stacks),
        tuple(dict.fromkeys(point for walk in walks for point in walk.gathers)),
        stacks[0].dim,
        entries=tuple(GatherPoint(stack.blocks[0], stack.argument) for stack in stacks),
        exits=tuple(ExitPoint(stack.blocks[-1], stack.place) for stack in stacks),
        fed=tuple(dict.fromkeys(name for walk in walks for name in walk.fed)),
        whole=tuple(point for walk in walks for point in walk.whole.values()),
        divided=tuple(name for walk in walks for name in walk.divided_modules()),
    )
    return SequenceDivision(
        plan,
        {name for walk in walks for name in walk.partial},
        list(dict.fromkeys(name for walk in walks for name in walk.drawing)),
        {key for walk in walks for key in walk.gathered},
    )


def _stacks(analysis: Analysis) -> Iterator[BlockStack]:
    by_list: dict[str, list[str]] = {}
    for name in analysis.blocks:
        if name in analysis.trace.module_outputs:
            by_list.setdefault(name.rpartition(".")[0], []).append(name)
    for blocks in by_list.values():
        if len(blocks) > 1 and (stack := _chained(analysis, tuple(blocks))) is not None:
            yield stack


def _chained(analysis: Analysis, blocks: tuple[str, ...]) -> BlockStack | None:
    """Find the activation that is passed from block to block; None if there is none."""
    inputs, outputs = analysis.trace.module_inputs, analysis.trace.module_outputs
    for argument, entry in inputs[blocks[0]].items():
        for place, given in outputs[blocks[0]].items():
            is_passed_on = all(
                outputs[one].get(place) is not None
                and outputs[one][place].key in {operand.key for operand in inputs[other].values()}
                for one, other in pairwise(blocks)
            )
            if is_passed_on and len(given.dims) == len(entry.dims) and len(entry.dims) in {2, 3}:
                last = outputs[blocks[-1]].get(place)
                if last is not None:
                    return BlockStack(blocks, argument, entry, last, place, _sequence_dim(entry))
    return None


def _sequence_dim(entry: Operand) -> int:
    """Return the second of three dimensions, or the first one if attention runs along that."""
    first, second = (any(atom.is_whole for atom in leaves(dim)) for dim in entry.dims[:2])
    return 0 if len(entry.dims) == 2 or (first and not second) else 1

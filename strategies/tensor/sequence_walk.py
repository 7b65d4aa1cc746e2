"""Follows one divided sequence through a stack of blocks, operator by operator."""

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.atoms import Atom, Reason, find, leaves
from boltmesh.strategies.tensor.analysis.operators.pointwise import RANDOM
from boltmesh.strategies.tensor.analysis.records import Operand, Step
from boltmesh.strategies.tensor.flow import PRODUCTS, axes_of
from boltmesh.strategies.tensor.plan import GatherPoint, Style

if TYPE_CHECKING:
    from boltmesh.strategies.tensor.sequence_plan import Stack


class NoSequence(Exception):  # noqa: N818  # it says what stands in the way, and is no error
    """Why the sequence of a stack cannot be divided, in words."""


class Walk:
    """Every activation of a stack is divided by tokens, or gathered, or has nothing to do with it.

    Attributes:
        gathers: Where the sequence is gathered.
        partial: Whole parameters that meet some of the tokens, or whose gradient a gather sums.
        fed: Modules with columns that gathered activations go into.
        drawing: Modules that draw for some of the tokens.
        gathered: Keys of activations behind a gather and before the rows.
    """

    def __init__(
        self, analysis: Analysis, styles: Mapping[str, Style], followed: Set[Atom], stack: "Stack"
    ) -> None:
        self.trace = analysis.trace
        self.styles = styles
        self.followed = followed
        self.stack = stack
        self.tokens = {find(each) for each in leaves(stack.entry.dims[stack.dim])}
        self.divided = {stack.entry.key}
        self.consumers: dict[int, list[Step]] = {}
        for step in self.trace.steps:
            for each in step.inputs:
                self.consumers.setdefault(each.key, []).append(step)
        self.gathers: list[GatherPoint] = []
        self.partial: set[str] = set()
        self.fed: list[str] = []
        self.drawing: list[str] = []
        self.gathered: set[int] = set()

    def run(self) -> None:
        """Follow the sequence from the entry of the stack to its exit.

        Raises:
            NoSequence: When something looks at several tokens where it is divided.
        """
        if not self.tokens:
            raise NoSequence("the batch has sequences of one token")
        for step in self.trace.steps:
            self._pass(step)
        if self.stack.exit.key not in self.divided:
            raise NoSequence(f"{self.stack.blocks[-1]} gives no divided sequence")

    def _pass(self, step: Step) -> None:
        divided = [each for each in step.inputs if self._is_divided(each, step)]
        points = [self._gather_points(each, step) for each in divided]
        gathered = any(each.key in self.gathered for each in step.inputs) or any(points)
        if not divided and not gathered:
            return
        self.gathers += [p for each in points for p in each if p not in self.gathers]
        if gathered and not all(points):
            raise NoSequence(
                f"{Reason(step.operator, step.module)} needs all tokens and some of them"
            )
        self.partial |= {
            each.parameter
            for each in step.inputs
            if each.parameter is not None and each.parameter not in self.styles
        }
        if not gathered:
            self._check_tokenwise(step)
            self.divided |= {each.key for each in step.outputs}
        elif step.operator in PRODUCTS and "row" in self._styles(step):
            self._check_scattered(step)
            self.divided |= {each.key for each in step.outputs}
        else:
            self.gathered |= {each.key for each in step.outputs}
            if step.operator in PRODUCTS and self._styles(step) and step.module not in self.fed:
                self.fed.append(step.module)

    def _styles(self, step: Step) -> set[Style]:
        names = {each.parameter for each in step.inputs}
        return {style for name, style in self.styles.items() if name in names}

    def _is_divided(self, operand: Operand, step: Step) -> bool:
        """Whether an operator finds some of the tokens of an operand only."""
        if operand.key not in self.divided:
            return False
        blocks = [each for each in self.stack.blocks if each in step.modules]
        if operand.key == self.stack.entry.key:  # divided where the first block takes it
            return self.stack.blocks[0] in blocks
        if not blocks and operand.key != self.stack.exit.key:
            raise NoSequence(f"{step.operator} looks at the sequence between blocks")
        return bool(blocks)

    def _gather_points(self, operand: Operand, step: Step) -> list[GatherPoint]:
        """The outermost module that takes an activation and makes only divided things of it.

        With all arguments that are the activation.
        """
        for module in step.modules:
            taken = self.trace.module_inputs.get(module, {}).items()
            points = [
                GatherPoint(module, place) for place, each in taken if each.key == operand.key
            ]
            if points and self._is_all_divided(module, operand.key):
                return points
        return []

    def _is_all_divided(self, module: str, key: int) -> bool:
        """Whether all that a module makes of an activation has a divided axis in the end."""
        outputs = {each.key for each in self.trace.module_outputs.get(module, {}).values()}
        waiting, seen, has_any = [key], {key}, False
        while waiting:
            each = waiting.pop()
            for step in self.consumers.get(each, ()):
                if module not in step.modules:
                    if each != key:
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

    def _check_tokenwise(self, step: Step) -> None:
        where = Reason(step.operator, step.module)
        if self.tokens & {find(each) for each in step.needed}:
            raise NoSequence(f"{where} looks at several tokens")
        for each in step.outputs:
            if axes_of(each.dims, self.followed):
                raise NoSequence(f"{where} has columns whose module takes other things as well")
        for each in step.inputs:
            if each.key not in self.divided and axes_of(each.dims, self.tokens):
                raise NoSequence(f"{where} adds something of all tokens")
        if step.operator in RANDOM and step.module not in self.drawing:
            self.drawing.append(step.module)

    def _check_scattered(self, step: Step) -> None:
        given = self.trace.module_outputs.get(step.module, {}).values()
        if not any(
            len(each.dims) > self.stack.dim
            and {find(atom) for atom in leaves(each.dims[self.stack.dim])} == self.tokens
            for each in given
        ):
            raise NoSequence(f"{step.module} does not give the sequence in a dimension of its own")

"""One call of an operator, and the table of rules by the operator's name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    SymbolicDim,
    keep_whole,
    leaves,
    new_dim,
    unify,
)
from boltmesh.strategies.tensor.analysis.trace import DimTrace, Draw, ShapeUse, Use


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator."""

    trace: DimTrace
    name: str
    """Name without the overload."""
    arguments: Mapping[str, Any]
    """Arguments by the names of the operator's schema, defaults included."""
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    needed: list[SymbolicDim] = field(default_factory=list)
    """Axes that it needs whole, as stated by its rule so far."""

    @property
    def first(self) -> Tensor:
        """The first input tensor."""
        return self.inputs[0]

    @property
    def output(self) -> Tensor:
        """The first output tensor."""
        return self.outputs[0]

    def tensor(self, name: str) -> Tensor | None:
        """Return an argument if it is a tensor, else None."""
        value = self.arguments.get(name)
        return value if isinstance(value, Tensor) else None

    def dims(self, tensor: Tensor) -> tuple[Dim, ...]:
        """Return the dims of a tensor."""
        return self.trace.dims(tensor)

    def give(self, *dims: Dim, output: Tensor | None = None, parameter: str | None = None) -> None:
        """Set the dims of an output; of the first one by default."""
        self.trace.set(self.output if output is None else output, dims, parameter)

    def give_view(self, *dims: Dim, output: Tensor | None = None) -> None:
        """Set the dims of a view or copy of the first input, which may be a parameter."""
        self.give(*dims, output=output, parameter=self.trace.parameter(self.first))

    def give_new(self, *outputs: Tensor) -> None:
        """Give outputs dims that occur nowhere else."""
        for each in outputs:
            self.trace.set(each, (new_dim(size) for size in each.shape))

    def new_whole(self, size: int) -> Dim:
        """Return a dim with a new axis, which is needed whole."""
        dim = new_dim(size)
        self.whole(dim)
        return dim

    def same(self, one: Dim, other: Dim) -> None:
        """Unify two dims."""
        unify(one, other, self.trace.reason(self.name))

    def same_from_last(
        self, shape: Sequence[int], one: Sequence[Dim], other: Sequence[Dim]
    ) -> None:
        """Unify dims from the last back, except where ``shape`` broadcasts."""
        for size, mine, theirs in zip(
            reversed(shape), reversed(one), reversed(other), strict=False
        ):
            if size > 1:
                self.same(mine, theirs)

    def whole(self, *dims: Dim) -> None:
        """Mark dims as needed whole by this operator."""
        for each in dims:
            keep_whole(each, self.trace.reason(self.name))
            self.needed.extend(leaves(each))

    def uses(self, tensor: Tensor, *, is_addend: bool = False) -> None:
        """Record a use of a tensor if it is a parameter."""
        parameter = self.trace.parameter(tensor)
        if parameter is not None:
            self.trace.uses.append(Use(parameter, self.trace.module, is_addend))

    def draws(self, dims: Sequence[Dim]) -> None:
        """Record that random numbers were drawn for a tensor with these dims."""
        self.trace.draws.append(Draw(tuple(dims), self.trace.module))

    def names_sizes(self, dims: Sequence[Dim]) -> None:
        """Record that the code around this operator names sizes of these dims."""
        self.trace.shape_uses.append(ShapeUse(tuple(dims), self.trace.module))

    def forget(self) -> None:
        """Treat the operator as unknown: all its inputs and outputs are needed whole."""
        for each in self.inputs:
            self.whole(*self.dims(each))
        self.give_new(*self.outputs)
        for each in self.outputs:
            self.whole(*self.dims(each))


Rule: TypeAlias = Callable[[OperatorCall], None]

RULES: dict[str, Rule] = {}
"""Rules by the name of the operator without its overload."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def put(function: Rule) -> Rule:
        for each in names:
            assert each not in RULES, each
            RULES[each] = function
        return function

    return put

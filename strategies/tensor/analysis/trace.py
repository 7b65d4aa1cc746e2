"""Record of a traced step: the symbolic dims of every tensor, and the uses of parameters.

Rules for operators write to a ``DimTrace`` through an ``OperatorCall``; ``RULES`` lists them by the
operator's name. An operator without a rule needs its inputs whole, and is listed in the plan.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any, TypeAlias

from torch import Tensor

from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    Reason,
    SymbolicDim,
    keep_whole,
    leaves,
    length,
    new_dim,
    unify,
)
from boltmesh.strategies.torch_compat.tensors import is_fake


@dataclass(frozen=True)
class Product:
    """A matrix product with a parameter."""

    parameter: str
    contracted: Dim
    """The dim that is summed over, of the parameter and the activation, unified."""
    module: str


@dataclass(frozen=True)
class Use:
    """A parameter that met an activation element by element, or scaled the output of a norm."""

    parameter: str
    module: str
    is_addend: bool = False
    """Whether it is added to a matrix product by the same operator, as a bias is."""


@dataclass(frozen=True)
class Lookup:
    """An embedding table, or another parameter indexed by integers."""

    parameter: str
    module: str


@dataclass(frozen=True)
class Draw:
    """Random numbers drawn for a tensor."""

    dims: tuple[Dim, ...]
    module: str


@dataclass(frozen=True)
class ShapeUse:
    """A view, a split or an expand: the code of a module names sizes of these dims."""

    dims: tuple[Dim, ...]
    module: str


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator took or returned."""

    key: int
    """Key of the tensor."""
    dims: tuple[Dim, ...]
    parameter: str | None
    is_floating: bool
    is_zero: bool = False
    """Whether it is known to hold only zeros."""


@dataclass(frozen=True)
class OperatorRecord:
    """One call of an operator."""

    operator: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    modules: tuple[str, ...]
    """Modules in whose forward it ran, outer to inner; the root's name is empty."""
    needed: Dim = ()
    """Dims that it needed whole."""

    @property
    def module(self) -> str:
        """The innermost module in whose forward it ran."""
        return self.modules[-1] if self.modules else ""


@dataclass(frozen=True)
class TensorLabel:
    """Key and dims of a tensor."""

    key: int
    """Unique key of the tensor, never reused."""
    dims: tuple[Dim, ...]
    parameter: str | None = None
    """The parameter that this is a view or an elementwise copy of."""


@dataclass
class DimTrace:
    """Everything recorded of one or several steps."""

    parameters: dict[str, tuple[Dim, ...]]
    """Dims by first name, in the order of the model."""
    attentions: frozenset[str] = frozenset()
    """Modules of torch's own attention, which run as layers for q, k and v."""
    products: list[Product] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    shape_uses: list[ShapeUse] = field(default_factory=list)
    steps: list[OperatorRecord] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    """Operators without a rule."""
    guessed: Counter[str] = field(default_factory=Counter)
    """Operators that needed data of fake tensors, and got guesses."""
    module_inputs: dict[str, dict[int | str, Operand]] = field(default_factory=dict)
    """First floating-point inputs of each module, by position or keyword."""
    module_outputs: dict[str, dict[int | str | None, Operand]] = field(default_factory=dict)
    """First floating-point outputs of each module, by position or key; None for a single one."""
    producers: dict[int, str] = field(default_factory=dict)
    """The innermost module that returned a tensor, by its key."""
    bases: dict[int, int] = field(default_factory=dict)
    """Key of the tensor that another one is a view of."""
    stack: list[str] = field(default_factory=list)
    """Modules whose forward is running."""
    _keys: Iterator[int] = field(default_factory=count)
    _labels: dict[int, TensorLabel] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)
    """Keeps tensors alive: an ``id`` identifies a tensor only while all of them exist."""

    @property
    def made_elements(self) -> int:
        """Elements of all results without views: the most that a backward pass may store."""
        return sum(
            prod(map(length, each.dims))
            for step in self.steps
            for each in step.outputs
            if each.key not in self.bases
        )

    @property
    def module(self) -> str:
        """The innermost module whose forward is running."""
        return self.stack[-1] if self.stack else ""

    def reason(self, operator: str) -> Reason:
        """Return why the running operator needs something whole."""
        return Reason(operator, self.module)

    def set(self, tensor: Tensor, dims: Iterable[Dim], parameter: str | None = None) -> None:
        """Set the dims of a tensor."""
        kept = tuple(tuple(each) for each in dims)
        assert len(kept) == tensor.ndim, (len(kept), tensor.shape)
        known = self._labels.get(id(tensor))
        key = next(self._keys) if known is None else known.key
        self._labels[id(tensor)] = TensorLabel(key, kept, parameter)
        self._kept.append(tensor)

    def label(self, tensor: Tensor) -> TensorLabel:
        """Return the label of a tensor; a new tensor gets new dims."""
        if id(tensor) not in self._labels:
            self.set(tensor, (new_dim(each) for each in tensor.shape))
        return self._labels[id(tensor)]

    def dims(self, tensor: Tensor) -> tuple[Dim, ...]:
        """Return the dims of a tensor."""
        return self.label(tensor).dims

    def parameter(self, tensor: Tensor) -> str | None:
        """Return the parameter that a tensor is a view or a copy of."""
        known = self._labels.get(id(tensor))
        return None if known is None else known.parameter

    def operand(self, tensor: Tensor) -> Operand:
        """Describe a tensor that an operator takes or returns."""
        label = self.label(tensor)
        is_zero = not is_fake(tensor) and not bool(tensor.any())
        # Pairs of channels that are rotated as one complex number also have a gradient.
        is_floating = tensor.is_floating_point() or tensor.is_complex()
        return Operand(label.key, label.dims, label.parameter, is_floating, is_zero)

    def keep_whole(self, tensor: Tensor, operator: str) -> None:
        """Mark every dim of a tensor as needed whole by ``operator``."""
        for each in self.dims(tensor):
            keep_whole(each, self.reason(operator))

    def root(self, key: int) -> int:
        """Return the key of the tensor that this one is a view of, through all views."""
        while key in self.bases:
            key = self.bases[key]
        return key

    def consumers(self) -> dict[int, list[OperatorRecord]]:
        """Return the operators that took a tensor, by its key."""
        found: dict[int, list[OperatorRecord]] = {}
        for step in self.steps:
            for each in step.inputs:
                found.setdefault(each.key, []).append(step)
        return found

    @property
    def without_rule(self) -> frozenset[str]:
        """Operators without a rule: divided only if a user's plan takes responsibility."""
        return frozenset(name.split(".")[1] for name in self.unknown)

    def forget_labels(self) -> None:
        """Release the tensors; the records stay."""
        self._labels.clear()
        self._kept.clear()


def of_parameters(parameters: Mapping[str, Tensor], attentions: frozenset[str]) -> DimTrace:
    """Return an empty trace, in which each dim of a parameter is an axis of its own."""
    dims = {
        name: tuple(new_dim(each) for each in tensor.shape) for name, tensor in parameters.items()
    }
    return DimTrace(dims, attentions)


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

    def whole_tensors(self, *tensors: Tensor) -> None:
        """Mark all dims of tensors as needed whole by this operator."""
        for each in tensors:
            self.whole(*self.dims(each))

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
        self.whole_tensors(*self.inputs)
        self.give_new(*self.outputs)
        self.whole_tensors(*self.outputs)


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

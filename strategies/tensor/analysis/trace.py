"""What a traced step shows: the axes of every tensor's dimensions, and how parameters were used."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import prod

from torch import Tensor

from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    Reason,
    keep_whole,
    length,
    new_dim,
)
from boltmesh.strategies.torch_compat.tensors import is_fake


@dataclass(frozen=True)
class Product:
    """A matrix product with a parameter."""

    parameter: str
    contracted: Dim
    """Of the parameter and of the activation, united."""
    module: str


@dataclass(frozen=True)
class Use:
    """A parameter that met an activation element by element, or scaled what a norm gave."""

    parameter: str
    dims: tuple[Dim, ...]
    """Of what came out."""
    module: str
    is_addend: bool = False
    """Whether it is added to a matrix product by the same operator, as a bias is."""


@dataclass(frozen=True)
class Lookup:
    """An embedding table, or another parameter that integers looked something up in."""

    parameter: str
    module: str


@dataclass(frozen=True)
class Draw:
    """Random numbers for a tensor."""

    dims: tuple[Dim, ...]
    module: str


@dataclass(frozen=True)
class ShapeUse:
    """A view, a split or an expand: the code of a module names sizes of these dimensions."""

    operator: str
    dims: tuple[Dim, ...]
    module: str


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator took or gave."""

    key: int
    """Of the tensor."""
    dims: tuple[Dim, ...]
    parameter: str | None
    is_floating: bool
    is_zero: bool = False
    """Whether it is known to have nothing but zeros."""


@dataclass(frozen=True)
class OperatorRecord:
    """One operator."""

    operator: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    modules: tuple[str, ...]
    """In whose forwards it ran, outer to inner; the root is the empty name."""
    needed: Dim = ()
    """What it needed whole."""

    @property
    def module(self) -> str:
        """In whose own forward."""
        return self.modules[-1] if self.modules else ""


@dataclass(frozen=True)
class TensorLabel:
    """What is known of a tensor."""

    key: int
    """Of the tensor: the same for as long as it lives, and no other one's ever."""
    dims: tuple[Dim, ...]
    parameter: str | None = None
    """The parameter that this is a view or a copy of, element by element."""


@dataclass
class DimTrace:
    """All that was seen of one step or of several."""

    parameters: dict[str, tuple[Dim, ...]]
    """Dimensions by first name, in the order of the model."""
    attentions: frozenset[str] = frozenset()
    """Modules of torch's own attention, which are run as layers for q, k and v."""
    products: list[Product] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    shape_uses: list[ShapeUse] = field(default_factory=list)
    steps: list[OperatorRecord] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    """Operators without a rule."""
    guessed: Counter[str] = field(default_factory=Counter)
    """Operators that needed data which are not there, and got ones."""
    module_inputs: dict[str, dict[int | str, Operand]] = field(default_factory=dict)
    """The floating tensors that a module took first, by place or keyword."""
    module_outputs: dict[str, dict[int | str | None, Operand]] = field(default_factory=dict)
    """And gave first, by place or key; by None where it gave nothing else."""
    producers: dict[int, str] = field(default_factory=dict)
    """The innermost module that returned a tensor."""
    bases: dict[int, int] = field(default_factory=dict)
    """The tensor that another one is a view of."""
    stack: list[str] = field(default_factory=list)
    """Modules whose forward runs."""
    _keys: Iterator[int] = field(default_factory=count)
    _labels: dict[int, TensorLabel] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)
    """An ``id`` tells tensors apart only while all of them exist."""

    @property
    def made_elements(self) -> int:
        """Of all that operators made, views apart: what a backward pass may keep at most."""
        return sum(
            prod(map(length, each.dims))
            for step in self.steps
            for each in step.outputs
            if each.key not in self.bases
        )

    @property
    def module(self) -> str:
        """Whose own forward runs."""
        return self.stack[-1] if self.stack else ""

    def reason(self, operator: str) -> Reason:
        """Why the operator that runs needs something whole."""
        return Reason(operator, self.module)

    def set(self, tensor: Tensor, dims: Iterable[Dim], parameter: str | None = None) -> None:
        """Say what the dimensions of a tensor are."""
        kept = tuple(tuple(each) for each in dims)
        assert len(kept) == tensor.ndim, (len(kept), tensor.shape)
        known = self._labels.get(id(tensor))
        key = next(self._keys) if known is None else known.key
        self._labels[id(tensor)] = TensorLabel(key, kept, parameter)
        self._kept.append(tensor)

    def label(self, tensor: Tensor) -> TensorLabel:
        """What is known of a tensor; of one that is new, nothing."""
        if id(tensor) not in self._labels:
            self.set(tensor, (new_dim(each) for each in tensor.shape))
        return self._labels[id(tensor)]

    def dims(self, tensor: Tensor) -> tuple[Dim, ...]:
        """Dimensions of a tensor."""
        return self.label(tensor).dims

    def parameter(self, tensor: Tensor) -> str | None:
        """The parameter that a tensor is a view or a copy of."""
        known = self._labels.get(id(tensor))
        return None if known is None else known.parameter

    def operand(self, tensor: Tensor) -> Operand:
        """Describe a tensor that an operator takes or gives."""
        label = self.label(tensor)
        is_zero = not is_fake(tensor) and not bool(tensor.any())
        # Pairs of channels that are rotated as one complex number have a gradient as well.
        is_floating = tensor.is_floating_point() or tensor.is_complex()
        return Operand(label.key, label.dims, label.parameter, is_floating, is_zero)

    def keep_whole(self, tensor: Tensor, operator: str) -> None:
        """Say that every dimension of a tensor has to be whole."""
        for each in self.dims(tensor):
            keep_whole(each, self.reason(operator))

    def root(self, key: int) -> int:
        """The tensor that this one is a view of, through all views."""
        while key in self.bases:
            key = self.bases[key]
        return key

    def consumers(self) -> dict[int, list[OperatorRecord]]:
        """The operators that took a tensor, by its key."""
        found: dict[int, list[OperatorRecord]] = {}
        for step in self.steps:
            for each in step.inputs:
                found.setdefault(each.key, []).append(step)
        return found

    @property
    def without_rule(self) -> frozenset[str]:
        """Operators without a rule: divided only where a user's plan is responsible for them."""
        return frozenset(name.split(".")[1] for name in self.unknown)

    def forget_labels(self) -> None:
        """Let go of the tensors; what was recorded stays."""
        self._labels.clear()
        self._kept.clear()


def of_parameters(parameters: Mapping[str, Tensor], attentions: frozenset[str]) -> DimTrace:
    """A trace in which nothing has happened yet: each dimension is an axis of its own."""
    dims = {
        name: tuple(new_dim(each) for each in tensor.shape) for name, tensor in parameters.items()
    }
    return DimTrace(dims, attentions)

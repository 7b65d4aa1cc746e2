"""What a traced step told beside its axes: how parameters were used, and where."""

from dataclasses import dataclass

from boltmesh.strategies.tensor.analysis.atoms import Dim


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
class Step:
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

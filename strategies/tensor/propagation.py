"""Follows divided axes through a traced step, and finds the sums that they need.

A replicated activation that is used with a divided tensor has, on each rank, a part of its
gradient, which is summed at the output of a module. A replicated parameter used that way has a part
too. If other results of that activation feed columns, as in latent attention the keys do beside
the rotated part for all heads, that sum includes the columns', which do not sum themselves.

``refused_owners`` refuses axes whose sums are not possible at the boundaries of the modules
that own the matrices. Before columns the gradient is summed at the module's inputs, after rows
the result is summed at its output. That is right for a linear layer. For a module with several
matrices, such as stacked experts, it is right if all results of its inputs are divided or terms of
the sum, and if every operation on the terms is linear.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    Reason,
    SymbolicDim,
    representative,
)
from boltmesh.strategies.tensor.analysis.trace import Operand, OperatorRecord
from boltmesh.strategies.tensor.plan import Style

PRODUCTS = frozenset({
    "_grouped_mm", "addmm", "baddbmm", "bmm", "convolution", "linear", "mm", "mv",
})  # fmt: skip
"""Operators that sum over an axis of two tensors."""


@dataclass
class Propagation:
    """Consequences of dividing some axes for the rest of the model."""

    partial: list[str] = field(default_factory=list)
    boundaries: list[str] = field(default_factory=list)
    fed: list[str] = field(default_factory=list)
    """Column modules that leave the sum of their inputs' gradients to boundaries."""
    refused: dict[SymbolicDim, str] = field(default_factory=dict)
    """Axes that cannot be divided after all, and why."""


def axes_of(dims: Iterable[Dim], chosen: Set[SymbolicDim]) -> set[SymbolicDim]:
    """Return the selected axes in dimensions, sections of them included."""
    reached: set[SymbolicDim] = set()
    waiting = [atom for dim in dims for atom in dim]
    while waiting:
        atom = representative(waiting.pop())
        reached.add(atom)
        waiting += atom.parts
    return reached & chosen


def _entered_as_one(styles: Mapping[str, Style]) -> set[str]:
    """Return modules with both columns and rows, such as stacked experts."""
    by_module: dict[str, set[Style]] = {}
    for name, style in styles.items():
        by_module.setdefault(name.rpartition(".")[0], set()).add(style)
    return {name for name, several in by_module.items() if several >= {"column", "row"}
            or "expert" in several}  # fmt: skip


class Follower:
    """Finds the parameters and activations that are used together with divided axes.

    Args:
        analysis: Analysis of the model.
        sharded: The axis of each parameter that is divided.
        followed: Axes of activations within blocks, without those of tokens.
        styles: Style of each parameter that is divided.
    """

    def __init__(
        self,
        analysis: Analysis,
        sharded: Mapping[str, SymbolicDim],
        followed: Sequence[SymbolicDim],
        styles: Mapping[str, Style],
    ) -> None:
        self.analysis = analysis
        self.trace = analysis.trace
        self.sharded = sharded
        self.styles = styles
        self.order = {atom: number for number, atom in enumerate(followed)}
        self.chosen = set(followed)
        self.made = {out.key: step for step in self.trace.steps for out in step.outputs}
        self.consumers = self.trace.consumers()
        self.entered = _entered_as_one(styles) - self.trace.attentions
        self.flow = Propagation()

    def follow(self) -> Propagation:
        """Follow the axes through the operators of the step."""
        partial: dict[str, None] = {}
        boundaries: dict[str, set[int]] = {}
        fed: dict[str, dict[SymbolicDim, str]] = {}
        for step in self.trace.steps:
            for atom, operand in self._entering(step):
                if operand.parameter is not None:
                    partial.setdefault(operand.parameter)
                    continue
                entered = next((module for module in step.modules if module in self.entered), None)
                for name, key in self._origins(operand.key, partial, entered):
                    boundaries.setdefault(name, set()).add(key)
                    whole, columns = self._other_uses(key, atom)
                    if whole:
                        self.flow.refused.setdefault(atom, f"{name} {whole}")
                    for module in columns:
                        fed.setdefault(module, {})[atom] = name
        keys = {key for several in boundaries.values() for key in several}
        for module, atoms in fed.items():
            if not self._is_fed(module, keys, partial):
                for atom, name in atoms.items():
                    why = f"{name} also feeds {module}, which is divided and takes other things"
                    self.flow.refused.setdefault(atom, why)
        self.flow.fed = list(fed)
        self.flow.partial = [name for name in self.analysis.parameters if name in partial]
        self.flow.boundaries = list(boundaries)
        return self.flow

    def _entering(self, step: OperatorRecord) -> Iterator[tuple[SymbolicDim, Operand]]:
        """Yield whole tensors whose results are divided, except inputs of column-parallel modules.

        Those sum the gradients of their inputs themselves.
        """
        given: set[SymbolicDim] = set()
        if step.operator in self.trace.without_rule:
            return
        for out in step.outputs:
            given |= axes_of(out.dims, self.chosen)
        if not given:
            return
        by_parameter = {self.sharded.get(operand.parameter or "") for operand in step.inputs}
        for atom in sorted(given, key=self.order.__getitem__):
            if atom in by_parameter and step.operator in PRODUCTS:
                continue
            for operand in step.inputs:
                is_whole = atom not in axes_of(operand.dims, self.chosen)
                if is_whole and operand.is_floating and operand.dims:
                    yield atom, operand

    def _origins(
        self, key: int, partial: dict[str, None], entered: str | None
    ) -> Iterator[tuple[str, int]]:
        """Yield the modules that produce a replicated tensor, the nearest ones with parameters.

        Parameters on the way have a part of their gradient as well. A module that is entered as one
        sums the gradients of all its inputs, so nothing outside of it has a part.
        """
        waiting, seen = [key], set[int]()
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            step = self.made.get(current)
            if entered is not None and (step is None or entered not in step.modules):
                continue
            name = self.trace.producers.get(current)
            if name and self._has_parameters(name):
                yield name, current
                continue
            for operand in () if step is None else step.inputs:
                if operand.parameter is not None:
                    partial.setdefault(operand.parameter)
                elif operand.is_floating:
                    waiting.append(operand.key)

    def _has_parameters(self, module: str) -> bool:
        return any(
            name.startswith(f"{module}.")
            for facts in self.analysis.parameters.values()
            for name in facts.names
        )

    def _other_uses(self, key: int, atom: SymbolicDim) -> tuple[str, list[str]]:
        """Return the other uses of a tensor that is used where an axis is divided.

        Either a use that needs it whole, as text, or the modules with divided matrices that it
        feeds.
        """
        columns: dict[str, None] = {}
        waiting, seen = [key], set[int]()
        while waiting:
            current = waiting.pop()
            for step in self.consumers.get(current, ()):
                if step.operator == "detach":  # its results have no gradient
                    continue
                if self._is_divided_product(step):
                    columns.setdefault(step.module)
                    continue
                floating = [out for out in step.outputs if out.is_floating]
                if any(atom in axes_of(out.dims, self.chosen) for out in floating):
                    continue
                # A norm's outputs beside its result are for its backward pass.
                if floating and not any(out.key in self.consumers for out in floating):
                    return f"is also used whole, by {step.operator} in {step.module}", []
                waiting += [out.key for out in floating if out.key not in seen]
                seen.update(out.key for out in floating)
        return "", list(columns)

    def _is_divided_product(self, step: OperatorRecord) -> bool:
        return step.operator in PRODUCTS and any(
            operand.parameter in self.sharded for operand in step.inputs
        )

    def _is_fed(self, module: str, boundaries: Set[int], partial: dict[str, None]) -> bool:
        """Whether all inputs of a column module are computed from outputs of boundaries.

        Then the boundaries sum its inputs' gradients, and the parameters on the way have a part of
        theirs.
        """
        names = {name for name in self.styles if name.rpartition(".")[0] == module}
        if module in self.trace.attentions or {self.styles[name] for name in names} != {"column"}:
            return False
        products = [
            step
            for step in self.trace.steps
            if step.module == module and self._is_divided_product(step)
        ]
        replicated: dict[str, None] = {}
        waiting = [operand for step in products for operand in step.inputs]
        seen = set(boundaries)
        while waiting:
            operand = waiting.pop()
            if operand.parameter is not None:
                if operand.parameter not in self.sharded:
                    replicated.setdefault(operand.parameter)
            elif operand.is_floating and operand.key not in seen:
                seen.add(operand.key)
                if operand.key not in self.made:
                    return False
                waiting += self.made[operand.key].inputs
        partial.update(replicated)
        return True


_LINEAR = frozenset({
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "index",
    "index_select", "neg", "permute", "reshape", "select", "slice", "split", "squeeze", "sum", "t",
    "transpose", "unbind", "unsqueeze", "view",
})  # fmt: skip
"""Linear operators: their result for a sum is the sum of their results for its terms."""
_SCALING = frozenset({"div", "div_", "mul", "mul_"})
_ADDING = frozenset({
    "add", "add_", "cat", "copy_", "index_add", "index_add_", "index_copy_", "index_put",
    "index_put_", "scatter_add", "scatter_add_", "stack", "sub",
})  # fmt: skip
_ZEROS = frozenset({"new_zeros", "zeros", "zeros_like"})


def refused_owners(
    analysis: Analysis,
    axes: Mapping[str, SymbolicDim],
    styles: Mapping[str, Style],
    followed: Set[SymbolicDim],
) -> dict[SymbolicDim, str]:
    """Return axes of modules in which a sum at the boundaries would be wrong, with the reason.

    Args:
        analysis: Analysis of the model.
        axes: Axis of each parameter that is divided.
        styles: Style of each parameter that is divided.
        followed: Axes of activations within blocks, without those of tokens.
    """
    owners: dict[str, list[OperatorRecord]] = {}
    for step in analysis.trace.steps:
        if step.operator in PRODUCTS and _matrices(step, axes):
            owners.setdefault(step.module, [])
    for step in analysis.trace.steps:
        for module in step.modules:
            if module in owners:
                owners[module].append(step)
    refused: dict[SymbolicDim, str] = {}
    for module, steps in owners.items():
        if module in analysis.trace.attentions:  # run as layers for q, k, v and the output
            continue
        names = [n for step in steps if step.module == module for n in _matrices(step, axes)]
        atoms = dict.fromkeys(axes[name] for name in names if axes[name] in followed)
        if atoms and (why := _ModuleOperators(analysis, module, steps, styles, followed).why_not()):
            refused.update(dict.fromkeys(atoms, f"{module or 'the model'} {why}"))
    return refused


def _matrices(step: OperatorRecord, axes: Mapping[str, SymbolicDim]) -> list[str]:
    return [
        operand.parameter
        for operand in step.inputs
        if operand.parameter in axes and operand.parameter
    ]


class _ModuleOperators:
    """A module with divided matrices of its own, and the operators that run within it."""

    def __init__(
        self,
        analysis: Analysis,
        module: str,
        steps: list[OperatorRecord],
        styles: Mapping[str, Style],
        followed: Set[SymbolicDim],
    ) -> None:
        self.trace = analysis.trace
        self.module = module
        self.steps = steps
        self.styles = styles
        self.followed = followed
        own = {
            name.rpartition(".")[2]
            for facts in analysis.parameters.values()
            for name in facts.names
            if name.rpartition(".")[0] == module
        }
        self.is_layer = own <= {"weight", "bias"}
        """Its bias can be added after the sum."""
        self.terms: set[int] = set()
        """Keys of tensors of which each rank has a term."""
        self.zeros = {out.key for step in steps if step.operator in _ZEROS for out in step.outputs}

    def why_not(self) -> str:
        """Return why a sum at the output or the inputs would be wrong; empty if it is right."""
        for step in self.steps:
            if step.operator in PRODUCTS and self._is_row(step):
                self.terms |= {out.key for out in step.outputs}
            elif any(operand.key in self.terms for operand in step.inputs):
                if not self._is_of_terms(step):
                    return f"goes on with what it sums over: {Reason(step.operator)}"
                self.terms |= {out.key for out in step.outputs}
                if step.operator.endswith("_"):  # and what it is a view of
                    self.terms.add(self.trace.root(step.inputs[0].key))
            elif step.operator in _ZEROS or (
                step.operator in _LINEAR
                and all(operand.key in self.zeros for operand in step.inputs)
            ):
                self.zeros |= {out.key for out in step.outputs}
        for operand in self.trace.module_inputs.get(self.module, {}).values():
            if not axes_of(operand.dims, self.followed) and (why := self._other_use(operand)):
                return why
        return ""

    def _is_row(self, step: OperatorRecord) -> bool:
        """Whether a product sums over a divided axis: an input has one, the output has none."""
        return not any(axes_of(out.dims, self.followed) for out in step.outputs) and any(
            axes_of(operand.dims, self.followed) for operand in step.inputs
        )

    def _is_of_terms(self, step: OperatorRecord) -> bool:
        others = [
            operand
            for operand in step.inputs
            if operand.key not in self.terms and operand.is_floating
        ]
        if step.operator in _LINEAR:
            return True
        if step.operator in _SCALING:
            # One factor, and no divisor, may be whole and the other a term.
            return sum(operand.key in self.terms for operand in step.inputs) == 1 and (
                "div" not in step.operator or step.inputs[0].key in self.terms
            )
        if step.operator in _ADDING:
            # A number is not a tensor among the inputs, and every rank would add it.
            return len(step.inputs) > 1 and all(self._is_nothing(operand) for operand in others)
        return False

    def _is_nothing(self, operand: Operand) -> bool:
        """Whether every rank may add an operand to its terms: zeros, and the bias of a layer."""
        if operand.parameter is not None:
            return self.is_layer
        return operand.is_zero or operand.key in self.zeros

    def _other_use(self, taken: Operand) -> str:
        """Return the result computed from an input that is neither divided nor a term."""
        waiting, seen = [taken.key], {taken.key}
        while waiting:
            key = waiting.pop()
            for step in self.steps:
                if not any(operand.key == key for operand in step.inputs):
                    continue
                floating = [out for out in step.outputs if out.is_floating]
                if any(
                    out.key in self.terms or axes_of(out.dims, self.followed) for out in floating
                ):
                    continue
                outputs = self.trace.module_outputs.get(self.module, {}).values()
                if any(out.key == given.key for out in floating for given in outputs):
                    return f"gives out something whole as well: {Reason(step.operator)}"
                waiting += [out.key for out in floating if out.key not in seen]
                seen.update(out.key for out in floating)
        return ""

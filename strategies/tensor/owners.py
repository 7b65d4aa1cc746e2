"""Refuses axes whose sums cannot be taken where the modules that own the matrices begin and end.

In front of columns the gradient is summed where the module takes its inputs, behind rows the
result is summed where the module gives it out. That is right for a linear layer. It is right for a
module with matrices of its own, such as stacked experts, if all that it makes of its inputs is
divided or a term of the sum, and if it does nothing to the terms that a sum would not allow.
"""

from collections.abc import Mapping, Set

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.atoms import Atom, Reason
from boltmesh.strategies.tensor.analysis.records import Operand, Step
from boltmesh.strategies.tensor.flow import PRODUCTS, axes_of
from boltmesh.strategies.tensor.plan import Style

_LINEAR = frozenset({
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "index",
    "index_select", "neg", "permute", "reshape", "select", "slice", "split", "squeeze", "sum", "t",
    "transpose", "unbind", "unsqueeze", "view",
})  # fmt: skip
"""What they make of a sum is the sum of what they make of its terms."""
_SCALING = frozenset({"div", "div_", "mul", "mul_"})
_ADDING = frozenset({
    "add", "add_", "cat", "copy_", "index_add", "index_add_", "index_copy_", "index_put",
    "index_put_", "scatter_add", "scatter_add_", "stack", "sub",
})  # fmt: skip
_ZEROS = frozenset({"new_zeros", "zeros", "zeros_like"})


def refused_owners(
    analysis: Analysis,
    axes: Mapping[str, Atom],
    styles: Mapping[str, Style],
    followed: Set[Atom],
) -> dict[Atom, str]:
    """Return axes whose matrices' modules do other things as well, and which.

    Args:
        analysis: Of the model.
        axes: Of each parameter that is divided.
        styles: Of each parameter that is divided.
        followed: Axes that activations have within blocks; not those of tokens.
    """
    owners: dict[str, list[Step]] = {}
    for step in analysis.trace.steps:
        if step.operator in PRODUCTS and _matrices(step, axes):
            owners.setdefault(step.module, [])
    for step in analysis.trace.steps:
        for each in step.modules:
            if each in owners:
                owners[each].append(step)
    refused: dict[Atom, str] = {}
    for module, steps in owners.items():
        if module in analysis.trace.attentions:  # run as layers for q, k, v and the output
            continue
        names = [n for step in steps if step.module == module for n in _matrices(step, axes)]
        atoms = dict.fromkeys(axes[each] for each in names if axes[each] in followed)
        if atoms and (why := _Owner(analysis, module, steps, styles, followed).why_not()):
            refused.update(dict.fromkeys(atoms, f"{module or 'the model'} {why}"))
    return refused


def _matrices(step: Step, axes: Mapping[str, Atom]) -> list[str]:
    return [each.parameter for each in step.inputs if each.parameter in axes and each.parameter]


class _Owner:
    """A module with divided matrices of its own, and the operators that run within it."""

    def __init__(
        self,
        analysis: Analysis,
        module: str,
        steps: list[Step],
        styles: Mapping[str, Style],
        followed: Set[Atom],
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
        """Whose bias can be added after the sum."""
        self.terms: set[int] = set()
        """Keys of what ranks have terms of."""
        self.zeros = {out.key for step in steps if step.operator in _ZEROS for out in step.outputs}

    def why_not(self) -> str:
        """Return what a sum at the end or the beginning would not be right for; empty if it is."""
        for step in self.steps:
            if step.operator in PRODUCTS and self._is_row(step):
                self.terms |= {each.key for each in step.outputs}
            elif any(each.key in self.terms for each in step.inputs):
                if not self._is_of_terms(step):
                    return f"goes on with what it sums over: {Reason(step.operator)}"
                self.terms |= {each.key for each in step.outputs}
                if step.operator.endswith("_"):  # and what it is a view of
                    self.terms.add(self.trace.root(step.inputs[0].key))
            elif step.operator in _ZEROS or (
                step.operator in _LINEAR and all(each.key in self.zeros for each in step.inputs)
            ):
                self.zeros |= {each.key for each in step.outputs}
        for each in self.trace.module_inputs.get(self.module, {}).values():
            if not axes_of(each.dims, self.followed) and (why := self._other_use(each)):
                return why
        return ""

    def _is_row(self, step: Step) -> bool:
        """Whether a product sums over a divided axis: it has one, and gives none."""
        return not any(axes_of(each.dims, self.followed) for each in step.outputs) and any(
            axes_of(each.dims, self.followed) for each in step.inputs
        )

    def _is_of_terms(self, step: Step) -> bool:
        others = [each for each in step.inputs if each.key not in self.terms and each.is_floating]
        if step.operator in _LINEAR:
            return True
        if step.operator in _SCALING:
            # One factor, and no divisor, may be whole and the other a term.
            return sum(each.key in self.terms for each in step.inputs) == 1 and (
                "div" not in step.operator or step.inputs[0].key in self.terms
            )
        if step.operator in _ADDING:
            # A number is no tensor among the inputs, and every rank would add it.
            return len(step.inputs) > 1 and all(self._is_nothing(each) for each in others)
        return False

    def _is_nothing(self, operand: Operand) -> bool:
        """Whether every rank may add something to its terms: zeros, and the bias of a layer."""
        if operand.parameter is not None:
            return self.is_layer
        return operand.is_zero or operand.key in self.zeros

    def _other_use(self, taken: Operand) -> str:
        """Return what is made of an input that is neither divided nor a term."""
        waiting, seen = [taken.key], {taken.key}
        while waiting:
            key = waiting.pop()
            for step in self.steps:
                if not any(each.key == key for each in step.inputs):
                    continue
                floating = [out for out in step.outputs if out.is_floating]
                if any(
                    out.key in self.terms or axes_of(out.dims, self.followed) for out in floating
                ):
                    continue
                outputs = self.trace.module_outputs.get(self.module, {}).values()
                if any(out.key == each.key for out in floating for each in outputs):
                    return f"gives out something whole as well: {Reason(step.operator)}"
                waiting += [out.key for out in floating if out.key not in seen]
                seen.update(out.key for out in floating)
        return ""

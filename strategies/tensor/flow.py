"""Where divided axes begin and end in a traced step, and what that asks of what is whole.

A replicated activation that meets something divided has, on each rank, a part of its gradient: the
sum is taken where a module gives it out. A replicated parameter that does has a part too. Where
other things made of that activation go into columns, as the keys of latent attention do beside
what is rotated for all heads, these leave the sum to it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.atoms import Atom, Dim, find
from boltmesh.strategies.tensor.analysis.records import Operand, Step
from boltmesh.strategies.tensor.plan import Style

PRODUCTS = frozenset({
    "_grouped_mm", "addmm", "baddbmm", "bmm", "convolution", "linear", "mm", "mv",
})  # fmt: skip
"""Operators that sum over an axis of two tensors."""


@dataclass
class Flow:
    """What choosing some axes asks of the rest of the model."""

    partial: list[str] = field(default_factory=list)
    boundaries: list[str] = field(default_factory=list)
    fed: list[str] = field(default_factory=list)
    """Modules with columns that leave the sum of their inputs' gradients to boundaries."""
    refused: dict[Atom, str] = field(default_factory=dict)
    """Axes that cannot be divided after all, and why."""


def axes_of(dims: Iterable[Dim], chosen: Set[Atom]) -> set[Atom]:
    """Which of the chosen axes dimensions have, sections of them included."""
    found: set[Atom] = set()
    waiting = [atom for dim in dims for atom in dim]
    while waiting:
        atom = find(waiting.pop())
        found.add(atom)
        waiting += atom.parts
    return found & chosen


def follow(
    analysis: Analysis,
    sharded: Mapping[str, Atom],
    followed: Sequence[Atom],
    styles: Mapping[str, Style],
) -> Flow:
    """Find what meets divided axes.

    Args:
        analysis: Of the model.
        sharded: The axis of each parameter that is divided.
        followed: Axes that activations have within blocks; not those of tokens.
        styles: Of each parameter that is divided.
    """
    return _Follower(analysis, sharded, followed, styles).follow()


def _entered_as_one(styles: Mapping[str, Style]) -> set[str]:
    """Modules with columns and rows of their own, such as stacked experts."""
    found: dict[str, set[Style]] = {}
    for name, style in styles.items():
        found.setdefault(name.rpartition(".")[0], set()).add(style)
    return {name for name, several in found.items() if several >= {"column", "row"}
            or "expert" in several}  # fmt: skip


class _Follower:
    def __init__(
        self,
        analysis: Analysis,
        sharded: Mapping[str, Atom],
        followed: Sequence[Atom],
        styles: Mapping[str, Style],
    ) -> None:
        self.analysis = analysis
        self.trace = analysis.trace
        self.sharded = sharded
        self.styles = styles
        self.order = {atom: number for number, atom in enumerate(followed)}
        self.chosen = set(followed)
        self.made = {out.key: step for step in self.trace.steps for out in step.outputs}
        self.consumers: dict[int, list[Step]] = {}
        for step in self.trace.steps:
            for each in step.inputs:
                self.consumers.setdefault(each.key, []).append(step)
        self.strange = {name.split(".")[1] for name in self.trace.unknown}
        """Without a rule: divided only where a user answers for it."""
        self.entered = _entered_as_one(styles) - self.trace.attentions
        self.flow = Flow()

    def follow(self) -> Flow:
        partial: dict[str, None] = {}
        boundaries: dict[str, set[int]] = {}
        fed: dict[str, dict[Atom, str]] = {}
        for step in self.trace.steps:
            for atom, operand in self._entering(step):
                if operand.parameter is not None:
                    partial.setdefault(operand.parameter)
                    continue
                entered = next((each for each in step.modules if each in self.entered), None)
                for name, key in self._origins(operand.key, partial, entered):
                    boundaries.setdefault(name, set()).add(key)
                    whole, columns = self._other_uses(key, atom)
                    if whole:
                        self.flow.refused.setdefault(atom, f"{name} {whole}")
                    for each in columns:
                        fed.setdefault(each, {})[atom] = name
        keys = {key for several in boundaries.values() for key in several}
        for module, atoms in fed.items():
            if not self._is_fed(module, keys, partial):
                for atom, name in atoms.items():
                    why = f"{name} also feeds {module}, which is divided and takes other things"
                    self.flow.refused.setdefault(atom, why)
        self.flow.fed = list(fed)
        self.flow.partial = [each for each in self.analysis.parameters if each in partial]
        self.flow.boundaries = list(boundaries)
        return self.flow

    def _entering(self, step: Step) -> Iterator[tuple[Atom, Operand]]:
        """Give what is whole and comes out divided, but for the inputs of column-parallel modules.

        Those sum the gradients of their inputs themselves.
        """
        given: set[Atom] = set()
        if step.operator in self.strange:
            return
        for each in step.outputs:
            given |= axes_of(each.dims, self.chosen)
        if not given:
            return
        by_parameter = {self.sharded.get(each.parameter or "") for each in step.inputs}
        for atom in sorted(given, key=self.order.__getitem__):
            if atom in by_parameter and step.operator in PRODUCTS:
                continue
            for each in step.inputs:
                is_whole = atom not in axes_of(each.dims, self.chosen)
                if is_whole and each.is_floating and each.dims:
                    yield atom, each

    def _origins(
        self, key: int, partial: dict[str, None], entered: str | None
    ) -> Iterator[tuple[str, int]]:
        """Give the modules that a replicated tensor comes from, the nearest ones with parameters.

        Parameters on the way have a part of their gradient as well. A module that is entered as one
        sums the gradients of all that it takes, so nothing outside of it has a part.
        """
        waiting, seen = [key], set[int]()
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            step = self.made.get(each)
            if entered is not None and (step is None or entered not in step.modules):
                continue
            name = self.trace.producers.get(each)
            if name and self._has_parameters(name):
                yield name, each
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

    def _other_uses(self, key: int, atom: Atom) -> tuple[str, list[str]]:
        """Return what else is made of a tensor that goes where an axis is divided.

        Either what needs it whole, in words, or the modules with divided matrices that it feeds.
        """
        columns: dict[str, None] = {}
        waiting, seen = [key], set[int]()
        while waiting:
            each = waiting.pop()
            for step in self.consumers.get(each, ()):
                if step.operator == "detach":  # what is made of that has no gradient
                    continue
                if self._is_divided_product(step):
                    columns.setdefault(step.module)
                    continue
                floating = [out for out in step.outputs if out.is_floating]
                if any(atom in axes_of(out.dims, self.chosen) for out in floating):
                    continue
                # What a norm gives beside its result is for its backward pass.
                if floating and not any(out.key in self.consumers for out in floating):
                    return f"is also used whole, by {step.operator} in {step.module}", []
                waiting += [out.key for out in floating if out.key not in seen]
                seen.update(out.key for out in floating)
        return "", list(columns)

    def _is_divided_product(self, step: Step) -> bool:
        return step.operator in PRODUCTS and any(
            each.parameter in self.sharded for each in step.inputs
        )

    def _is_fed(self, module: str, boundaries: Set[int], partial: dict[str, None]) -> bool:
        """Whether all that a module with columns takes is made of what boundaries give.

        Then they sum its gradient, and the parameters on the way have a part of theirs.
        """
        names = {name for name in self.styles if name.rpartition(".")[0] == module}
        if module in self.trace.attentions or {self.styles[name] for name in names} != {"column"}:
            return False
        products = [
            step
            for step in self.trace.steps
            if step.module == module and self._is_divided_product(step)
        ]
        found: dict[str, None] = {}
        waiting = [each for step in products for each in step.inputs]
        seen = set(boundaries)
        while waiting:
            each = waiting.pop()
            if each.parameter is not None:
                if each.parameter not in self.sharded:
                    found.setdefault(each.parameter)
            elif each.is_floating and each.key not in seen:
                seen.add(each.key)
                if each.key not in self.made:
                    return False
                waiting += self.made[each.key].inputs
        partial.update(found)
        return True

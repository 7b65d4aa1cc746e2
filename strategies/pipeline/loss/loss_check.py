"""What was proved of a run's losses and logs so far; on the rank of the last stage alone.

What it decides reaches the other ranks as weights and values, so they need not know it.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from boltmesh.strategies.pipeline.loss.calibration import LossProof, prove
from boltmesh.strategies.pipeline.loss.reduction import (
    BatchLossError,
    Form,
    OtherFormError,
    Term,
    read,
)
from boltmesh.strategies.pipeline.loss.trial import Trial, TrialPart, TrialRows
from boltmesh.strategies.pipeline.loss.weights import (
    RETURNED,
    Key,
    LogRule,
    MicrobatchWeights,
    Noted,
    combine,
    rules,
    usual_rule,
)

MOST_TRIES = 8
"""Batches on which a key or a divisor is tried that none of them decides."""


@dataclass
class _CheckedRule:
    """How a key is put together, and whether that was proved."""

    rule: LogRule
    is_firm: bool
    """Whether no batch can be put together otherwise; else it was proved only for microbatches
    whose losses are worth what their rows are."""
    tries: int = 1


class LossChecks:
    """Knows the forms of losses and the rules of logged keys, and proves new ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forms: list[Form] = []
        self._tries = 0
        """Of the form's doubtful divisors."""
        self._rules: dict[Key, _CheckedRule] = {}
        self._warned: set[Key] = set()

    def of_step(self, trial: Callable[[], Trial]) -> "StepLossCheck":
        """Return what is asked while one step runs.

        Args:
            trial: Makes the end of that step, to be tried where nothing is known.
        """
        return StepLossCheck(self, trial)

    def read(self, loss: Tensor, trial: Callable[[], Trial]) -> tuple[Form, list[Term]] | None:
        """Return the form of a loss and its terms; None where nothing could be proved by a batch.

        Raises:
            ConfigError: When no weights put such a loss together.
        """
        known = self._known(loss)
        if known is None:
            self._prove(trial())
            known = self._known(loss)
        return known

    def find_problem(self, trial: Callable[[], Trial]) -> BatchLossError | None:
        """Try a batch; return why no weights put its loss together, if that is so."""
        try:
            self._prove(trial())
        except BatchLossError as error:
            return error
        return None

    def resolve_doubts(self, trial: Callable[[], Trial]) -> None:
        """Try a batch where the ones before have left open what a divisor is.

        Raises:
            ConfigError: When no weights put such a loss together.
        """
        if self._tries < MOST_TRIES and any(each.doubtful for each in self._forms):
            self._tries += 1
            self._prove(trial())

    def rule_of(
        self,
        key: Key,
        noted: list[Noted],
        weights: MicrobatchWeights,
        trial: Callable[[], Trial],
    ) -> LogRule:
        """Return how the values of a key are put together."""
        known = self._rules.get(key)
        may_try = known is None or (not known.is_firm and known.tries < MOST_TRIES)
        # Looked at last: weights on a GPU are waited for.
        if may_try and (known is None or not weights.are_alike()):
            self._prove(trial())
            if known is None:
                self._rules.setdefault(key, _CheckedRule(usual_rule(noted), is_firm=False))
            else:
                self._rules[key].tries = known.tries + 1
        return self._rules[key].rule

    def _known(self, loss: Tensor) -> tuple[Form, list[Term]] | None:
        for form in self._forms:
            with suppress(OtherFormError):
                return form, read(loss, form)
        return None

    def _prove(self, trial: Trial) -> None:
        proof = prove(trial, self._device)
        if proof is None:
            return
        self._learn_form(proof.form)
        self._learn_rules(proof)

    def _learn_form(self, form: Form) -> None:
        alike = [known for known in self._forms if known.visits == form.visits]
        if any(form.doubtful.keys() - known.constants for known in alike):
            return  # an earlier batch has told that it counts
        for each in alike:
            for place, divisor in each.doubtful.items():
                # For no rows another one, but for another batch: it does not count.
                if form.doubtful.get(place, divisor) != divisor:
                    del form.doubtful[place]
            if each.doubtful or form.doubtful:
                self._forms.remove(each)
        if form not in self._forms:
            self._forms.append(form)

    def _learn_rules(self, proof: LossProof) -> None:
        keys = [
            key
            for key in proof.cuts[0].whole.outcome.logged
            if all(key in part.outcome.logged for cut in proof.cuts for part in _runs(cut))
        ]
        for key in keys:
            known = self._rules.get(key)
            if known is None or not known.is_firm:
                found = _rule(key, proof.cuts)
                if found is None:
                    self._warn(key, proof.cuts[0])
                    rule = usual_rule([part.outcome.logged[key] for part in proof.cuts[0].parts])
                    found = _CheckedRule(rule, is_firm=True)
                self._rules[key] = found

    def _warn(self, key: Key, cut: TrialRows) -> None:
        if key in self._warned:
            return
        self._warned.add(key)
        name, inner = key
        label = name if inner is None else f"{name}[{inner!r}]"
        what = f"returns {inner!r}" if name == RETURNED else f"logs {label!r}"
        warnings.warn(
            f"training_step {what}, which for a batch is neither the mean, the sum, the "
            f"largest nor the smallest of what it is for the batch's microbatches, nor a power or "
            f"an exponential of their mean ({float(cut.whole.outcome.logged[key].value):g} for "
            f"{cut.whole.count} rows, "
            f"{' and '.join(f'{float(each.outcome.logged[key].value):g}' for each in cut.parts)} "
            f"for parts of them). What you see is put together as if it were a mean or, of whole "
            f"numbers, a sum.",
            stacklevel=2,
        )


class StepLossCheck:
    """What is known, while one step runs."""

    def __init__(self, proofs: LossChecks, trial: Callable[[], Trial]) -> None:
        self._proofs = proofs
        self._trial = trial
        self._is_begun = False

    def read(self, loss: Tensor) -> tuple[Form, list[Term]] | None:
        """Return the form and the terms of a microbatch's loss, as :meth:`LossChecks.read` does."""
        if not self._is_begun:
            self._is_begun = True
            self._proofs.resolve_doubts(self._trial)
        return self._proofs.read(loss, self._trial)

    def rules(self, weights: MicrobatchWeights) -> Callable[[Key, list[Noted]], LogRule]:
        """Return what tells how the values of a key are put together."""
        return lambda key, noted: self._proofs.rule_of(key, noted, weights, self._trial)


def _runs(cut: TrialRows) -> list[TrialPart]:
    return [cut.whole, *cut.parts]


def _rule(key: Key, cuts: Sequence[TrialRows]) -> _CheckedRule | None:
    """Return the first rule that gives the whole's value in all cuts."""
    noted = [_noted(key, cut) for cut in cuts]
    weights = [
        MicrobatchWeights(
            {number: cut.weights.get(number, 0.0) for number in range(len(cut.parts))},
            {number: float(part.count) for number, part in enumerate(cut.parts)},
        )
        for cut in cuts
    ]
    wholes = [float(cut.whole.outcome.logged[key].value) for cut in cuts]
    if not all(map(math.isfinite, wholes)):
        return _CheckedRule(usual_rule(noted[0]), is_firm=False)

    def fits(rule: LogRule) -> bool:
        return all(
            _is_equal(float(combine(rule, values, weight)), whole, values)
            for values, weight, whole in zip(noted, weights, wholes, strict=True)
        )

    found = next((rule for rule in rules(noted[0]) if fits(rule)), None)
    if found is None:
        return None
    other = {"loss": "rows", "rows": "loss"}.get(found.weights)
    is_doubtful = found.fold == "mean" and other is not None
    return _CheckedRule(found, not is_doubtful or not fits(replace(found, weights=other)))  # type: ignore[arg-type]


def _noted(key: Key, cut: TrialRows) -> list[Noted]:
    return [
        replace(part.outcome.logged[key], microbatch=number)
        for number, part in enumerate(cut.parts)
    ]


def _is_equal(value: float, whole: float, noted: Sequence[Noted]) -> bool:
    finite = [abs(float(each.value)) for each in noted if math.isfinite(float(each.value))]
    return abs(value - whole) <= noted[0].precision * max([abs(whole), *finite])

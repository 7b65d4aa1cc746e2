"""Proofs of a run's losses and logs so far, on the rank of the last stage only.

The other ranks get the resulting weights and values.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from boltmesh.strategies.pipeline.loss.calibration import (
    LossProof,
    kinds_of_rows,
    logged_of_row,
    prove,
    prove_empty,
    prove_key,
)
from boltmesh.strategies.pipeline.loss.log_rules import (
    RETURNED,
    Key,
    LogRule,
    MicrobatchWeights,
    Noted,
    combine,
    rules,
    usual_rule,
)
from boltmesh.strategies.pipeline.loss.reduction import (
    BatchLossError,
    Form,
    OtherFormError,
    Term,
    read,
)
from boltmesh.strategies.pipeline.loss.trial import Attempt, Trial, TrialCut, TrialPart

MOST_TRIES = 8
"""Number of batches on which an undecided key or divisor is tried."""


@dataclass
class _CheckedRule:
    """Rules for a key that the proofs so far allow."""

    fitting: list[LogRule]
    """Rules that give the value of every batch tried; the first is in use. Zeros are their own
    sum, mean and maximum; equal values are their own mean and maximum."""
    tries: int = 1

    @property
    def is_of_one_fold(self) -> bool:
        """Whether the rules differ in weights only."""
        return all(replace(each, weights="loss") == self.fitting[0] for each in self.fitting)

    def is_open(self, noted: Sequence[Noted], weights: MicrobatchWeights) -> bool:
        """Whether the rules may give a batch different values."""
        if len(self.fitting) == 1 or self.tries >= MOST_TRIES:
            return False
        if self.is_of_one_fold:
            return not weights.are_alike()
        values = torch.stack([each.value for each in noted])
        may_be_sum = LogRule("sum") in self.fitting
        # All rules except a sum give equal values back, and a sum gives zeros back.
        like = torch.zeros_like(values) if may_be_sum else values[0].expand_as(values)
        return not torch.allclose(values, like, rtol=1e-6, atol=0.0, equal_nan=True)


class LossChecks:
    """Keeps the forms of losses and the rules of logged keys, and proves new ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forms: list[Form] = []
        self._tries = 0
        """Number of tries of doubtful divisors."""
        self._kinds_of_rows: set[tuple[int, bool]] = set()
        """See ``kinds_of_rows``; of all batches tried."""
        self._looks = 0
        """Number of batches whose rows were examined."""
        self._has_proved_empty = False
        """Whether microbatches without a loss were tried beside others."""
        self._rules: dict[Key, _CheckedRule] = {}
        self._batch_sizes: dict[Key, bool] = {}
        """Whether microbatches log a key with the batch's ``batch_size`` rather than their own."""

    def of_step(self, trial: Callable[[], Trial]) -> "StepLossCheck":
        """Return the checks for one step.

        Args:
            trial: Makes the end of that step, for a new proof.
        """
        return StepLossCheck(self, trial)

    def read(self, loss: Tensor, step: "StepLossCheck") -> tuple[Form, list[Term]] | None:
        """Return the form of a loss and its terms; None if the batch could not prove any.

        Args:
            loss: Shape ``()``, with its graph.
            step: The checks of the step.

        Raises:
            ConfigError: No weights make such losses add up to the batch's.
        """
        known = self._known(loss)
        if known is None:
            self._prove(step)
            known = self._known(loss)
        return known

    def find_problem(self, trial: Callable[[], Trial]) -> BatchLossError | None:
        """Try a batch; return the error if no weights make microbatches' losses add up to its."""
        try:
            self._prove(self.of_step(trial))
        except BatchLossError as error:
            return error
        return None

    def resolve_doubts(self, step: "StepLossCheck") -> None:
        """Try a batch if earlier ones have left a divisor undecided.

        A batch with the first rows of zeros in a tensor, or the first non-zero ones, is tried as
        well: a weight that the loss computes from it has not changed any loss so far. On a device
        only the first batches are examined, since that synchronizes.

        Raises:
            ConfigError: No weights make such losses add up to the batch's.
        """
        if self._tries < MOST_TRIES and any(each.doubtful for each in self._forms):
            self._tries += 1
            self._prove(step)
        elif self._device.type == "cpu" or self._looks < MOST_TRIES:
            self._looks += 1
            if not kinds_of_rows(step.trial) <= self._kinds_of_rows:
                self._prove(step)

    def prove_empty(self, step: "StepLossCheck", rows: Sequence[int], empty: Sequence[int]) -> None:
        """Try a batch of which a microbatch has no loss, until one proves that its weight is 0.

        Raises:
            ConfigError: Such rows count in the loss of others.
        """
        if not self._has_proved_empty:
            self._has_proved_empty = any(
                prove_empty(form, step.trial, rows, empty) for form in self._forms
            )

    def rule_of(
        self,
        key: Key,
        noted: list[Noted],
        weights: MicrobatchWeights,
        step: "StepLossCheck",
    ) -> LogRule:
        """Return the rule that combines the microbatches' values of a key."""
        if key not in self._rules:
            self._prove(step)
            self._rules.setdefault(key, _CheckedRule(list(dict.fromkeys(rules(noted)))))
        known = self._rules[key]
        if known.is_open(noted, weights):
            proof = self._prove(step)
            known.tries += 1
            if proof is not None and not known.is_of_one_fold and known.is_open(noted, weights):
                rows = _rows_to_look_at(noted, weights, step.trial.num_rows)
                cuts = prove_key(proof.form, step.trial, key, rows, step.logged_of_row)
                self._learn_rule(key, cuts)
            if known.tries == MOST_TRIES and len(known.fitting) > 1:
                self._warn_open(key, known.fitting[0])
        return known.fitting[0]

    def is_size_of_batch(self, key: Key) -> bool | None:
        """Return whether microbatches log a key with the batch's ``batch_size``; None: unknown."""
        return self._batch_sizes.get(key)

    def _known(self, loss: Tensor) -> tuple[Form, list[Term]] | None:
        for form in self._forms:
            with suppress(OtherFormError):
                return form, read(loss, form)
        return None

    def _prove(self, step: "StepLossCheck") -> LossProof | None:
        proof = step.proof
        self._kinds_of_rows |= kinds_of_rows(step.trial)
        if proof is not None:
            self._learn_form(proof.form)
            for key in proof.cuts[0].whole.outcome.logged:
                self._learn_rule(key, proof.cuts)
            whole, *parts = (each.outcome.batch_sizes for each in _runs(proof.cuts[0]))
            for key, size in whole.items():
                self._batch_sizes[key] = all(each.get(key) == size for each in parts)
        return proof

    def _learn_form(self, form: Form) -> None:
        alike = [known for known in self._forms if known.visits == form.visits]
        if any(form.doubtful.keys() - known.constants for known in alike):
            return  # an earlier batch has shown that it counts
        for each in alike:
            for place, divisor in each.doubtful.items():
                # The same for all rows of a batch, and different for another: it does not count.
                if form.doubtful.get(place, divisor) != divisor:
                    del form.doubtful[place]
            if each.doubtful or form.doubtful or each.off:
                self._forms.remove(each)
        if form not in self._forms:
            self._forms.append(form)

    def _learn_rule(self, key: Key, cuts: Sequence[TrialCut]) -> None:
        if not cuts or any(key not in each.outcome.logged for cut in cuts for each in _runs(cut)):
            return
        known = self._rules.get(key)
        if known is not None and len(known.fitting) == 1:
            return
        fitting = _fitting(key, cuts)
        if known is not None:
            fitting = [each for each in known.fitting if each in fitting]
        if not fitting:
            self._warn(key, cuts[0])
            fitting = [usual_rule([part.outcome.logged[key] for part in cuts[0].parts])]
        if known is None:
            self._rules[key] = _CheckedRule(fitting)
        else:
            known.fitting = fitting

    def _warn_open(self, key: Key, rule: LogRule) -> None:
        warnings.warn(
            f"training_step {_described(key)}, and {MOST_TRIES} batches did not show how its "
            f"value for a batch is made of those for the batch's microbatches. The value that is "
            f"shown is their {_FOLD_NAMES[rule.fold]}.",
            stacklevel=2,
        )

    def _warn(self, key: Key, cut: TrialCut) -> None:
        warnings.warn(
            f"training_step {_described(key)}, which for a batch is neither the mean, the sum, the "
            f"largest nor the smallest of what it is for the batch's microbatches, nor a power or "
            f"an exponential of their mean ({float(cut.whole.outcome.logged[key].value):g} for "
            f"{cut.whole.count} rows, "
            f"{' and '.join(f'{float(each.outcome.logged[key].value):g}' for each in cut.parts)} "
            f"for parts of them). What you see is put together as if it were a mean or, of whole "
            f"numbers, a sum.",
            stacklevel=2,
        )


class StepLossCheck:
    """Loss checks of one step, whose end is tried at most once."""

    def __init__(self, checks: LossChecks, trial: Callable[[], Trial]) -> None:
        self._checks = checks
        self._make_trial = trial
        self.is_size_of_batch = checks.is_size_of_batch
        self._logged: dict[tuple[int, Attempt], Mapping[Key, float]] = {}
        self._is_begun = False

    @cached_property
    def trial(self) -> Trial:
        """The end of the step."""
        return self._make_trial()

    @cached_property
    def proof(self) -> LossProof | None:
        """Form of the loss and the runs that prove it, as :func:`prove` returns them."""
        return prove(self.trial)

    def logged_of_row(self, row: int, attempt: Attempt) -> Mapping[Key, float]:
        """Return the logged values of a row by a cached :func:`logged_of_row`."""
        if (row, attempt) not in self._logged:
            self._logged[row, attempt] = logged_of_row(self.trial, row, attempt)
        return self._logged[row, attempt]

    def read(self, loss: Tensor) -> tuple[Form, list[Term]] | None:
        """Return the form and the terms of a microbatch's loss, as :meth:`LossChecks.read` does."""
        if not self._is_begun:
            self._is_begun = True
            self._checks.resolve_doubts(self)
        return self._checks.read(loss, self)

    def prove_empty(self, rows: Sequence[int], empty: Sequence[int]) -> None:
        """Prove that rows without a loss have weight 0, see :meth:`LossChecks.prove_empty`."""
        self._checks.prove_empty(self, rows, empty)

    def rules(self, weights: MicrobatchWeights) -> Callable[[Key, list[Noted]], LogRule]:
        """Return a function that gives the rule of a key from its noted values."""
        return lambda key, noted: self._checks.rule_of(key, noted, weights, self)


_FOLD_NAMES = {"mean": "mean", "sum": "sum", "max": "maximum", "min": "minimum"}


def _described(key: Key) -> str:
    name, inner = key
    label = name if inner is None else f"{name}[{inner!r}]"
    return f"returns {inner!r}" if name == RETURNED else f"logs {label!r}"


def _runs(cut: TrialCut) -> list[TrialPart]:
    return [cut.whole, *cut.parts]


def _fitting(key: Key, cuts: Sequence[TrialCut]) -> list[LogRule]:
    """Return the rules that give the whole's value in all cuts; of equivalent ones, the first."""
    noted = [
        [
            replace(part.outcome.logged[key], microbatch=number)
            for number, part in enumerate(cut.parts)
        ]
        for cut in cuts
    ]
    weights = [
        MicrobatchWeights(
            {number: cut.weights.get(number, 0.0) for number in range(len(cut.parts))},
            {number: float(part.count) for number, part in enumerate(cut.parts)},
        )
        for cut in cuts
    ]
    wholes = [float(cut.whole.outcome.logged[key].value) for cut in cuts]

    def fits(rule: LogRule) -> bool:
        return all(
            _is_equal(float(combine(rule, values, weight)), whole, values)
            for values, weight, whole in zip(noted, weights, wholes, strict=True)
            if math.isfinite(whole)
        )

    fitting = [rule for rule in dict.fromkeys(rules(noted[0])) if fits(rule)]
    if all(each.is_certain for each in noted[0]) and fitting[:1] == [next(rules(noted[0]))]:
        return fitting[:1]  # the graph proves it
    return [each for each in fitting if each == fitting[0] or _differ(each, fitting[0])]


def _differ(one: LogRule, other: LogRule) -> bool:
    """Whether rules differ in more than the source of their weights."""
    if (one.fold, one.of) != (other.fold, other.of):
        return True
    return {one.weights, other.weights} == {"loss", "rows"}


def _rows_to_look_at(
    noted: Sequence[Noted], weights: MicrobatchWeights, num_rows: int
) -> list[int]:
    """Return the rows of a batch, starting with the microbatch that logged the largest value."""
    number = max(noted, key=lambda each: abs(float(each.value))).microbatch
    start = int(sum(weights.rows.get(each, 0.0) for each in range(number)))
    return [(start + each) % num_rows for each in range(num_rows)]


def _is_equal(value: float, whole: float, noted: Sequence[Noted]) -> bool:
    finite = [abs(float(each.value)) for each in noted if math.isfinite(float(each.value))]
    return abs(value - whole) <= noted[0].precision * max([abs(whole), *finite])

"""Proves on a few rows that the losses of microbatches give the loss of their batch.

[Note: Calibration]
Before the first microbatch of a new kind is trained, the rank of the last stage runs the end of
the step (the user's code behind the last layer) on up to five rows with made-up values, once with
all rows and once with uneven parts of them, in two ways. The divisor of a loss grows with the rows
if it counts them, and stays the same if it is a constant. Then the parts are weighted as
microbatches are, and loss and gradients must be those of all rows. Computed in fp64 if the step
allows it; the tolerance covers ``+ 1e-6`` beside a count. For every logged value, rules that give
the whole's value are kept, and the first one is used. Several rules may give it: the sum, mean and
maximum of zeros are zero. Once the rules give a batch different values, that batch is tried too, on
two rows for which the value differs (``prove_key``).

A weight that the loss computes from its batch, such as that of rare positives, does not change the
loss of rows that have none. So rows with the largest and the smallest values of a batch are tried
too, and so is a later batch with the first row of zeros in a tensor, or the first non-zero row.

If few rows have what a loss counts (positives of a detector), five rows may hold none, and
``max(n, 1)`` is a constant for them. A divisor of at most 1 is therefore tried on every row, each
repeated several times, and rows that change it are tried with the others. If none does, the whole
batch has one divisor, so it does not matter whether it counts, and the next batch is tried.

Layers are not run. Scalars of layers that enter the loss are taken as means over their rows if
their graph shows it, on whichever stage they are made, and refused otherwise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.loss.autograd_nodes import (
    Factor,
    gradients_of,
    is_none,
    plain_name,
)
from boltmesh.strategies.pipeline.loss.log_rules import Key
from boltmesh.strategies.pipeline.loss.reduction import (
    BatchLossError,
    Form,
    Kind,
    OtherFormError,
    Place,
    Source,
    Term,
    find_form,
    read,
    source_of_branch,
    variables_behind,
)
from boltmesh.strategies.pipeline.loss.trial import (
    ATTEMPTS,
    MOST_ROWS,
    Attempt,
    Trial,
    TrialCut,
    TrialPart,
    narrowed,
    num_tried,
    run_cuts,
    run_row,
)
from boltmesh.strategies.pipeline.loss.weights import StepWeights
from boltmesh.strategies.pipeline.stage.trace import place_of
from boltmesh.strategies.pytree import tensors_in

LoggedOfRow = Callable[[int, Attempt], Mapping[Key, float]]

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-5}
_ROUGH = 5e-2
"""Tolerance of 16-bit dtypes."""


@dataclass
class LossProof:
    """A loss's form, and the runs that prove it."""

    form: Form
    cuts: list[TrialCut]


def prove(trial: Trial) -> LossProof | None:
    """Find the form of a step's loss and prove that its microbatches give the batch's loss.

    Args:
        trial: The end of the step.

    Returns:
        None if the step gave no loss for these rows, or none that is finite.

    Raises:
        ConfigError: No weights make the losses of microbatches add up to the batch's.
    """
    cause: Exception | None = None
    is_run = False
    zero: LossProof | None = None
    tried = _rows_to_try(trial)
    for attempt in ATTEMPTS:
        for number, numbers in enumerate(tried):
            try:
                cuts = run_cuts(trial, numbers, attempt)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - the step may refuse such values
                cause = cause or error
                break
            is_run = True
            proof = _proof(cuts, trial, attempt) if cuts else None
            if proof is not None and trial.largest(_is_zero(proof)):
                zero = zero or proof  # other rows may have a loss
            elif proof is not None:
                others = tried[number + 1 :]
                return replace(
                    proof,
                    cuts=[*proof.cuts, *_more_cuts(proof.form, trial, others, attempt)],
                )
    if cause is not None and not is_run:
        indices = "Indices that count over all rows of a batch name none of a few of them."
        raise BatchLossError(
            f"training_step's loss could not be tried on a few rows with made-up values, so "
            f"nothing proves that microbatches give the batch's loss: {type(cause).__name__}: "
            f"{cause} ({place_of(cause)}).{f' {indices}' if isinstance(cause, IndexError) else ''}"
        ) from cause
    return zero


def _rows_to_try(trial: Trial) -> list[Sequence[int]]:
    """Return rows to try a step on: the first, the last, extreme ones, the first repeatedly."""
    count = num_tried(trial)
    windows = [range(start, start + count) for start in sorted({0, trial.num_rows - count})]
    # A loss of pairs that belong together (rows of one class, say) is zero for rows without any.
    repeated = [number % (count // 2 + 1) for number in range(count)]
    return [*windows, *_unlike_rows(trial, count), repeated]


def _unlike_rows(trial: Trial, count: int) -> list[list[int]]:
    """Return the rows with the largest and the smallest values of the batch's tensors.

    Rows of smaller tensors come first: labels before inputs. A weight that a loss computes from
    the batch, such as that of rare positives, does not change the loss of rows that have none.
    Empty if all rows are tried anyway.
    """
    if trial.num_rows <= MOST_ROWS:
        return []
    chosen: dict[int, None] = {}
    for each in sorted(_values_of_rows(trial), key=torch.Tensor.numel):
        sums = each.flatten(1).double().nan_to_num().sum(1) if each.ndim > 1 else each.double()
        chosen |= dict.fromkeys((int(sums.argmax()), int(sums.argmin())))
    return [list(chosen)[:count]] if len(chosen) > 1 else []


MOST_ELEMENTS = 2**20
"""Larger tensors of a batch are not examined in each step."""


def kinds_of_rows(trial: Trial) -> set[tuple[int, bool]]:
    """Return which tensors of the batch have non-zero rows, and which have rows of zeros.

    Returns:
        Pairs of the tensor's number and True for a non-zero row, False for a row of zeros.
    """
    kinds = set()
    for number, each in enumerate(_values_of_rows(trial)):
        if each.numel() <= MOST_ELEMENTS:
            rows = each.flatten(1).any(1) if each.ndim > 1 else each != 0
            kinds |= {(number, bool(rows.any())), (number, bool(rows.all()))}
    return kinds


def _values_of_rows(trial: Trial) -> list[Tensor]:
    """Return the tensors of a batch of shape ``(B, *)``, real and not empty."""
    tensors = tensors_in(trial.rows(range(trial.num_rows)))
    return [
        each.detach()
        for each in tensors
        if each.ndim and len(each) == trial.num_rows and not each.is_complex() and each.numel()
    ]


def _is_zero(proof: LossProof) -> bool:
    """Whether the loss is 0 in all cuts, as one of pairs or triplets in a batch without any."""
    return not any(bool(each.whole.loss) for each in proof.cuts)


def _more_cuts(
    form: Form, trial: Trial, tried: Sequence[Sequence[int]], attempt: Attempt
) -> list[TrialCut]:
    """Prove the form on other rows too, whose logged values may distinguish sum and maximum."""
    proven: list[TrialCut] = []
    for numbers in tried:
        try:
            cuts = run_cuts(trial, numbers, attempt)
            compared = [_compare(form, each, trial) for each in cuts]  # which weighs their parts
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001, S112 - these rows prove nothing, others did
            continue
        proven += cuts if all(compared) else []
    return proven


def _distinguishing_cuts(form: Form, trial: Trial, count: int, attempt: Attempt) -> list[TrialCut]:
    """Run rows for which a doubtful divisor differs, among rows for which it does not."""
    rows = _rows_by(partial(_distinguishes, form, trial, attempt), range(trial.num_rows))
    if True not in rows:
        return []
    distinct = rows[True]
    other = rows.get(False, distinct)
    numbers = [distinct, distinct, other, distinct, other][:count]
    try:
        return run_cuts(trial, numbers, attempt)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - the step may refuse equal rows
        return []


def prove_empty(form: Form, trial: Trial, rows: Sequence[int], empty: Sequence[int]) -> bool:
    """Prove that rows with nothing to learn have weight 0 beside others.

    Args:
        form: Form of the loss.
        trial: The end of the step.
        rows: Rows of a microbatch with a loss.
        empty: Rows of a microbatch without one.

    Returns:
        Whether a part of the rows had nothing to learn, so that the proof is complete.

    Raises:
        ConfigError: They do count, as in a sum that is divided by all rows.
    """
    numbers = [rows[0], rows[len(rows) // 2], rows[-1], empty[0], empty[-1]]
    cuts = [cut for each in ATTEMPTS for cut in _more_cuts(form, trial, [numbers], each)]
    return any(not _is_differentiated(part) for cut in cuts for part in cut.parts)


def prove_key(
    form: Form, trial: Trial, key: Key, numbers: Sequence[int], logged: LoggedOfRow
) -> list[TrialCut]:
    """Run the step on two rows, each repeated, for which a logged value differs.

    Args:
        form: Form of the loss.
        trial: The end of the step.
        key: Key of the value.
        numbers: Rows to choose from, in this order.
        logged: Cached :func:`logged_of_row`: runs a row once for several keys.

    Returns:
        The runs; empty if all rows give the same value, or no loss.
    """
    for attempt in ATTEMPTS:
        rows = _rows_by(partial(_value, logged, key, attempt), numbers)
        if len(rows) == 1:
            return []
        if not rows:
            continue
        larger, other = (rows[each] for each in sorted(rows, key=abs, reverse=True))
        count = max(num_tried(trial), 3)
        # In one cut a part holds both rows, which distinguishes sum and maximum; in the other none.
        chosen = ([larger] * (count // 2 + 1) + [other] * count)[:count]
        cuts = _more_cuts(form, trial, [chosen], attempt)
        if cuts:
            return cuts
    return []


def logged_of_row(trial: Trial, row: int, attempt: Attempt) -> dict[Key, float]:
    """Return the logged values of a row, repeated several times; empty if it has no loss."""
    try:
        whole = run_row(trial, row, attempt)
    except Exception:  # noqa: BLE001 - the step may refuse such values
        whole = None
    logged = {} if whole is None else whole.outcome.logged
    return {key: float(each.value) for key, each in logged.items()}


def _value(logged: LoggedOfRow, key: Key, attempt: Attempt, row: int) -> float | None:
    return logged(row, attempt).get(key)


Label = TypeVar("Label")


def _rows_by(label: Callable[[int], Label | None], numbers: Sequence[int]) -> dict[Label, int]:
    """Return the first row of each of the first two labels; rows may have none."""
    rows: dict[Label, int] = {}
    for number in numbers:
        try:
            given = label(number)
        except Exception:  # noqa: BLE001, S112 - the step may refuse such values
            continue
        if given is not None:
            rows.setdefault(given, number)
        if len(rows) == 2:
            break
    return rows


def _distinguishes(form: Form, trial: Trial, attempt: Attempt, row: int) -> bool | None:
    whole = run_row(trial, row, attempt)
    if whole is None:
        return None
    try:
        read(whole.loss, form)
    except OtherFormError:
        return True
    return False


def _proof(cuts: list[TrialCut], trial: Trial, attempt: Attempt) -> LossProof | None:
    form = _form(cuts)
    if form is not None and form.doubtful:
        more = _distinguishing_cuts(form, trial, max(cuts[0].whole.count, 3), attempt)
        cuts = [*cuts, *more]
        form = _form(cuts) if more else form
    if form is None:
        return None
    compared = [each for each in cuts if _compare(form, each, trial)]
    return LossProof(form, compared) if compared else None


def _form(cuts: Sequence[TrialCut]) -> Form | None:
    whole = cuts[0].whole
    form = find_form(whole.loss, lambda node: _source(node, cuts[0], whole))
    constants = _constants(form, cuts)
    form.constants |= constants.keys()
    form.off = {place for place, factor in constants.items() if factor.is_zero}
    form.doubtful = {
        place: factor.divisor
        for place, factor in constants.items()
        if factor.may_be_count and factor.divisor <= 1 + 1e-6
    }
    for place, kinds in _kinds(form, cuts).items():
        if len(kinds) > 1:
            raise _disproved("is divided by what is a count for some rows only")
        if not kinds:
            return None
        form.kinds[place] = kinds.pop()
    return form


def _constants(form: Form, cuts: Sequence[TrialCut]) -> dict[Place, Factor]:
    """Return the factors that are independent of the number of rows, by place."""
    form.factors = {}
    _counts(form, cuts)
    collected, form.factors = form.factors, None
    return {
        place: factors[0]
        for place, factors in collected.items()
        if all(math.isclose(each.divisor, factors[0].divisor, rel_tol=1e-6) for each in factors)
    }


def _source(node: Node, cut: TrialCut, part: TrialPart) -> Source:
    pairs = list(zip(cut.live, part.values, strict=True))
    return source_of_branch(
        node,
        rows={id(tensor) for value, tensor in pairs if value.dim is not None},
        scalars={
            id(tensor) for value, tensor in pairs if value.dim is None and value.depends_on_batch
        },
    )


def _kinds(form: Form, cuts: Sequence[TrialCut]) -> dict[Place, set[Kind]]:
    """Return the possible kinds of each term; empty if all its counts are zero."""
    kinds: dict[Place, set[Kind]] = {}
    for place, counts in _counts(form, cuts).items():
        possible = kinds.setdefault(place, set())
        per_row = [count / part.count for part, term in counts for count in [float(term.count)]]
        if all(math.isclose(each, per_row[0], rel_tol=1e-5) for each in per_row):
            form.per_row[place] = per_row[0]
        for cut in cuts:
            terms = {
                id(part): term.counting(per_row[0] * part.count if place in form.per_row else None)
                for part, term in counts
            }
            whole = terms[id(cut.whole)]
            parts = [terms[id(each)] for each in cut.parts if id(each) in terms]
            values = [float(each.count) for each in parts]
            is_count = math.isclose(float(whole.count), sum(values), rel_tol=1e-5)
            is_constant = all(
                math.isclose(float(whole.count), each, rel_tol=1e-5) for each in values if each
            )
            if not (is_count and is_constant):
                possible.add(_kind(whole, cut, is_count=is_count, is_constant=is_constant))
    return kinds


def _counts(form: Form, cuts: Sequence[TrialCut]) -> dict[Place, list[tuple[TrialPart, Term]]]:
    """Return the terms of all parts, by place."""
    counts: dict[Place, list[tuple[TrialPart, Term]]] = {}
    for cut in cuts:
        for part in (cut.whole, *cut.parts):
            if _is_differentiated(part):
                for term in _read(part, form):
                    counts.setdefault(term.place, []).append((part, term))
    return counts


def _is_differentiated(part: TrialPart) -> bool:
    return part.outcome.loss is not None and not is_none(part.outcome.loss)


def _read(part: TrialPart, form: Form) -> list[Term]:
    try:
        return read(part.loss, form)
    except OtherFormError as error:
        raise _disproved(
            f"has another form for {part.count} rows than for more ({error})"
        ) from None


def _kind(term: Term, cut: TrialCut, *, is_count: bool, is_constant: bool) -> Kind:
    source = _source(term.end, cut, cut.whole)
    if not source.rows and is_constant:
        return "received" if source.scalars else "penalty"
    if is_count:
        return "mean"
    if is_constant:
        return "sum"
    raise _disproved(
        f"divides {term.operator or plain_name(term.end)} by something that is neither a count "
        f"of rows nor a constant ({float(term.count):g} for {cut.whole.count} rows)"
    )


def _compare(form: Form, cut: TrialCut, trial: Trial) -> bool:
    """Weight the parts as microbatches and compare them with the whole.

    Returns:
        Whether the parts had a total weight and finite gradients to compare.

    Raises:
        ConfigError: They differ.
    """
    weights = StepWeights(lambda loss: (form, read(loss, form)))
    leaves = _trained(cut.whole.loss)
    wanted = gradients_of(cut.whole.loss, [*cut.whole.values, *leaves])
    made = [torch.zeros_like(each, dtype=torch.float64) for each in [*cut.whole.values, *leaves]]
    whole = float(cut.whole.loss.detach())
    loss, losses = 0.0, [abs(whole)]
    for number, part in enumerate(cut.parts):
        if part.outcome.loss is None:
            continue
        scaled, cut.weights[number] = weights.weigh(part.loss, part.count)
        loss += float(scaled.detach())
        losses.append(abs(float(part.loss.detach())))
        for index, each in enumerate(gradients_of(scaled, [*part.values, *leaves])):
            if each is None:
                continue
            into = made[index]
            if index < len(cut.live):
                dim, rows = cut.live[index].dim, cut.whole.count
                into = narrowed(into, dim, each.shape, part.start, part.count, rows)
            into += each
    total = float(weights.total)
    pairs = [
        (torch.zeros_like(other) if one is None else one.double(), other / total)
        for one, other in zip(wanted, made, strict=True)
        if other.numel()
    ]
    largest = trial.largest(max((float(one.abs().max()) for one, _ in pairs), default=0.0))
    if total == 0 or not math.isfinite(largest):
        return False
    differences = (float((one - other).abs().max()) for one, other in pairs)
    difference = trial.largest(max(differences, default=0.0))
    tolerance = _TOLERANCES.get(cut.whole.loss.dtype, _ROUGH)
    sizes = " and ".join(str(each.count) for each in cut.parts)
    scale = max(each for each in losses if math.isfinite(each))
    if not abs(loss / total - whole) <= tolerance * scale:
        raise _disproved(
            f"is {whole:g} for {cut.whole.count} rows and {loss / total:g} for "
            f"the same rows in microbatches of {sizes}"
        )
    if not difference <= tolerance * largest:
        raise _disproved(
            f"has gradients for {cut.whole.count} rows that differ by "
            f"{difference / max(largest, 1e-300):.1%} from those of the same rows in "
            f"microbatches of {sizes}"
        )
    return True


def _trained(loss: Tensor) -> list[Tensor]:
    """Return the parameters that the end of the step itself uses."""
    behind = variables_behind(loss.grad_fn)
    return list({id(each): each for each in behind if isinstance(each, Parameter)}.values())


def _disproved(what: str) -> BatchLossError:
    return BatchLossError(
        f"The loss of training_step {what}, so it is neither a mean nor a sum over rows, and no "
        f"weights put it together from microbatches.",
        ", or such a mean or sum",
    )

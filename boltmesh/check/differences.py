"""Results of two runs, and where they differ first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override


@dataclass
class Trace:
    """Results of a run. Equal on every rank."""

    losses: list[float] = field(default_factory=list)
    """Per optimizer step: the mean over its batches and ranks."""
    gradient_norms: list[list[float]] = field(default_factory=list)
    """Per call of an optimizer, before clipping: the norm on every rank."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Per optimizer step: the logged values, each the mean over its batches and ranks."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    predictions: list[Tensor] = field(default_factory=list)
    """Per batch, the floating-point part. Whole numbers were picked or drawn by comparing floats,
    and rounding may tip such a choice in a right layout too."""
    disagreement: str | None = None
    """The first parameter that ranks should hold equally and do not, if any."""


@dataclass(frozen=True)
class Tolerance:
    """Tolerances between two runs. The order of fp32 sums explains the defaults."""

    relative: float = 2e-5
    """Tolerance for losses, gradient norms, metrics and predictions."""
    parameters: float = 1e-4
    """Absolute. Adam divides by the gradient's own size, and so amplifies the rounding of
    gradients that are zero in truth (a bias before a norm, say) up to the learning rate."""
    optimizer: float = 1e-4
    """Tolerance for each state tensor, relative to its largest element."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same."""

    what: str
    reference: float
    layout: float

    @override
    def __str__(self) -> str:
        apart = abs(self.layout - self.reference)
        return (
            f"{self.what}: one process has {self.reference:.8g}, the layout has "
            f"{self.layout:.8g}, {apart:.2g} apart"
        )


def find_differences(
    reference: Trace, layout: Trace, tolerance: Tolerance | None = None
) -> list[Difference]:
    """All differences, the earliest first; empty if the runs are equal."""
    tolerance = tolerance or Tolerance()
    return list(_differences(reference, layout, tolerance))


def _differences(reference: Trace, layout: Trace, tolerance: Tolerance) -> Iterator[Difference]:
    rtol = tolerance.relative
    steps = (len(reference.losses), len(layout.losses))
    if steps[0] != steps[1]:
        yield Difference("number of optimizer steps", *map(float, steps))
        return
    norms = (
        _per_step(reference.gradient_norms, steps[0]),
        _per_step(layout.gradient_norms, steps[0]),
    )
    for step in range(steps[0]):
        yield from _scalar(
            f"loss of step {step}", reference.losses[step], layout.losses[step], rtol
        )
        pairs = zip(norms[0][step], norms[1][step], strict=False)
        for number, (one, ranks) in enumerate(pairs):
            which = f"gradient norm {number + 1}" if number else "gradient norm"
            if len(set(ranks)) == 1:
                yield from _scalar(f"{which} of step {step}", one[0], ranks[0], rtol)
                continue
            for rank, norm in enumerate(ranks):
                yield from _scalar(f"{which} of step {step} on rank {rank}", one[0], norm, rtol)
        yield from _mapping(
            f"metric {{}} of step {step}", reference.metrics[step], layout.metrics[step], rtol
        )
    if layout.disagreement is not None:
        yield Difference(layout.disagreement, 0.0, math.nan)
    yield from _tensors("parameter", reference.parameters, layout.parameters, tolerance.parameters)
    scale = {
        name: max(1e-12, state.abs().max().item())
        for name, state in reference.optimizer_state.items()
        if state.numel()
    }
    yield from _tensors(
        "optimizer state",
        {name: state / scale.get(name, 1.0) for name, state in reference.optimizer_state.items()},
        {name: state / scale.get(name, 1.0) for name, state in layout.optimizer_state.items()},
        tolerance.optimizer,
    )
    yield from _mapping("validation metric {}", reference.validation, layout.validation, rtol)
    yield from _tensors(
        "prediction of batch",
        {str(number): each for number, each in enumerate(reference.predictions)},
        {str(number): each for number, each in enumerate(layout.predictions)},
        10 * rtol,
    )


def _per_step(norms: list[list[float]], steps: int) -> list[list[list[float]]]:
    """Norms by step: a manual optimisation may call several optimizers in one."""
    calls = len(norms) // steps if steps else 0
    return [norms[step * calls : (step + 1) * calls] for step in range(steps)]


def _scalar(what: str, one: float, other: float, rtol: float) -> Iterator[Difference]:
    same_nan = math.isnan(one) and math.isnan(other)
    if not same_nan and not math.isclose(one, other, rel_tol=rtol, abs_tol=rtol):
        yield Difference(what, one, other)


def _mapping(
    what: str, one: dict[str, float], other: dict[str, float], rtol: float
) -> Iterator[Difference]:
    for name in sorted(one.keys() | other.keys()):
        pair = one.get(name, math.nan), other.get(name, math.nan)
        yield from _scalar(what.format(repr(name)), *pair, rtol)


def _tensors(
    what: str, one: dict[str, Tensor], other: dict[str, Tensor], atol: float
) -> Iterator[Difference]:
    for name in [*one, *(name for name in other if name not in one)]:
        here, there = one.get(name), other.get(name)
        if here is None or there is None or here.shape != there.shape:
            sizes = [math.nan if each is None else float(each.numel()) for each in (here, there)]
            yield Difference(f"number of elements of {what} {name!r}", *sizes)
            continue
        apart = (here.double() - there.double()).abs().flatten()
        if apart.numel() and not bool(apart.max() <= atol):
            at = int(apart.nan_to_num(nan=math.inf).argmax())
            element = f" at element {at}" if apart.numel() > 1 else ""
            values = (each.double().flatten()[at].item() for each in (here, there))
            yield Difference(f"{what} {name!r}{element}", *values)

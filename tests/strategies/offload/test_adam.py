"""The fused step is torch's; a corrected or undone one is what it should have been."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.update_rule import (
    AdamRule,
    AdamRun,
    AdamSettings,
    ChunkStep,
    PieceGradient,
    Update,
)

NUMEL = 1 << 14
SETTINGS = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, True, False, False)


def gradient_sizes() -> Tensor:
    """Over five orders of magnitude: the second moment differs as much."""
    return torch.exp(2 * torch.randn(NUMEL)) * 1e-3


def trained(steps: int, settings: AdamSettings = SETTINGS) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    state = [torch.randn(NUMEL) * 0.02, torch.zeros(NUMEL), torch.zeros(NUMEL)]
    sizes = gradient_sizes()
    for step in range(1, steps + 1):
        AdamRun(settings, (tuple(state),), (torch.randn(NUMEL) * sizes,), (step,)).apply()
    return state, torch.randn(NUMEL) * sizes


def relative_error(step: int, coefficient: float, settings: AdamSettings = SETTINGS) -> float:
    """Of a corrected step against one that knew it, as a part of the largest update."""
    state, gradient = trained(step - 1, settings)
    known = [each.clone() for each in state]
    before = state[0].clone()
    run = AdamRun(settings, (tuple(state),), (gradient,), (step,))
    run.apply()
    run.correct(coefficient)
    AdamRun(settings, (tuple(known),), (gradient * coefficient,), (step,)).apply()
    shrunk = before * (1 - settings.lr * settings.weight_decay)
    return float((state[0] - known[0]).abs().max() / (known[0] - shrunk).abs().max())


@pytest.mark.parametrize("coefficient", [0.9, 0.3, 0.1, 0.03, 0.01, 0.001])
def test_from_the_tenth_step_on_a_correction_is_right_to_rounding(coefficient: float) -> None:
    for step in (10, 100):
        # 7e-6 is what rounding of the parameter leaves; it was measured for each coefficient.
        assert relative_error(step, coefficient) < 1.2e-5


def test_early_corrections_lose_digits_which_is_why_there_is_a_warm_up() -> None:
    assert relative_error(1, 0.9) < 2e-5
    assert 1e-2 < relative_error(1, 0.001) < 0.5


def test_a_correction_is_right_when_maximizing() -> None:
    maximizing = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, True, False, True)
    assert relative_error(12, 0.2, maximizing) < 1.2e-5


def test_moments_are_corrected_as_well() -> None:
    state, gradient = trained(11)
    known = [each.clone() for each in state]
    run = AdamRun(SETTINGS, (tuple(state),), (gradient,), (12,))
    run.apply()
    run.correct(0.1)
    AdamRun(SETTINGS, (tuple(known),), (gradient * 0.1,), (12,)).apply()
    torch.testing.assert_close(state[1], known[1], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(state[2], known[2], rtol=1e-4, atol=1e-12)
    assert float(state[2].min()) >= 0


@pytest.mark.parametrize("is_maximizing", [False, True])
def test_an_undone_step_leaves_what_was_before(is_maximizing: bool) -> None:
    settings = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.1, True, False, is_maximizing)
    state, gradient = trained(11, settings)
    before = [each.clone() for each in state]
    run = AdamRun(settings, (tuple(state),), (gradient,), (12,))
    run.apply()
    assert not torch.equal(state[0], before[0])
    run.undo()
    for after, was in zip(state, before, strict=True):
        torch.testing.assert_close(after, was, rtol=2e-5, atol=1e-9)


def test_a_norm_that_is_not_finite_spoils_a_correction_as_it_spoils_a_step() -> None:
    state, gradient = trained(11)
    run = AdamRun(SETTINGS, (tuple(state),), (gradient,), (12,))
    run.apply()
    run.correct(float("nan"))
    assert all(bool(each.isnan().all()) for each in state)


def step_in_parts(
    optimizer: Adam, sizes: list[int], values: Mapping[str, Tensor], steps: int, chunk: int
) -> Tensor:
    """Run the rule on a bucket cut into chunks of ``chunk`` elements."""
    rule = AdamRule(optimizer)
    group = optimizer.param_groups[0]
    slots = [
        Slot(i, str(i), Parameter(torch.zeros(())), (size,), (size,), torch.float32)
        for i, size in enumerate(sizes)
    ]
    bucket = Bucket("", slots)
    bucket.cut(0, chunk)
    state = [values["start"].clone()] + [torch.zeros(bucket.numel) for _ in rule.state_names]
    for step in range(1, steps + 1):
        gradient = values[f"gradient {step}"].clone()
        updates = {slot: Update(rule.settings(group), step) for slot in slots}
        for each in bucket.chunks:
            pieces = [PieceGradient(p, gradient[p.start : p.stop]) for p in each.pieces()]
            part = tuple(tensor[each.start : each.stop] for tensor in state)
            rule.apply(ChunkStep(part, each.start, pieces, updates), 1.0)
    return state[0]


OPTIONS: list[tuple[type[Adam], dict[str, Any]]] = [
    (AdamW, {}),
    (AdamW, {"amsgrad": True}),
    (AdamW, {"maximize": True, "betas": (0.8, 0.9), "eps": 1e-4}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.1}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (AdamW, {"lr": torch.tensor(0.02)}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_steps_in_parts_equal_torch_to_the_bit(kind: type[Adam], options: dict[str, Any]) -> None:
    sizes, steps = [64, 192, 32], 6  # whole vectors: the kernel rounds a rest in another way
    torch.manual_seed(1)
    values = {"start": torch.randn(sum(sizes))}
    values |= {f"gradient {k}": torch.randn(sum(sizes)) for k in range(1, steps + 1)}
    whole = Parameter(values["start"].clone())
    reference = kind([whole], **{"lr": 0.01, "fused": True, **options})
    for step in range(1, steps + 1):
        whole.grad = values[f"gradient {step}"].clone()
        reference.step()
    ours = kind([Parameter(torch.zeros(1))], **{"lr": 0.01, **options})
    for chunk in (1000, 96):
        assert torch.equal(step_in_parts(ours, sizes, values, steps, chunk), whole.detach())


def test_a_differentiable_optimizer_is_refused() -> None:
    rule = AdamRule(AdamW([Parameter(torch.zeros(1))], differentiable=True))
    with pytest.raises(ConfigError, match="differentiable=True"):
        rule.settings({"differentiable": True})


def test_a_class_derived_from_adam_is_not_taken_for_it() -> None:
    class Other(AdamW):
        pass

    assert AdamRule.fits(AdamW([Parameter(torch.zeros(1))]))
    assert not AdamRule.fits(Other([Parameter(torch.zeros(1))]))

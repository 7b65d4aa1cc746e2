"""Optimizers that treat each element by itself run in parts; others are refused by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.update_rule import (
    ChunkStep,
    ElementwiseRule,
    PieceGradient,
    Update,
)

STEPS = 5
SHAPES = [(7, 3), (11,), (2, 5)]
CHUNK = 8


class SignDescent(Optimizer):
    """What a user might write."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    seen = state.setdefault("seen", torch.zeros_like(parameter))
                    seen.mul_(0.5).add_(parameter.grad)
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(seen.sign(), alpha=group["lr"] / state["count"])


class OwnScale(SignDescent):
    """Has a setting as an attribute, as ``lion_pytorch`` does."""

    def __init__(self, parameters: Any, lr: float = 0.1, *, counts: bool = False) -> None:
        super().__init__(parameters, lr)
        self.scale, self.step_by, self.num_steps = 0.5, int(counts), 0

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += self.step_by
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=self.scale * self.param_groups[0]["lr"])


class Around(SGD):
    """Steps another optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.inner = SGD(self.param_groups, lr=lr)

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class RowDescent(SignDescent):
    """Looks at a row at a time."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sum(dim=-1, keepdim=True), alpha=group["lr"])


class Counting(Optimizer):
    """Counts its steps in its groups, as Adan of timm does."""

    def __init__(self, parameters: Any, lr: float | Tensor = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.9).add_(parameter.grad, alpha=0.1)
                    parameter.sub_(mean * group["lr"] / (1 - 0.9 ** group["step"]))
        return loss


class CountingInPlace(Counting):
    """Counts in a tensor."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("step", torch.tensor(0.0)).add_(1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] / group["step"])


class Norming(Counting):
    """Writes the largest gradient that it has seen into its groups, and steps without it."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    most = float(parameter.grad.abs().max())
                    group["most"] = max(group.get("most", 0.0), most)
                    parameter.sub_(parameter.grad, alpha=group["lr"])


OPTIMIZERS: list[tuple[Callable[..., Optimizer], dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (RMSprop, {"momentum": 0.5, "centered": True}),
    (Adagrad, {"initial_accumulator_value": 0.3}),
    (Adadelta, {}),
    (Adamax, {}),
    (NAdam, {}),
    (RAdam, {}),
    (Rprop, {}),
    (ASGD, {}),
    (SignDescent, {}),
    (OwnScale, {}),
    (Counting, {}),
    (CountingInPlace, {}),
]


def run_in_parts(
    optimizer: Optimizer, start: list[Tensor], gradients: list[list[Tensor]]
) -> Tensor:
    rule = ElementwiseRule(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    slots = [
        Slot(i, str(i), p, tuple(p.shape), tuple(p.shape), torch.float32)
        for i, p in enumerate(parameters)
    ]
    bucket = Bucket("", slots)
    bucket.cut(0, CHUNK)
    assert len(bucket.chunks) > len(slots)
    state = [torch.cat([each.flatten() for each in start])]
    state += [torch.zeros(bucket.numel) for _ in rule.state_names]
    for slot in slots:  # what was there before the first step, as Adagrad's sums are
        if existing := optimizer.state.get(slot.parameter):
            for name, flat in zip(rule.state_names, state[1:], strict=True):
                flat[slot.offset : slot.offset + slot.numel] = existing[name].flatten()
            rest = {k: v for k, v in existing.items() if k not in rule.state_names}
            starts = [p.start for c in bucket.chunks for p in c.pieces() if p.slot is slot]
            rule.load_scalars(slot, rest, starts)
    for step, of_step in enumerate(gradients, start=1):
        flat = torch.cat([each.flatten() for each in of_step])
        settings = rule.settings(optimizer.param_groups[0])
        updates = {slot: Update(settings, step) for slot in slots}
        rule.advance(optimizer.param_groups)  # before the worker steps
        for chunk in bucket.chunks:
            pieces = [PieceGradient(p, flat[p.start : p.stop].clone()) for p in chunk.pieces()]
            part = tuple(each[chunk.start : chunk.stop] for each in state)
            rule.apply(ChunkStep(part, chunk.start, pieces, updates), 1.0)
    return state[0]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_steps_in_parts_equal_steps_in_one(
    kind: Callable[..., Optimizer], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(STEPS)]
    whole = [Parameter(each.clone()) for each in start]
    reference = kind(whole, lr=0.05, **options)
    for of_step in gradients:
        for parameter, gradient in zip(whole, of_step, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
    ours = kind([Parameter(each.clone()) for each in start], lr=0.05, **options)
    stepped = run_in_parts(ours, start, gradients)
    assert [each.get("step") for each in (*ours.param_groups, *reference.param_groups)] in (
        [None, None],
        [STEPS, STEPS],
    )
    expected = torch.cat([each.detach().flatten() for each in whole])
    torch.testing.assert_close(stepped, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(expected, torch.cat([each.flatten() for each in start]))


@pytest.mark.parametrize("kind", [Adafactor, RowDescent, torch.optim.LBFGS])
def test_what_looks_at_more_than_one_element_is_refused_by_name(kind: type[Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot be offloaded"):
        ElementwiseRule(kind([Parameter(torch.zeros(3, 3))], lr=0.1))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Around, "it steps another optimizer"),
        (partial(OwnScale, counts=True), "it counts steps in an attribute"),
    ],
)
def test_what_a_step_of_a_part_would_change_is_refused(kind: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ElementwiseRule(kind([Parameter(torch.zeros(3, 3))], lr=0.1))


def test_what_writes_gradients_into_its_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="writes what it finds in gradients into its groups"):
        ElementwiseRule(Norming([Parameter(torch.zeros(3, 3))]))


def test_a_learning_rate_that_is_written_behind_a_step_is_that_of_the_next() -> None:
    rate = torch.tensor(0.5)
    optimizer = SGD([Parameter(torch.zeros(3))], lr=rate)
    (group,) = optimizer.param_groups
    rule = ElementwiseRule(optimizer)
    before = rule.settings(group)
    rate.fill_(0.25)
    assert float(before["lr"]) == 0.5
    assert before != rule.settings(group)
    rule.advance(optimizer.param_groups)
    assert group["lr"] is rate


def test_trying_an_optimizer_leaves_it_as_it_was() -> None:
    parameter = Parameter(torch.ones(3))
    optimizer = AdamW([parameter], lr=0.1)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    ElementwiseRule(optimizer)
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert calls == []

"""Runs the stages of a step one after another in one process, each on a copy of its own.

What a copy's stage does not use is absent from it: a use all the same shows as NaN.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from boltmesh.strategies.pipeline.partition.choose import units_in_call_order
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.strategies.pipeline.stage.units import find_stage_units, make_absent


def split_evenly(root: Module, step: str, args: tuple[Any, ...], stages: int) -> dict[str, int]:
    """As many units on every stage as on the others, in the order in which the step calls them."""
    units = find_stage_units(root)
    names = [each.name for each in units_in_call_order(trace_step(root, units, step, args), units)]
    return {name: i * stages // len(names) for i, name in enumerate(names)}


@dataclass
class Ran:
    """What a run of all stages gave."""

    result: Any
    boundaries: list[tuple[Tensor, ...]]
    specs: list[tuple[ValueSpec, ...]]


class Staged:
    """A model cut into stages, each of which has a copy of its own."""

    def __init__(
        self,
        module: Module,
        batches: Sequence[Any],
        split: dict[str, int],
        step: str = "training_step",
        *,
        seed: int | None = None,
    ) -> None:
        self.step = step
        self.seed = seed
        self.count = max(split.values()) + 1
        self.copies = [copy.deepcopy(module) for _ in range(self.count)]
        self.used: list[set[str]] = [set() for _ in range(self.count)]
        whole = StagePlans(module, find_stage_units(module), split)
        for batch in batches:
            for used, run in zip(self.used, whole.stages(step, batch, 0, seed=seed), strict=True):
                used |= run.plan.parameters
        for module_copy, used in zip(self.copies, self.used, strict=True):
            named = module_copy.named_parameters()
            make_absent(parameter for name, parameter in named if name not in used)
        # A second time, as a new signature is met in the middle of training.
        self.plans = [StagePlans(each, find_stage_units(each), split) for each in self.copies]

    def forward(self, batch: Any) -> Ran:
        """All stages, and no backward."""
        boundaries: list[tuple[Tensor, ...]] = []
        specs: list[tuple[ValueSpec, ...]] = []
        self.inputs: list[tuple[Tensor, ...]] = []
        received: tuple[Tensor, ...] = ()
        for stage, plans in enumerate(self.plans):
            run = plans.stages(self.step, batch, 0, seed=self.seed)[stage]
            self.inputs.append(received)
            result = run.forward(received, (batch, 0), seed=self.seed)
            if stage == self.count - 1:
                return Ran(result, boundaries, specs)
            for tensor, spec in zip(result, run.plan.values_out, strict=True):
                assert (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) == (
                    spec.shape,
                    spec.dtype,
                    spec.needs_grad,
                ), spec
            assert torch.is_grad_enabled() or not any(each.requires_grad for each in result)
            boundaries.append(result)
            specs.append(run.plan.values_out)
            received = tuple(each.detach().clone() for each in result)
        raise AssertionError

    def train(self, batch: Any) -> Any:
        """One batch forward through all stages and back; what the step returns."""
        ran = self.forward(batch)
        loss = ran.result["loss"] if isinstance(ran.result, dict) else ran.result
        loss.backward()
        for boundary, inputs in zip(reversed(ran.boundaries), reversed(self.inputs), strict=False):
            pairs = [
                (out, into) for out, into in zip(boundary, inputs, strict=True) if out.requires_grad
            ]
            grads = [
                torch.zeros_like(into) if into.grad is None else into.grad for _, into in pairs
            ]
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], grads)
        return ran.result

    def gradient(self, name: str) -> Tensor | None:
        """The sum of a parameter's gradients over the stages that use it."""
        found = [module_copy.get_parameter(name).grad for module_copy in self.copies]
        present = [each for each in found if each is not None]
        return sum(present[1:], present[0]) if present else None


def check_parity(
    module: Module,
    batches: Sequence[Any],
    stages: int = 3,
    split: dict[str, int] | None = None,
    *,
    tolerance: float = 1e-6,
    seed: int | None = None,
) -> Staged:
    """Train on batches with and without stages; losses and all gradients have to be equal."""
    split = split or split_evenly(module, "training_step", (batches[0], 0), stages)
    plain: Any = copy.deepcopy(module)
    staged = Staged(module, batches, split, seed=seed)
    for batch in batches:
        wanted = plain.training_step(batch, 0)
        wanted_loss = wanted["loss"] if isinstance(wanted, dict) else wanted
        wanted_loss.backward()
        got = staged.train(batch)
        got_loss = got["loss"] if isinstance(got, dict) else got
        torch.testing.assert_close(got_loss, wanted_loss, rtol=tolerance, atol=1e-8)
    for name, parameter in plain.named_parameters():
        assert_same_gradient(name, staged.gradient(name), parameter.grad, tolerance)
    return staged


def assert_same_gradient(
    name: str, got: Tensor | None, wanted: Tensor | None, tolerance: float
) -> None:
    if wanted is None or not wanted.any():
        assert got is None or not got.any(), name
        return
    assert got is not None, name
    difference = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert difference <= tolerance, f"{name}: {difference:.2e}"

"""Refuses layers that mix rows, whose outputs for microbatches differ from those for the batch."""

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.dry_run.metrics import find_metrics
from boltmesh.strategies.dry_run.no_side_effects import (
    ParametersUnchanged,
    modules_unchanged,
    no_side_effects,
)
from boltmesh.strategies.pipeline.loss.reduction import BatchLossError
from boltmesh.strategies.pipeline.loss.weights import StepWeights
from boltmesh.strategies.pipeline.merge import NoJoints, find_joints, join
from boltmesh.strategies.pipeline.microbatch import PAIR, Rows, batch_norms, pick
from boltmesh.strategies.pipeline.microbatch_runs import Around, MicrobatchRun
from boltmesh.strategies.pipeline.options import WHOLE_BATCH
from boltmesh.strategies.pipeline.stage.cut import StagePlan
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.rng import host_random_kept
from boltmesh.strategies.pipeline.stage.stage_run import StageRun
from boltmesh.strategies.pipeline.stage.trace import TensorSpec
from boltmesh.strategies.pytree import take_apart
from boltmesh.strategies.torch_compat.tensors import is_equal


class RowCheck:
    """Refuses layers whose output for a row of a batch depends on other rows.

    Each stage runs its layers twice, without gradients, on the rows of its first microbatch (of the
    first two if they have one row each): unchanged, and with copies of the first row in place of
    the second half. Shapes and random numbers are equal, so the outputs of the first half have to
    be equal too. A scalar of a layer has to be a mean or a sum over both halves, each beside other
    rows. Effects on other rows through buffers (moments of batch norms, codebooks) are allowed:
    buffers change once for each microbatch. Effects through parameters (ActNorm) are refused.

    Args:
        plans: Stages of the model.
        run: The first batch of a run, in several microbatches.
        rows: Rows of that batch.
    """

    def __init__(self, plans: StagePlans, run: MicrobatchRun, rows: Rows) -> None:
        self._plans = plans
        self._run = run
        self._rows = rows
        self._end = max(plans.stage_of_unit.values())
        self._received: dict[int, list[tuple[Tensor, ...]]] = {}

    def see(self, stage: int, number: int, received: tuple[Tensor, ...], around: Around) -> None:
        """Check a stage before it computes a microbatch.

        Args:
            stage: A stage of this rank.
            number: Number of the microbatch; microbatches come in order.
            received: Inputs of the stage, of the shapes of its ``values_in``; they are copied.
            around: The precision context.

        Raises:
            ConfigError: A layer mixes rows.
        """
        sizes = self._run.sizes
        if sum(sizes[:number]) >= PAIR:
            return
        known = self._received.setdefault(stage, [])
        known.append(tuple(each.detach().clone() for each in received))
        if sum(sizes[: number + 1]) < PAIR:
            return
        module: Any = self._plans.root
        with ExitStack() as stack:
            stack.enter_context(around())
            stack.enter_context(torch.no_grad())
            stack.enter_context(host_random_kept())
            stack.enter_context(modules_unchanged(module.modules()))
            stack.enter_context(no_side_effects(module, find_metrics(module)))
            stack.enter_context(self._plans.writes.left_out())
            writes = stack.enter_context(ParametersUnchanged(module))
            for each in batch_norms(module):
                each.training = False
            try:
                mixed = self._mixed(stage, self._received.pop(stage), writes)
            except Exception:  # noqa: BLE001 - layers may refuse such rows, which proves nothing
                mixed = None
        if mixed is not None:
            raise ConfigError(
                f"For a row of a batch, {mixed} depends on other rows, and each microbatch of a "
                f"pipeline has some rows alone. Use microbatches=1, or do it behind the last "
                f"layer, where schedule={WHOLE_BATCH!r} joins the microbatches."
            )

    def _mixed(
        self, stage: int, received: Sequence[tuple[Tensor, ...]], writes: ParametersUnchanged
    ) -> str | None:
        """Return a description of an output that depends on other rows; None also if unknown."""
        run, whole = self._run, self._stage(stage, self._run.batch).plan
        parts = [self._stage(stage, each).plan for each in run.parts]
        joints = find_joints(whole, parts, run.sizes)
        if isinstance(joints, NoJoints):
            return None
        values, count = join(received, joints, whole.values_in), sum(run.sizes[: len(received)])
        kept = count - count // 2
        numbers = [*range(kept), *[0] * (count - kept)]
        others = _chosen(values, joints, numbers)
        buffers = [(each, each.detach().clone()) for each in self._plans.root.buffers()]
        outputs, set_once = self._outputs(stage, range(count), values), writes.changed()
        if any(not is_equal(each, value) for each, value in buffers):
            return self._written(set_once)
        pairs = zip(outputs, self._outputs(stage, numbers, others), strict=True)
        set_twice = writes.changed().items()
        if of_rows := {p: v for p, v in set_twice if not _are_close(v, set_once.get(p, p))}:
            return self._written(of_rows)
        shapes = zip(_shapes(whole, stage), _shapes(parts[0], stage), strict=True)
        for ((name, one), (_, other)), (large, small) in zip(pairs, shapes, strict=True):
            dims = [dim for dim, size in enumerate(large) if size != small[dim]]
            if len(dims) == 1 and one.is_floating_point() and one.shape[dims[0]] % count == 0:
                first = (_of_rows(each, dims[0], count, kept) for each in (one, other))
                if not any(_are_close(*each) for each in zip(*first, strict=True)):
                    return name
        if () in _shapes(whole, stage):
            return self._mixed_scalar(stage, partial(_chosen, values, joints), count, kept)
        return None

    def _mixed_scalar(
        self, stage: int, chosen: Callable[[Sequence[int]], list[Tensor]], count: int, kept: int
    ) -> str | None:
        """Return a scalar that, weighted as in a loss, is no sum over two halves of the rows."""
        halves = ([*range(kept)], [count - 1] * kept), ([*range(kept, count)], [0] * (count - kept))
        with torch.enable_grad():
            runs = [
                [
                    (name, _weighed(each, count))
                    for name, each in self._outputs(stage, numbers, chosen(numbers))
                    if isinstance(each, Tensor) and each.ndim == 0 and each.grad_fn is not None
                ]
                for numbers in ([*one, *other] for one, other in product(*halves))
            ]
        for outputs in zip(*runs, strict=True):
            weighed = [value for _, value in outputs if value is not None]
            if len(weighed) == len(outputs):
                both, one, other, neither = weighed
                if not _are_close(both + neither, one + other):
                    name: str = outputs[0][0]
                    return name
        return None

    def _written(self, parameters: Container[Tensor]) -> str | None:
        named = self._plans.root.named_parameters()
        return next((f"what a layer writes to {n!r}" for n, p in named if p in parameters), None)

    def _stage(self, stage: int, batch: Any) -> StageRun:
        run, plans = self._run, self._plans
        args = (run.step, batch, *run.rest)
        with torch.enable_grad(), plans.trying():  # as for the batch: plans are kept by it
            if stage == self._end:  # up to its last unit
                return plans.tail(*args, kwargs=run.kwargs, seed=run.seeds[0]).last
            return plans.stages(*args, kwargs=run.kwargs, seed=run.seeds[0])[stage]

    def _outputs(
        self, stage: int, numbers: Sequence[int], values: Sequence[Tensor]
    ) -> list[tuple[str, Any]]:
        """Return the outputs of a stage and of its units for some rows, by description."""
        run = self._run
        part = pick(run.batch, self._rows, numbers)
        planned = self._stage(stage, part)
        plan = planned.plan
        names = {plan.trace.events[event].name for event in _unit_events(plan, stage)}
        outputs: list[tuple[str, Any]] = []

        def keep(name: str, module: Any, args: Any, output: Any) -> None:
            outputs.extend((f"the output of {name!r}", each) for each in take_apart(output)[0])

        with ExitStack() as stack:
            for name in sorted(names):
                stack.enter_context(planned.units[name].register_forward_hook(partial(keep, name)))
            given = tuple(each.clone() for each in values)
            sent = planned.forward(given, (part, *run.rest), run.kwargs, seed=run.seeds[0])
        return outputs + [
            (spec.origin, each) for spec, each in zip(plan.values_out, sent, strict=True)
        ]


def _unit_events(plan: StagePlan, stage: int) -> list[int]:
    """Return the calls of units that a stage runs, without one that ends it: hooks miss it."""
    calls = zip(plan.trace.unit_events(), plan.stage_of_call, strict=True)
    ends = {event for event, planned in plan.handling.items() if planned.ends}
    return [event for event, at in calls if at == stage and event not in ends]


def _shapes(plan: StagePlan, stage: int) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs of a stage and of its units; ``()`` for no tensor."""
    outputs = [plan.trace.outputs[event] for event in _unit_events(plan, stage)]
    leaves = [leaf for output in outputs for leaf in output.leaves]
    made = [each.shape if isinstance(each, TensorSpec) else () for each in leaves]
    return made + [each.shape for each in plan.values_out]


def _weighed(scalar: Tensor, rows: int) -> Tensor | None:
    """Return a scalar multiplied by its weight; None without one, which a loss refuses."""
    try:
        return StepWeights(lambda _: None).weigh(scalar, rows)[0].detach()
    except BatchLossError:
        return None


def _chosen(
    values: Sequence[Tensor], dims: Sequence[int | None], numbers: Sequence[int]
) -> list[Tensor]:
    """Return some rows of each value, and values without rows as they are."""
    return [
        each if dim is None else each.index_select(dim, torch.tensor(numbers).to(each.device))
        for each, dim in zip(values, dims, strict=True)
    ]


def _of_rows(output: Tensor, dim: int, count: int, kept: int) -> list[Tensor]:
    """Return the first rows of an output, if a row's elements are adjacent, or in views."""
    before, after = output.shape[:dim], output.shape[dim + 1 :]
    by_row = output.reshape(*before, count, -1, *after)
    views = output.reshape(*before, -1, count, *after)
    return [by_row.narrow(dim, 0, kept), views.narrow(dim + 1, 0, kept)]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two results of one computation are equal except for rounding of sums."""
    tolerance = (1e-3 if one.dtype.itemsize > PAIR else 5e-2) * float(one.abs().max())
    return torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)

"""End of a training step, run once for the whole batch on the outputs of all microbatches.

[Note: The loss of a whole batch]
A loss over the whole batch (contrastive, a ratio of sums) is no sum over microbatches. With a
schedule that runs all forward passes first, the last stage keeps what its last unit gave for each
microbatch, joins these along the rows, runs the rest of ``training_step`` once and differentiates
it there. Each microbatch then goes backward from its rows of that gradient. So the loss may be
anything, and loss, metrics and logged values are those of one process.

The joined outputs and their gradients are on the last stage beside those of the microbatches. The
other ranks wait while the end of the step runs on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.merge import Joints, NoJoints, find_joints, join, split
from boltmesh.strategies.pipeline.microbatch_runs import Around, During, Finish, MicrobatchRun
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.stage_run import StageRun, Tail


@dataclass(frozen=True)
class JoinedRun:
    """A batch in microbatches up to its last unit, and as a whole behind it."""

    whole: MicrobatchRun
    tail: Tail
    """The end of the step on the whole batch."""
    last: Sequence[StageRun]
    """The last stage up to its last unit, by microbatch."""
    joints: Joints
    scalars: tuple[str, ...] = ()
    """Numbers that code between layers computes of the rows, with a gradient."""


def tail_of(
    plans: StagePlans, run: MicrobatchRun, number: int, recomputed: frozenset[int] = frozenset()
) -> Tail:
    """Return what follows the last unit for one part of a run."""
    args = (run.step, run.parts[number], *run.rest)
    seed = run.seeds[number]
    return plans.tail(*args, kwargs=run.kwargs, seed=seed, recomputed=recomputed)


def join_run(
    plans: StagePlans, whole: MicrobatchRun, run: MicrobatchRun, sizes: Sequence[int]
) -> JoinedRun | str:
    """Return how outputs of microbatches are joined, or why they cannot be.

    Args:
        plans: Stages of the model.
        whole: The step on the whole batch, as one part.
        run: The same batch in microbatches.
        sizes: Rows of each.

    Raises:
        ConfigError: When the step cannot be cut behind its last unit.
    """
    recomputed: frozenset[int] = frozenset()
    scalars: tuple[str, ...] = ()
    while True:
        try:
            tail = tail_of(plans, whole, 0, recomputed)
        except ConfigError as error:
            if not recomputed:
                raise
            return str(error)
        if tail.draws_before:
            return "code between its layers draws random numbers"
        tails = [tail_of(plans, run, number, recomputed) for number in range(len(run.parts))]
        joints = find_joints(tail.end.plan, [each.end.plan for each in tails], sizes)
        if not isinstance(joints, NoJoints):
            return JoinedRun(whole, tail, [each.last for each in tails], joints, scalars)
        if joints.number is None or joints.number in recomputed:
            return joints.reason
        recomputed |= {joints.number}
        spec = tail.end.plan.values_in[tail.end.plan.received_numbers.index(joints.number)]
        scalars += (spec.origin,) if spec.needs_grad and not spec.shape else ()


class BatchTail:
    """Takes the outputs of microbatches, and gives their gradients. Made for one step.

    Args:
        joined: The run.
        around: Precision.
        during: What the end of the step runs in.
        finish: Takes what it returned; returns what to differentiate.
    """

    def __init__(self, joined: JoinedRun, around: Around, during: During, finish: Finish) -> None:
        self._joined = joined
        self._around, self._during, self._finish = around, during, finish
        self._outputs: list[tuple[Tensor, ...]] = []
        self._grads: list[tuple[Tensor | None, ...]] = []

    def take(self, number: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Take one microbatch's outputs; of the last one, run the end of the step as well.

        Args:
            number: Number of the microbatch; they come in order.
            outputs: With their graph.

        Returns:
            What stands for them: differentiated once all are there, it gives them the gradients.
        """
        self._outputs.append(tuple(each.detach() for each in outputs))
        if number + 1 == len(self._joined.last):
            self._run()
        return (_JoinedOutputs.apply(self, number, *outputs),)  # type: ignore[no-untyped-call]

    def take_grads(self, number: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of a microbatch's outputs, once."""
        grads, self._grads[number] = self._grads[number], ()
        return grads

    def _run(self) -> None:
        joined = self._joined
        whole, end = joined.whole, joined.tail.end
        specs = end.plan.values_in
        parts, self._outputs = self._outputs, []
        shapes = [[value.shape for value in part] for part in parts]
        values = join(parts, joined.joints, specs)
        del parts
        with self._around():
            with self._during(0):
                result = end.forward(
                    values, (whole.batch, *whole.rest), whole.kwargs, seed=whole.seeds[0]
                )
            losses = [each for each in self._finish(0, result) if each.requires_grad]
        del result
        if losses:
            torch.autograd.backward(losses)
        grads = [each.grad for each in values]
        self._grads = split(grads, joined.joints, shapes)


class _JoinedOutputs(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tail: BatchTail, number: int, *outputs: Tensor) -> Tensor:
        ctx.tail, ctx.number = tail, number
        device = outputs[0].device if outputs else None
        return torch.zeros((), device=device)

    @staticmethod
    @override
    def backward(ctx: Any, *_: Tensor) -> Any:
        tail, ctx.tail = ctx.tail, None
        return None, None, *tail.take_grads(ctx.number)


def whole_run(run: MicrobatchRun) -> MicrobatchRun:
    """Return the same step on its batch in one part."""
    return replace(run, parts=[run.batch], seeds=run.seeds[:1], sizes=())

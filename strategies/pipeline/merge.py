"""Merges outputs of microbatches into those of the whole batch.

``merge`` is for results of a step, ``join`` for the inputs of its tail; ``BatchTail`` runs the tail
once on the joined values.

[Note: The loss of a whole batch]
A loss over the whole batch (contrastive, a ratio of sums) is no sum over microbatches. With a
schedule that runs all forward passes first, the last stage keeps the outputs of its last unit for
each microbatch, joins them along the rows, runs the rest of ``training_step`` once and
differentiates it there. The backward pass of each microbatch then starts from its rows of that
gradient. So any loss works, and loss, metrics and logged values are those of one process.

The last stage holds the joined outputs and their gradients beside those of the microbatches. The
other ranks wait while the end of the step runs on the batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import ConfigError, PipelineError
from boltmesh.strategies.pipeline.microbatch_runs import Around, During, Finish, MicrobatchRun
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.cut import StagePlan
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.stage_run import StageRun, Tail
from boltmesh.strategies.pytree import like
from boltmesh.strategies.torch_compat.tensors import scalar_on

Joints = tuple[int | None, ...]
"""Dim of the batch's rows of each value; None for a value without rows."""


@dataclass(frozen=True)
class NoJoints:
    """Why values of microbatches cannot be joined."""

    reason: str
    number: int | None = None
    """Number of the value in the step's trace that cannot be joined, if it is one."""


def find_joints(
    whole: StagePlan, parts: Sequence[StagePlan], sizes: Sequence[int]
) -> Joints | NoJoints:
    """Return the dims along which a stage's inputs for microbatches join to those for the batch.

    A dim holds rows if its length is the batch's number of rows, and for each microbatch that of
    the microbatch. One of a multiple of that length may have any order of rows and is not used.

    Args:
        whole: The stage's plan for the whole batch.
        parts: Its plan for each microbatch.
        sizes: Rows of each microbatch.

    Returns:
        The dims, or the reason against them: a value depends on the rows and has no dim of rows,
        such as a loss that a layer computes.
    """
    if len(parts) == 1:
        return (None,) * len(whole.values_in)
    if any(_identities(each) != _identities(whole) for each in parts):
        return NoJoints("its code uses other values of layers for the batch than for a microbatch")
    joints: list[int | None] = []
    for slot, (spec, follows_batch) in enumerate(
        zip(whole.values_in, whole.row_values, strict=True)
    ):
        shapes = [each.values_in[slot].shape for each in parts]
        dims = _differing(spec, shapes)
        if not dims and not follows_batch:
            joints.append(None)
        elif _are_rows(dims, spec, shapes, sizes):
            joints.append(dims[0])
        else:
            return NoJoints(
                f"{spec.origin}, of shape {list(spec.shape)} for {sum(sizes)} rows, has no "
                f"dimension of rows",
                whole.received_numbers[slot],
            )
    return tuple(joints)


def _are_rows(
    dims: Sequence[int], spec: ValueSpec, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> bool:
    """Whether one dim differs, and its lengths are the rows of the batch and each microbatch."""
    if len(dims) != 1 or spec.shape[dims[0]] != sum(sizes):
        return False
    return [shape[dims[0]] for shape in shapes] == list(sizes)


def join(
    parts: Sequence[tuple[Tensor, ...]], joints: Joints, specs: Sequence[ValueSpec]
) -> list[Tensor]:
    """Concatenate the values of microbatches to those of the batch.

    Args:
        parts: Values by microbatch; each has its rows along the dim in ``joints``.
        joints: Dims of :func:`find_joints`.
        specs: Specs of the batch's values.

    Returns:
        Values of the shapes of ``specs``; the dtypes are kept.

    Raises:
        PipelineError: A value without rows differs between microbatches.
    """
    if len(parts) == 1:
        return list(parts[0])
    joined = []
    for slot, (dim, spec) in enumerate(zip(joints, specs, strict=True)):
        values = [each[slot] for each in parts]
        if dim is not None:
            joined.append(torch.cat(values, dim))
            continue
        if not all(torch.equal(each, values[0]) for each in values[1:]):
            raise PipelineError(
                f"Microbatches gave different values of {spec.origin}, of shape "
                f"{list(spec.shape)}, which is not made of the batch: its value for the whole "
                f"batch is unknown. Use microbatches=1, or compute it behind the last layer."
            )
        joined.append(values[0])
    return joined


def split(
    whole: Sequence[Tensor | None], joints: Joints, shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[tuple[Tensor | None, ...]]:
    """Divide the gradients of joined values into those of microbatches.

    Args:
        whole: Gradients of the joined values, of their shapes; None for a value without one.
        joints: The dims along which they were joined.
        shapes: Shapes of the values by microbatch.

    Returns:
        Contiguous gradients by microbatch, of those shapes. That of a value without rows goes to
        the first microbatch.
    """
    starts = [0] * len(whole)
    parts = []
    for number, part in enumerate(shapes):
        grads: list[Tensor | None] = []
        for slot, (grad, dim, shape) in enumerate(zip(whole, joints, part, strict=True)):
            if grad is None or dim is None:
                grads.append(grad if number == 0 else None)
                continue
            grads.append(grad.narrow(dim, starts[slot], shape[dim]).contiguous())
            starts[slot] += shape[dim]
        parts.append(tuple(grads))
    return parts


def _identities(plan: StagePlan) -> list[tuple[object, ...]]:
    """Return keys of a plan's inputs that do not depend on the size of the batch."""
    return [
        (number, spec.origin, spec.dtype, len(spec.shape))
        for number, spec in zip(plan.received_numbers, plan.values_in, strict=True)
    ]


def _differing(spec: ValueSpec, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [
        dim for dim, size in enumerate(spec.shape) if any(shape[dim] != size for shape in shapes)
    ]


def merge(parts: Sequence[Any], sizes: Sequence[int], weights: Sequence[Tensor | float]) -> Any:
    """Merge the outputs of microbatches into one.

    Tensors of shape ``(B, *)`` with the microbatch's rows are concatenated, and so are lists with
    an item per row. 0-dim tensors and numbers are averaged with the weights, or added if they are
    integers. Other outputs stay a list.

    Args:
        parts: Results of the step by microbatch; all of one structure.
        sizes: Rows of each microbatch.
        weights: Weights of the microbatches' losses; shape ``()`` if tensors.
    """
    first = parts[0]
    if len(parts) == 1 or first is None or isinstance(first, str | bytes | bool):
        return first
    if isinstance(first, Tensor):
        return _merge_tensors(parts, sizes, weights)
    if isinstance(first, int):
        return sum(parts)  # a count
    if isinstance(first, float):
        total = sum(float(weight) for weight in weights)
        pairs = zip(parts, weights, strict=True)
        return sum(part * float(weight) for part, weight in pairs) / total
    if isinstance(first, Mapping):
        merged = {key: merge([part[key] for part in parts], sizes, weights) for key in first}
        return merged if type(first) is dict else type(first)(**merged)
    if isinstance(first, list) and _has_rows(parts, sizes):
        return [item for part in parts for item in part]
    if isinstance(first, list | tuple):
        items = [merge(each, sizes, weights) for each in zip(*parts, strict=True)]
        return like(first, items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in dataclasses.fields(first) if each.init]
        members = {
            name: merge([getattr(part, name) for part in parts], sizes, weights) for name in names
        }
        return dataclasses.replace(first, **members)
    return list(parts)


def _merge_tensors(
    parts: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[Tensor | float]
) -> Any:
    if parts[0].ndim == 0:
        if not parts[0].is_floating_point():
            return torch.stack(list(parts)).sum()  # a count
        scaled = [scalar_on(each, parts[0].device).float() for each in weights]
        values = torch.stack(list(parts))
        factors = torch.stack(scaled).to(values.dtype)
        return torch.where(factors == 0, 0.0, values * factors).sum() / factors.sum()
    if _has_rows(parts, sizes):
        return torch.cat(list(parts))
    return list(parts)


def _has_rows(parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    return [len(part) for part in parts] == list(sizes)


@dataclass(frozen=True)
class JoinedRun:
    """A step that runs in microbatches up to its last unit, and on the whole batch behind it."""

    whole: MicrobatchRun
    tail: Tail
    """The end of the step on the whole batch."""
    last: Sequence[StageRun]
    """The last stage without its tail, by microbatch."""
    joints: Joints
    scalars: tuple[str, ...] = ()
    """Scalars with a gradient that code between layers computes from the rows."""


def tail_of(
    plans: StagePlans, run: MicrobatchRun, number: int, recomputed: frozenset[int] = frozenset()
) -> Tail:
    """Return the tail, the code behind the last unit, for one part of a run."""
    args = (run.step, run.parts[number], *run.rest)
    seed = run.seeds[number]
    return plans.tail(*args, kwargs=run.kwargs, seed=seed, recomputed=recomputed)


def join_run(plans: StagePlans, run: MicrobatchRun, sizes: Sequence[int]) -> JoinedRun | str:
    """Return how outputs of microbatches are joined, or the reason why they cannot be.

    Args:
        plans: Stages of the model.
        run: The step on a batch in microbatches.
        sizes: Rows of each microbatch.

    Raises:
        ConfigError: The step cannot be cut behind its last unit.
    """
    whole = replace(run, parts=[run.batch], seeds=run.seeds[:1], sizes=())
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
    """Takes the outputs of microbatches and computes their gradients. Made for one step.

    Args:
        joined: The run.
        around: The precision context.
        during: Context of the end of the step.
        finish: Takes its result; returns the losses to differentiate.
    """

    def __init__(self, joined: JoinedRun, around: Around, during: During, finish: Finish) -> None:
        self._joined = joined
        self._around, self._during, self._finish = around, during, finish
        self._outputs: list[tuple[Tensor, ...]] = []
        self._grads: list[tuple[Tensor | None, ...]] = []

    def take(self, number: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Take one microbatch's outputs; after the last one, run the end of the step.

        Args:
            number: Number of the microbatch; microbatches come in order.
            outputs: Outputs of the last unit, with their graph.

        Returns:
            A tensor of shape ``()`` in their place. Its backward pass, valid once all microbatches
            are taken, gives the outputs their gradients.
        """
        self._outputs.append(tuple(each.detach() for each in outputs))
        if number + 1 == len(self._joined.last):
            self._run()
        return (_JoinedOutputs.apply(self, number, *outputs),)  # type: ignore[no-untyped-call]

    def take_grads(self, number: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of a microbatch's outputs, with their shapes. Called once."""
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

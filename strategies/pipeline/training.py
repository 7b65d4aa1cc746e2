"""A training batch: forward and backward passes of its microbatches, and the batch's loss.

Lightning calls ``training_step``, then ``zero_grad``, then ``backward``. A schedule computes
gradients in the first of these calls, and the second would clear them. So ``GradHandoff`` moves
them out of ``.grad`` at once, and the backward pass of the returned loss adds them back: every hook
is called once and in order, and accumulation, clipping and loss scaling see the same gradients as
without a pipeline.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.pipeline.loss.autograd_nodes import is_none
from boltmesh.strategies.pipeline.loss.log_rules import (
    RETURNED,
    Key,
    MicrobatchWeights,
    Noted,
    combine,
    returned_numbers,
)
from boltmesh.strategies.pipeline.loss.loss_check import StepLossCheck
from boltmesh.strategies.pipeline.loss.reduction import BatchLossError, Form, Term
from boltmesh.strategies.pipeline.loss.trial import TailTrial
from boltmesh.strategies.pipeline.loss.weights import Read, StepWeights
from boltmesh.strategies.pipeline.merge import JoinedRun, merge
from boltmesh.strategies.pipeline.microbatch_runs import Around, MicrobatchRun
from boltmesh.strategies.pipeline.step_report import StepLogs, repeat, take_numbers
from boltmesh.strategies.torch_compat.tensors import scalar_on, tree_map_only

if TYPE_CHECKING:
    from boltmesh.strategies.pipeline.metrics import Given
    from boltmesh.strategies.pipeline.options import PipelineContext
    from boltmesh.strategies.pipeline.staged_model import StagedModel


class GradHandoff:
    """Keeps the gradients of a step until the backward pass of its loss adds them to ``.grad``."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = list(parameters)  # the step may unfreeze some
        self.made: dict[int, Tensor] = {}
        """The gradients, in the shapes of their parameters, by identity of the parameter."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Return a context in which ``.grad`` starts from None, and whose gradients are taken here.

        Earlier values of ``.grad``, from accumulated batches, are restored at the end.
        """
        before = [each.grad for each in self._parameters]
        for each in self._parameters:
            each.grad = None
        try:
            yield
        finally:
            self.made = {id(each): each.grad for each in self._parameters if each.grad is not None}
            for each, gradient in zip(self._parameters, before, strict=True):
                each.grad = gradient

    def attach_to_loss(
        self, loss: Tensor, total: Tensor | float = 1.0, *, then: Callable[[], None] = noop
    ) -> Tensor:
        """Return a loss of this value whose backward pass adds the gradients.

        Args:
            loss: Shape ``()``; callbacks and loggers see its value.
            total: Divisor of the gradients: the sum of the microbatches' weights, times a loss
                scale if they were computed with one. If it is 0, gradients become zeros.
            then: Called within the backward pass, when the gradients are in ``.grad``.

        Returns:
            Shape ``()``, in the dtype of ``loss``.
        """
        signed: Tensor = _HandoffFunction.apply(loss.detach().requires_grad_(), self, total, then)  # type: ignore[no-untyped-call]
        return signed

    def add(self, factor: Tensor) -> None:
        """Add the gradients, times a factor of shape ``()``, to ``.grad``. Called once."""
        made, self.made = self.made, {}
        pairs = [(each, made[id(each)]) for each in self._parameters if id(each) in made]
        # Comparing the factor synchronizes unless it is on the host.
        if pairs and not (factor.device.type == "cpu" and factor == 1):
            torch._foreach_mul_([gradient for _, gradient in pairs], factor)
        for parameter, gradient in pairs:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


class _HandoffFunction(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        loss: Tensor,
        handoff: GradHandoff,
        total: Tensor | float,
        then: Callable[[], None],
    ) -> Tensor:
        ctx.handoff, ctx.total, ctx.then = handoff, total, then
        return loss.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Same arithmetic on every rank, in at least fp32, so that parts of the model step equally.
        scale = gradients[0].double()
        total = scalar_on(ctx.total, scale.device)
        factor = torch.where(total == 0, 0.0, scale / total)
        ctx.handoff.add(factor.to(torch.promote_types(gradients[0].dtype, torch.float32)))
        ctx.then()
        return torch.zeros_like(gradients[0]), None, None, None


def gradient_scale(context: "PipelineContext", num_microbatches: int) -> Tensor | float:
    """Return the factor of each microbatch's loss before its backward pass.

    Gradients of a microbatch's mean are larger than those of the whole batch's mean by the number
    of microbatches, and fp16 would overflow earlier than in one process. They are divided by a
    power of two, which is exact, and multiplied by the scaler's scale.

    Args:
        context: Context of the pipeline.
        num_microbatches: Microbatches of the batch.

    Returns:
        A number; with a scaler a tensor on the device, shape ``()`` and fp32, without a read.
    """
    part = 0.5 ** (num_microbatches - 1).bit_length()
    if context.scaler is None:
        return part
    one = torch.ones((), device=context.device)
    scale: Tensor = context.scaler.scale(one) * part
    return scale


_PARTS = (
    "Batches of ranks that have experts together are cut into {:.0f} to {:.0f} microbatches, and "
    "their rows are exchanged in each. Give all ranks as many rows, or set microbatches to the "
    "fewest."
)
_WEIGHTS = (
    "Ranks that have experts together weigh their microbatches differently (sums of weights are "
    "{:g} to {:g}), since these have other sizes or labels, and experts get the gradients of all "
    "before the sums are known. Use schedule='gpipe', which computes the loss of a whole batch, or "
    "microbatches=1."
)


def training_step(
    model: "StagedModel",
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ordinal: int,
    around: Around,
) -> Any:
    """Run forward and backward passes of a batch; return a loss whose backward pass adds gradients.

    Collective over the pipeline, and over the pipelines of all data ranks.

    Args:
        model: The model of the pipeline.
        args: Positional arguments of ``training_step``: the batch on the device, and its number.
        kwargs: Keyword arguments of ``training_step``.
        ordinal: Number of the batch in the whole run, for reproducible random numbers.
        around: The precision context.

    Returns:
        The loss of the whole batch, shape ``()`` and at least fp32, or a dict with it if the step
        returned one; None if every microbatch gave None. Other items of the dict are on the last
        stage's rank. The gradients are those of the batch before if the schedule applies them a
        step late.

    Raises:
        PipelineError: A stage failed on any rank, or ranks have different batches.
        ConfigError: The batch cannot be cut, or no weights make losses add up to the batch's.
    """
    model.before_batch()
    parts, sizes = model.cut(args[0])
    model.check_coupled(len(parts), _PARTS)
    seeds = model.seeds(ordinal, len(parts))
    run = MicrobatchRun("training_step", args[0], parts, args[1:], kwargs, seeds, sizes)

    def trial() -> TailTrial:
        assert model.placement is not None
        rows = model.cutter.rows(run.batch)
        return TailTrial(model.placement.plans, run, rows, around, model.context.device)

    model.prepare_checks(run, around)
    if len(parts) > 1 and model.has_open_schedule:
        model.choose_schedule(run, around, trial)
    joined = model.join(run, around) if len(parts) > 1 else None
    row_check = model.row_check(run) if len(parts) > 1 else None
    checks = model.loss_checks.of_step(trial)
    if isinstance(joined, JoinedRun):
        sizes = [sum(sizes)]
        run = replace(run, sizes=())
    weights = StepWeights(_reader(checks, joined), is_single=len(sizes) == 1)
    last_stage = _LastStage(model, checks, weights, sizes)
    handoff = GradHandoff(model.holdings.parameters)
    delayed = model.delayed
    with handoff.capture() if delayed is None else nullcontext():
        logs, rows = model.runner.run_batch(
            run,
            last_stage.finish,
            around,
            last_stage.report,
            joined if isinstance(joined, JoinedRun) else None,
            row_check,
        )
    loss, total = _take_report(model, logs, rows, last_stage.numbers)
    if delayed is not None:
        delayed.wait(len(parts), None if loss is None else total)
    if loss is None:
        model.average(has_loss=False)
        return None
    if len(sizes) > 1:
        model.check_coupled(total, _WEIGHTS)
    if delayed is None:
        handoff.made |= model.holdings.shared.sum_gradients(handoff.made)
    else:
        handoff.made = delayed.take()
        total = 1.0
    signed = handoff.attach_to_loss(loss, total, then=lambda: model.average(has_loss=True))
    if not model.sharing.is_mapping:
        return signed
    return {**last_stage.merged(), "loss": signed}


def _reader(checks: StepLossCheck, joined: JoinedRun | str | None) -> Read:
    """Return the reader of a loss; its errors say why microbatches cannot be joined, if so."""
    if not isinstance(joined, str):
        return checks.read
    reason = joined

    def read(loss: Tensor) -> tuple[Form, list[Term]] | None:
        try:
            return checks.read(loss)
        except BatchLossError as error:
            raise error.without_joining(reason) from None

    return read


def _take_report(
    model: "StagedModel", logs: StepLogs, rows: Tensor, numbers: Mapping[str, Tensor]
) -> tuple[Tensor | None, Tensor | float]:
    """Return loss and divisor of gradients, and repeat the last stage's logs. Collective.

    ``rows`` is of shape ``(R, length)``, in fp64. ``numbers``, each of shape ``()``, exist on the
    last stage's rank only.
    """
    loss, total, logged = model.sharing.take(rows)
    logged = model.runner.effects.apply(logged, stops=model.sharing.stops)
    given: Given = ()
    if logs.metrics.has_calls:
        given = (
            model.metric_sharing.send(logs.metrics.joined, numbers)
            if model.holds_last_stage
            else model.metric_sharing.receive()
        )
    repeat(model.module, logged, given)
    # The same dtype on all ranks: Lightning's division of it becomes a factor of gradients.
    dtype = next((each.dtype for each in model.module.parameters()), torch.float32)
    dtype = torch.promote_types(dtype, torch.float32)
    return None if loss is None else loss.to(dtype), total


class _LastStage:
    """Weights the losses of the last stage, and combines them and other results of the batch."""

    def __init__(
        self,
        model: "StagedModel",
        checks: StepLossCheck,
        weights: StepWeights,
        sizes: Sequence[int],
    ) -> None:
        self.numbers: dict[str, Tensor] = {}
        """Numbers that are arguments of metrics, by key."""
        self._model, self._checks, self._step_weights, self._sizes = model, checks, weights, sizes
        self._scale: Tensor | float = 1.0
        if model.holds_last_stage:
            self._scale = gradient_scale(model.context, len(sizes))
        self._is_mapping = False
        self._weights: dict[int, Tensor | float] = {}
        self._losses: dict[int, Tensor] = {}
        self._of_kind: dict[bool, int] = {}
        """The first microbatch without (True) and with (False) something to learn."""
        self._sum: Tensor | None = None
        self._extra: dict[int, dict[str, Any]] = {}
        self._numbers: dict[Key, list[Noted]] = {}

    def finish(self, number: int, result: Any) -> tuple[Tensor, ...]:
        """Return a microbatch's loss, shape ``()``, weighted and scaled; empty without one."""
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None:
            return ()
        scaled, self._weights[number] = self._step_weights.weigh(loss, self._sizes[number])
        self._losses[number] = loss.detach()
        self._of_kind.setdefault(is_none(loss), number)
        value = scaled.detach().double()  # a sum in a narrower dtype would lose bits
        self._sum = value if self._sum is None else self._sum + value
        if isinstance(result, Mapping):
            self._is_mapping = True
            for key, noted in returned_numbers(number, result).items():
                self._numbers.setdefault(key, []).append(noted)
            self._extra[number] = {
                key: tree_map_only(Tensor, Tensor.detach, each)
                for key, each in result.items()
                if key != "loss"
            }
        return (scaled * self._scale,)

    def report(self, logs: StepLogs) -> Tensor:
        """Return the row for the other ranks, shape ``(length,)``: loss, divisor, logged values."""
        if (both := self._rows_with_and_without_loss()) is not None:
            self._checks.prove_empty(*both)
        known = self._microbatch_weights()
        whole = logs.collected(known, self._checks.rules(known), self._checks.is_size_of_batch)
        logged, self.numbers = take_numbers(whole)
        total, device = self._step_weights.total, self._model.context.device
        loss, effects = self._loss(total), self._model.runner.effects
        return self._model.sharing.row(
            loss,
            scalar_on(total, device) * scalar_on(self._scale, device),
            logged + effects.logged(),
            is_mapping=self._is_mapping,
            stops=effects.stops(loss),
        )

    def _rows_with_and_without_loss(self) -> list[range] | None:
        """Return the rows of a microbatch with a loss and of one with nothing to learn, or None."""
        if len(self._of_kind) < 2:
            return None
        numbers = self._of_kind[False], self._of_kind[True]
        return [range(sum(self._sizes[:at]), sum(self._sizes[: at + 1])) for at in numbers]

    def _microbatch_weights(self) -> MicrobatchWeights:
        return MicrobatchWeights(
            self._weights, {number: float(size) for number, size in enumerate(self._sizes)}
        )

    def _loss(self, total: Tensor | float) -> Tensor | None:
        """Return the loss of the batch, shape ``()`` and fp64; None if no microbatch gave one."""
        if self._sum is None:
            return None
        if isinstance(total, float) and total:
            return self._sum / total
        # If the total weight is 0, nothing is trained, and the mean over rows is logged.
        sizes = [self._sizes[number] for number in self._losses]
        pairs = zip(self._losses.values(), sizes, strict=True)
        mean = sum((loss * size for loss, size in pairs), torch.zeros_like(self._sum)) / sum(sizes)
        whole = scalar_on(total, mean.device)
        return torch.where(whole == 0, mean, self._sum / whole)

    def merged(self) -> dict[str, Any]:
        """Return the other items that the step returned, merged."""
        numbers = sorted(self._extra)
        if not numbers:
            return {}
        parts = [self._extra[number] for number in numbers]
        weights = [self._weights[number] for number in numbers]
        merged: dict[str, Any] = merge(parts, [self._sizes[number] for number in numbers], weights)
        known = self._microbatch_weights()
        rule_of = self._checks.rules(known)
        for (_, name), noted in self._numbers.items():
            if name in merged and len(noted) > 1:
                number = combine(rule_of((RETURNED, name), noted), noted, known)
                merged[name] = _like(merged[name], number)
        return merged


def _like(merged: Any, number: Tensor) -> Any:
    return number.to(merged.dtype) if isinstance(merged, Tensor) else number.item()

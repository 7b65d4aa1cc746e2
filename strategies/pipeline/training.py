"""One batch of training: forward and backward passes of its microbatches, and the loss of all."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from boltmesh.strategies.pipeline.deposit import Deposit
from boltmesh.strategies.pipeline.losses import StepWeights
from boltmesh.strategies.pipeline.outputs import merge
from boltmesh.strategies.pipeline.runs import Around, Run
from boltmesh.strategies.pipeline.step_logs import StepLogs, repeat, take_numbers
from boltmesh.strategies.torch_compat import tree_map_only

if TYPE_CHECKING:
    from boltmesh.strategies.pipeline.axis import PipelineAxis
    from boltmesh.strategies.pipeline.metrics.sharing import Given


def training_step(
    axis: "PipelineAxis",
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ordinal: int,
    around: Around,
) -> Any:
    """Run forward and backward passes of a batch; return a loss that hands gradients over.

    Collective over the pipeline.

    Args:
        axis: Of the pipeline.
        args: Of ``training_step``: the batch on the device, and its number.
        kwargs: Also of it.
        ordinal: Of the batch in the whole run, for random numbers that repeat.
        around: Precision.

    Returns:
        The loss of the whole batch, or a dict with it where the step returned one; None where
        every microbatch gave None. What else is in the dict is on the last stage's rank.
    """
    parts, sizes = axis.cut(args[0])
    weights, results = StepWeights(), _Results()
    scale = 1.0 if axis.context.scaler is None else float(axis.context.scaler.get_scale())

    def finish(number: int, result: Any) -> tuple[Tensor, ...]:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None:
            return ()
        scaled, weight = weights.weigh(loss, sizes[number])
        results.add(number, loss, result, weight, scaled)
        return (scaled * scale,)

    run = Run("training_step", args[0], parts, args[1:], kwargs, axis.seeds(ordinal, len(parts)))
    deposit = Deposit(axis.held)
    with deposit.taking():
        logs = axis.work_off(run, finish, around)
    loss, total = _tell(axis, results, weights, logs)
    if loss is None:
        return None
    deposit.replace(axis.shared.add_up(deposit.made()))
    signed = deposit.sign(loss, total * scale)
    if not axis.sharing.is_mapping:
        return signed
    return {**results.merged(sizes), "loss": signed}


def _tell(
    axis: "PipelineAxis", results: "_Results", weights: StepWeights, logs: StepLogs
) -> tuple[Tensor | None, Tensor | float]:
    """Let all ranks know the loss, what it was weighed by, and what was logged."""
    if axis.holds_last_stage:
        logged, numbers = take_numbers(logs.collected(results.weights))
        loss = results.loss(weights.total)
        total: Tensor | float = weights.total
        axis.sharing.send(loss, total, logged, is_mapping=results.is_mapping)
    else:
        loss, total, logged = axis.sharing.receive()
    given: Given = ()
    if logs.metrics.has_calls:
        given = (
            axis.metric_sharing.send(logs.metrics.joined, numbers)
            if axis.holds_last_stage
            else axis.metric_sharing.receive()
        )
    repeat(axis.module, logged, given)
    return loss, total


class _Results:
    """What the last stage returned, by microbatch."""

    def __init__(self) -> None:
        self.weights: dict[int, Tensor | float] = {}
        self.is_mapping = False
        self._sum: Tensor | None = None
        self._extra: dict[int, dict[str, Any]] = {}

    def add(
        self, number: int, loss: Tensor, result: Any, weight: Tensor | float, scaled: Tensor
    ) -> None:
        self.weights[number] = weight
        value = scaled.detach()
        self._sum = value if self._sum is None else self._sum + value
        if isinstance(result, Mapping):
            self.is_mapping = True
            self._extra[number] = {
                key: _detached(each) for key, each in result.items() if key != "loss"
            }

    def loss(self, total: Tensor | float) -> Tensor | None:
        return None if self._sum is None else self._sum / total

    def merged(self, sizes: Sequence[int]) -> dict[str, Any]:
        numbers = sorted(self._extra)
        if not numbers:
            return {}
        parts = [self._extra[number] for number in numbers]
        weights = [self.weights[number] for number in numbers]
        merged: dict[str, Any] = merge(parts, [sizes[number] for number in numbers], weights)
        return merged


def _detached(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, value)

"""One batch of validation, testing or prediction, put together over its microbatches."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from boltmesh.strategies.pipeline.log_rules import MicrobatchWeights
from boltmesh.strategies.pipeline.outputs import merge
from boltmesh.strategies.pipeline.runs import Around, Run
from boltmesh.strategies.pipeline.step_logs import repeat

if TYPE_CHECKING:
    from boltmesh.strategies.pipeline.axis import PipelineAxis


def evaluation_step(
    axis: "PipelineAxis",
    step: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ordinal: int,
    around: Around,
    returns: bool,
) -> Any:
    """Run a step that trains nothing. Collective over the pipeline.

    Args:
        axis: Of the pipeline.
        step: ``validation_step``, ``test_step`` or ``predict_step``.
        args: Of the step: the batch on the device, and its number.
        kwargs: Also of it.
        ordinal: Of the batch in this loop.
        around: Precision.
        returns: Whether somebody on the other ranks needs what the step returns.

    Returns:
        What the step returned, put together over the microbatches; on ranks without the last
        stage only if ``returns``, else None.
    """
    parts, sizes = axis.cut(args[0])
    found: dict[int, Any] = {}

    def finish(number: int, result: Any) -> tuple[Tensor, ...]:
        found[number] = result
        return ()

    run = Run(step, parts, args[1:], kwargs, axis.seeds(ordinal, len(parts)))
    logs = axis.work_off(run, finish, around, trains=False)
    rows: list[Tensor | float] = [float(size) for size in sizes]
    output = None
    if axis.holds_last_stage:
        output = merge([found[number] for number in range(len(sizes))], sizes, rows)
        logged = logs.collected(
            MicrobatchWeights(dict(enumerate(rows)), dict(enumerate(map(float, sizes))))
        )
        axis.sharing.send(None, 1.0, logged, is_mapping=False)
    else:
        _, _, logged = axis.sharing.receive()
    if step != "predict_step":
        repeat(axis.module, logged)
    return _give_all(axis, output) if returns else output


def _give_all(axis: "PipelineAxis", output: Any) -> Any:
    holder = [output]
    dist.broadcast_object_list(holder, axis.last, group=axis.context.group)
    return output if axis.holds_last_stage else holder[0]

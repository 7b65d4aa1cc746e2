"""Expected traffic of a tensor group: the collectives of one step, counted on fake tensors.

The number and dtype of activations that cross the boundaries of divided modules follow from the
plan and the step together: autocast, recomputation, frozen layers without gradients. So the planned
step runs once on fake tensors, with a process group that only counts.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import Self, override

from boltmesh.strategies.cost_model.traffic import NORM_BYTES, OVERFLOW_BYTES
from boltmesh.strategies.dry_run.batch_check import BYTES_PER_RANK
from boltmesh.strategies.dry_run.step import Around, rare_garbage_collection
from boltmesh.strategies.engine.axis import FakeRuns
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.torch_compat.communication import all_gather_single, reduce_scatter_single
from boltmesh.strategies.torch_compat.modules import swapped_state
from boltmesh.strategies.torch_compat.tensors import FakePackedSequences, fake_tensors, make_fake
from boltmesh.telemetry.traffic import ExpectedTraffic


class OperatorTraffic(NamedTuple):
    """Calls and bytes of one operator."""

    num_bytes: int
    calls: int


@rare_garbage_collection()
def count_step(
    module: Module, runs: FakeRuns, group: TensorGroup, around: Around, device: torch.device
) -> dict[str, OperatorTraffic] | None:
    """Return the traffic of one batch by operator of ``c10d``; None if it cannot be counted.

    No communication. Gradients, values and random states do not change.

    Args:
        module: A model that runs by a plan.
        runs: This rank's part of a batch.
        group: The group of the plan.
        around: Context of the precision plugin.
        device: Device of the batch.
    """
    mode = fake_tensors()
    swapped: dict[str, Tensor] = {}
    total: dict[str, OperatorTraffic] = {}
    try:
        for name, each in module.named_parameters():
            with mode:
                fake = make_fake(each, mode).detach().to(device)
                swapped[name] = Parameter(fake, requires_grad=each.requires_grad)
        for name, buffer in module.named_buffers():
            swapped[name] = buffer.detach().to(device).clone()
        for run, times in runs:
            counter = CountingGroup(group.rank, group.size)
            with (
                swapped_state(module, swapped),
                group.counted_by(counter),
                FakePackedSequences(),
                around(),
            ):
                run(mode)
            for name, (num_bytes, calls) in counter.counted.items():
                known = total.get(name, OperatorTraffic(0, 0))
                total[name] = OperatorTraffic(
                    known.num_bytes + num_bytes * times, known.calls + calls * times
                )
    except Exception:  # noqa: BLE001 - the step needs values; the expectation is only displayed
        return None
    return total


def expected_traffic(
    counted: Mapping[str, OperatorTraffic],
    *,
    size: int,
    accumulated: int,
    num_norms: int,
    agrees_on_overflow: bool,
) -> list[ExpectedTraffic]:
    """Return the collectives of one optimizer step on one rank.

    Args:
        counted: Traffic of one batch.
        size: Number of ranks of the tensor group.
        accumulated: Batches per optimizer step.
        num_norms: Number of norms over the ranks per optimizer step.
        agrees_on_overflow: Whether ranks agree before a step on whether gradients overflowed.
    """
    own = counted.get("allreduce", OperatorTraffic(0, 0))
    in_step = NORM_BYTES * num_norms + OVERFLOW_BYTES * agrees_on_overflow
    why = "sums of activations and their gradients, digests of batches"
    why += ", the norm for clipping" if num_norms else ""
    why += ", whether fp16 has overflown" if agrees_on_overflow else ""
    reduced = ExpectedTraffic(
        axis="tensor",
        operator="allreduce",
        payload_bytes=float((own.num_bytes + BYTES_PER_RANK * size) * accumulated + in_step),
        calls=float((own.calls + 1) * accumulated + num_norms + agrees_on_overflow),
        why=why,
    )
    others = [
        ExpectedTraffic(
            axis="tensor",
            operator=operator,
            payload_bytes=float(each.num_bytes * accumulated),
            calls=float(each.calls * accumulated),
            why="activations and their gradients, gathered or divided",
        )
        for operator, each in counted.items()
        if operator != "allreduce"
    ]
    return [reduced, *others]


class CountingGroup(dist.ProcessGroup):
    """A process group that counts collectives and sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.counted: dict[str, OperatorTraffic] = {}

    def of_its_kind(self) -> dict[str, object]:
        """Return what determines how a block runs: not the counts."""
        return {}

    def _count(
        self, operator: str, payload: Tensor, run: Callable[[dist.ProcessGroup], Any]
    ) -> Any:
        """Count a collective, and return its work; ``run`` would start it on a real group."""
        num_bytes, calls = self.counted.get(operator, (0, 0))
        self.counted[operator] = OperatorTraffic(num_bytes + payload.nbytes, calls + 1)
        return _FinishedWork()

    @override
    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._count("allreduce", tensors[0], lambda group: group.allreduce(tensors, options))

    @override
    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._count("broadcast", tensors[0], lambda group: group.broadcast(tensors, options))

    @override
    def _allgather_base(self, output: Tensor, part: Tensor, options: Any = None) -> Any:
        return self._count(
            "_allgather_base", output, lambda group: all_gather_single(output, part, group=group)
        )

    @override
    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        return self._count(
            "_reduce_scatter_base",
            whole,
            lambda group: reduce_scatter_single(output, whole, group=group),
        )

    @override
    def alltoall_base(self, output: Tensor, sent: Tensor, *sizes: Any) -> Any:
        return self._count(
            "alltoall_base", sent, lambda group: group.alltoall_base(output, sent, *sizes)
        )

    # The names of torch.distributed from torch 2.13 on.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]


class CountedGroup(CountingGroup):
    """A process group that counts collectives and runs them on another one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    @override
    def _count(
        self, operator: str, payload: Tensor, run: Callable[[dist.ProcessGroup], Any]
    ) -> Any:
        super()._count(operator, payload, run)
        return run(self._group)


class GroupWithoutRanks(TensorGroup):
    """A tensor group without processes, for counting on one rank.

    Layers that run as DTensors cannot be counted with it: their mesh needs ranks.
    """

    @classmethod
    def of(cls, rank: int, size: int) -> Self:
        """Return one on the CPU.

        Args:
            rank: The tensor rank of this process.
            size: Number of ranks that share each layer.
        """
        return cls(CountingGroup(rank, size), torch.device("cpu"))

    @override
    def _fix_mesh(self) -> None:
        pass  # a mesh would query its ranks


class _FinishedWork:
    """Completed work."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

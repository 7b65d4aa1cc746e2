"""What an optimizer step of a tensor group should move: its collectives, run on tensors of no data.

How often activations cross the borders of divided modules, and in which type, follows from the plan
and from the step together: autocast, recomputation, frozen layers that need no gradient. So the
planned step is run once as it will run, with shapes alone, and a group that only counts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import Self, override

from boltmesh.strategies.cost_model.traffic import NORM_BYTES, OVERFLOW_BYTES
from boltmesh.strategies.dry_run.batch_check import BYTES_PER_RANK
from boltmesh.strategies.dry_run.step import Around
from boltmesh.strategies.engine.axis import FakeRun
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.torch_compat.modules import swapped_state
from boltmesh.strategies.torch_compat.tensors import fake_tensors, make_fake
from boltmesh.telemetry.traffic import ExpectedTraffic


class OperatorTraffic(NamedTuple):
    """What one operator moves."""

    num_bytes: int
    calls: int


def count_step(
    module: Module, run: FakeRun, group: TensorGroup, around: Around, device: torch.device
) -> dict[str, OperatorTraffic] | None:
    """Return what one batch moves, by operator of ``c10d``; None where that cannot be found out.

    No communication. Gradients, values and random numbers stay as they are.

    Args:
        module: A model that runs by a plan.
        run: What this rank runs of a batch.
        group: That the plan was applied with.
        around: Precision.
        device: Where tensors of the batch are.
    """
    counter = CountingGroup(group.rank, group.size)
    mode = fake_tensors()
    swapped: dict[str, Tensor] = {}
    for name, each in module.named_parameters():
        with mode:
            swapped[name] = _moved(make_fake(each, mode), each, device)
    for name, buffer in module.named_buffers():
        swapped[name] = buffer.detach().to(device).clone()
    try:
        with swapped_state(module, swapped), group.counted_by(counter), around():
            run(mode)
    except Exception:  # noqa: BLE001 - code that needs values; what is expected is only shown
        return None
    return {name: OperatorTraffic(*each) for name, each in counter.counted.items()}


def _moved(fake: Tensor, parameter: Tensor, device: torch.device) -> Tensor:
    return Parameter(fake.detach().to(device), requires_grad=parameter.requires_grad)


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
        counted: Of one batch.
        size: Ranks of the tensor group.
        accumulated: Batches in an optimizer step.
        num_norms: Norms over the ranks in an optimizer step.
        agrees_on_overflow: Whether ranks tell each other before a step if gradients overflowed.
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
    """A group of which nobody hears."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.counted: dict[str, tuple[int, int]] = {}

    def _count(self, operator: str, payload: Tensor) -> "_FinishedWork":
        num_bytes, calls = self.counted.get(operator, (0, 0))
        self.counted[operator] = num_bytes + payload.nbytes, calls + 1
        return _FinishedWork()

    @override
    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._count("allreduce", tensors[0])

    @override
    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._count("broadcast", tensors[0])

    @override
    def _allgather_base(self, output: Tensor, part: Tensor, options: Any = None) -> Any:
        return self._count("_allgather_base", output)

    @override
    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        return self._count("_reduce_scatter_base", whole)

    # What torch.distributed calls the two from torch 2.13 on.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]


class GroupWithoutRanks(TensorGroup):
    """A tensor group of which nobody is there: for who divides a model only to count.

    Layers that run as DTensors cannot be counted with it, for their mesh needs ranks.
    """

    @classmethod
    def of(cls, rank: int, size: int) -> Self:
        """Return one on the CPU.

        Args:
            rank: That this process stands for.
            size: Ranks that share each layer.
        """
        return cls(CountingGroup(rank, size), torch.device("cpu"))

    @override
    def _fix_mesh(self) -> None:
        pass  # a mesh asks its ranks


class _FinishedWork:
    """Work that nobody waits for."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

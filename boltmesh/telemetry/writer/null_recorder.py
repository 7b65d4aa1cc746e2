"""The recorder of a rank whose telemetry is off."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor
from torch.distributed import ProcessGroup

from boltmesh.telemetry.snapshot import MemoryKind, OffloadDirection, OffloadPlace, PipelinePlan
from boltmesh.telemetry.tensor_plan import TensorPlanTable
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer.memory import TensorsByKind


class NullRecorder:
    """Takes what a ``Recorder`` takes, and does nothing."""

    is_on = False
    path: Path | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See ``Recorder``."""
        return nullcontext()

    def device_wait(self) -> AbstractContextManager[None]:
        """See ``Recorder``."""
        return nullcontext()

    def name_group(self, group: ProcessGroup, axis: str) -> None:
        """See ``Recorder``."""

    def watch_for_hangs(self, timeout_s: float) -> None:
        """See ``Recorder``."""

    def explain(self, error: BaseException) -> None:
        """See ``Recorder``."""

    def expect(self, traffic: Sequence[ExpectedTraffic]) -> None:
        """See ``Recorder``."""

    def expect_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """See ``Recorder``."""

    def watch_memory(self, tensors: TensorsByKind) -> None:
        """See ``Recorder``."""

    def compute(
        self,
        *,
        flops_per_batch: float | None,
        recomputed_flops_per_batch: float | None = None,
        peak_flops_per_second: float | None,
    ) -> None:
        """See ``Recorder``."""

    def count_flops(self) -> None:
        """See ``Recorder``."""

    def counted_flops(self) -> None:
        """See ``Recorder``."""

    def schedule(self, plan: PipelinePlan) -> None:
        """See ``Recorder``."""

    def tensor_plan(self, plan: TensorPlanTable) -> None:
        """See ``Recorder``."""

    def chunk(self, *, stage: int, microbatch: int, kind: str, start_ns: int, end_ns: int) -> None:
        """See ``Recorder``."""

    def trend(self, name: str, value: float) -> None:
        """See ``Recorder``."""

    def chose(self, strategy: str) -> None:
        """See ``Recorder``."""

    def dropped_rows(self, module: str, count: Tensor) -> None:
        """Do nothing."""

    def expert_rows(self, module: str, chosen: Tensor, num_experts: int) -> None:
        """See ``Recorder``."""

    def live_microbatches(self, peaks: Mapping[int, int]) -> None:
        """See ``Recorder``."""

    def offload(
        self,
        place: OffloadPlace,
        direction: OffloadDirection,
        num_bytes: int,
        seconds: float,
        *,
        is_alone: bool = False,
    ) -> None:
        """See ``Recorder``."""

    def begin_loop(self, *, epoch: int, global_step: int) -> None:
        """See ``Recorder``."""

    def end_loop(self) -> None:
        """See ``Recorder``."""

    def begin_batch(self, *, index: int, epoch: int) -> None:
        """See ``Recorder``."""

    def end_batch(
        self,
        *,
        global_step: int,
        loss: float | Tensor | None,
        samples: int | None,
        tokens: int | None,
    ) -> None:
        """See ``Recorder``."""

    def metrics(self, global_step: int, values: Mapping[str, float | Tensor]) -> None:
        """See ``Recorder``."""

    def event(self, kind: str, message: str) -> None:
        """See ``Recorder``."""

    def rank_died(self, rank: int, exit_code: int | None) -> None:
        """See ``Recorder``."""

    def finish(self) -> None:
        """See ``Recorder``."""

    def fail(self, error: BaseException) -> None:
        """See ``Recorder``."""

    def close(self) -> None:
        """See ``Recorder``."""

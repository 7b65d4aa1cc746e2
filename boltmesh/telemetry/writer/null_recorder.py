"""Telemetry that is off: the recorder of such a rank, and turning a recorder off when it fails.

A failure of a recorder never reaches training: ``guarded`` methods warn once and do nothing more.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.snapshot import MemoryKind, OffloadDirection, OffloadPlace, PipelinePlan
from boltmesh.telemetry.tensor_plan import TensorPlanTable
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer.memory import TensorsByKind

Method = TypeVar("Method", bound=Callable[..., None])


class Guarded(Protocol):
    """An object with methods that may fail, which can be turned off."""

    is_on: bool

    def turn_off(self, error: Exception) -> None:
        """Stop, and say so once."""


def warn_off(error: Exception) -> None:
    """Say, once, why nothing is recorded from here on."""
    text = str(error) if isinstance(error, TelemetryError) else f"{type(error).__name__}: {error}"
    warnings.warn(
        f"boltmesh telemetry is off for this process: {text}", RuntimeWarning, stacklevel=3
    )


def guarded(method: Method) -> Method:
    """Make a method do nothing once telemetry is off, and turn it off when it fails."""

    @functools.wraps(method)
    def call(self: Guarded, *args: Any, **kwargs: Any) -> None:
        if self.is_on:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - telemetry never stops training
                self.turn_off(error)

    return cast("Method", call)


class NullRecorder:
    """Has the methods of a ``Recorder``, and does nothing."""

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
        """See ``Recorder``."""

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

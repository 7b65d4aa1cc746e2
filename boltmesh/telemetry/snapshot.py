"""State of a job at one moment, as a reader knows it: immutable, serialisable, free of torch.

Everything that shows a job (the dashboard, ``boltmesh top --json``, a recording) is a function of
these values. ``None`` always means "not known", never zero.

Structs that a snapshot holds by the thousand are exempt from garbage collection (``gc=False``):
they cannot be part of a cycle, and traversing them would cost a viewer of many ranks more than
reading them.
"""

from typing import Literal

import msgspec

from boltmesh.telemetry.tensor_plan import TensorPlanTable
from boltmesh.telemetry.traffic import ExpectedTraffic

_COLLECTIVES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


def operator_name(operator: str) -> str:
    """Return the name of a ``c10d`` operator as in ``torch.distributed``.

    ``all_gather`` of ``_allgather_base_``.
    """
    name = operator.strip("_").removesuffix("_base")
    for spelling, word in _COLLECTIVES.items():
        if name.startswith(spelling):
            return word + name.removeprefix(spelling)
    return name


SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes away; new fields do not raise it."""

JobState = Literal["running", "finished", "failed", "crashed"]
"""``failed``: a rank recorded an exception. ``crashed``: a rank died without recording anything."""

RankState = Literal["starting", "running", "finished", "failed", "dead", "missing"]
"""``dead``: the process is gone and recorded no end. ``missing``: no telemetry file exists."""

PHASES = (
    "data",
    "transfer",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "validation",
    "checkpoint",
    "other",
)
"""The exclusive parts of a step's time, in the order in which they are drawn.

``data`` waits for the loader, ``transfer`` moves the batch to the device, ``communication`` is the
exposed part only (what no computation hides), ``other`` is what remains of the step.
"""


class PhaseTime(msgspec.Struct, frozen=True, gc=False):
    """Time of one phase within one step."""

    name: str
    seconds: float


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One optimizer step, or one micro-step under accumulation, of one rank."""

    index: int
    """Counts batches of the fit, from 0."""
    global_step: int
    """Lightning's ``trainer.global_step`` after this batch."""
    epoch: int
    end_time: float
    """Wall clock, seconds since 1970."""
    seconds: float
    phases: tuple[PhaseTime, ...]
    loss: float | None
    samples: int | None
    """Items of the batch on this rank."""
    tokens: int | None


class MetricPoint(msgspec.Struct, frozen=True, gc=False):
    """One logged value, as ``trainer.callback_metrics`` had it."""

    name: str
    global_step: int
    value: float


class CollectiveTotal(msgspec.Struct, frozen=True, gc=False):
    """One operator on one group, as this rank counted it since the start of the run."""

    axis: str
    """``data``, ``tensor``, ``pipeline``, or ``world`` for what runs over all ranks."""
    group: str
    operator: str
    """The ``c10d`` operator without its trailing underscore, for example ``allreduce``."""
    calls: int
    payload_bytes: int
    calls_per_step: float | None
    """Mean over the recent steps; None until three steps have passed."""
    bytes_per_step: float | None
    seconds_per_step: float | None
    """Time between enqueue and completion; None if the backend does not report it."""


class CollectiveInFlight(msgspec.Struct, frozen=True, gc=False):
    """The last collective that this rank entered."""

    axis: str
    operator: str
    sequence: int
    """Counts the collectives of this group on this rank, from 1."""
    is_done: bool | None
    """None if the backend does not report it."""


class GroupProgress(msgspec.Struct, frozen=True, gc=False):
    """How far this rank has come in the collectives of one process group."""

    axis: str
    group: str
    """The group's name, the same on all of its members."""
    ranks: tuple[int, ...]
    """The members, by global rank; empty where that is not known."""
    sequence: int
    """Counts the collectives that this rank has entered in this group, from 1; 0: none yet."""
    operator: str | None
    """The one that it entered last."""
    is_done: bool | None
    """Whether that is complete; None if the backend does not report it."""
    time: float | None
    """Wall clock of its completion, or else of its enqueue."""


class PeerTotal(msgspec.Struct, frozen=True, gc=False):
    """Traffic of this rank with one other, point to point, since the start of the run."""

    axis: str
    operator: str
    """``send`` or ``recv``."""
    peer: int
    """Global rank of the other side."""
    calls: int
    payload_bytes: int
    bytes_per_step: float | None
    """Mean over the recent steps; None until three steps have passed."""


MEMORY_KINDS = (
    "parameters", "gradients", "optimizer", "buffers", "activations", "copies", "cache", "other"
)  # fmt: skip
"""Kinds of memory. ``copies`` are files of ``checkpoint_in_memory_every``; ``cache`` is held by
torch's allocator and unused; ``other`` is the rest."""

MEMORY_PLACES = ("device", "host", "disk")
MemoryPlace = Literal["device", "host", "disk"]

OffloadPlace = Literal["host", "disk"]
OffloadDirection = Literal["read", "write"]


class MemoryKind(msgspec.Struct, frozen=True, gc=False):
    """Bytes of one kind in one place."""

    kind: str
    """One of MEMORY_KINDS."""
    place: MemoryPlace
    measured_bytes: int | None
    predicted_bytes: int | None
    """Prediction of the strategy before training."""


class OffloadTotal(msgspec.Struct, frozen=True, gc=False):
    """Traffic of this rank between its device and one other place, in one direction."""

    place: OffloadPlace
    direction: OffloadDirection
    """``read`` brings bytes back towards the device, ``write`` takes them away."""
    calls: int
    """Transfers since the start of the run."""
    moved_bytes: int
    bytes_per_step: float | None
    """Median of the recent optimizer steps; None until three have passed."""
    seconds_per_step: float | None
    """Time in which at least one transfer was under way, hidden behind computation or not."""
    bytes_per_second: float | None
    """Bytes per second over that time, in the recent steps."""


class ExpertLoad(msgspec.Struct, frozen=True, gc=False):
    """Rows that one rank has sent to the experts of one module, in forward passes of training."""

    module: str
    rows: tuple[int, ...]
    """Rows of each expert, since the run began."""
    recent: tuple[int, ...]
    """Rows of each expert in the last seconds."""
    dropped: int = 0
    """Rows that an expert had no place for, since the run began."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One microbatch in one stage of a pipeline, as this rank ran it."""

    step: int
    """The optimizer step, as ``trainer.global_step`` after it."""
    stage: int
    microbatch: int
    kind: Literal["F", "B", "I", "W"]
    """Forward; whole backward; backward for the input only; backward for the weights only."""
    start: float
    """Wall clock, seconds since 1970."""
    end: float


class LiveMicrobatches(msgspec.Struct, frozen=True, gc=False):
    """Memory that one stage keeps for its backward passes."""

    stage: int
    most: int
    """Microbatches whose activations it has kept at once at most, as its executor counted them."""


class PipelinePlan(msgspec.Struct, frozen=True):
    """The schedule that the pipeline's ranks follow."""

    schedule: str
    """Its name, for example ``1f1b``."""
    num_stages: int
    num_microbatches: int
    order: tuple[tuple[str | None, ...], ...]
    """For each pipeline rank its actions in order, as torch writes them: stage, kind, microbatch
    (``0F3``); None where the schedule leaves a slot empty."""
    rank_of_stage: tuple[int, ...] = ()
    """Where each stage runs, counted within the pipeline; empty where that is not recorded."""
    border_bytes: tuple[tuple[float, float], ...] = ()
    """Expected bytes over the boundary behind each stage but the last, in an optimizer step: values
    forward, gradients back. Empty where that is not recorded."""


class AlertThresholds(msgspec.Struct, frozen=True):
    """Thresholds at which a viewer raises an alert; None never does."""

    loss_not_finite: bool = True
    throughput_drop: float | None = 0.5
    """Share that the throughput may lose against its median so far."""
    memory_share: float | None = 0.97
    """Share of a device's memory in use."""
    temperature_celsius: float | None = 90.0
    stall_s: float | None = 120.0
    """Time without a step of any rank while the job runs, outside validation and checkpoints."""
    job_failed: bool = True
    """The job failed or crashed while it was watched."""


class Memory(msgspec.Struct, frozen=True, gc=False):
    """Bytes in use, as the rank itself sampled them at the end of its last step."""

    host_rss_bytes: int | None
    device_allocated_bytes: int | None
    device_reserved_bytes: int | None
    device_peak_bytes: int | None


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something worth a line: a warning, a checkpoint, the start of validation, an exception."""

    time: float
    rank: int
    kind: Literal["start", "checkpoint", "validation", "warning", "error", "end"]
    message: str


class RankSnapshot(msgspec.Struct, frozen=True):
    """One rank."""

    rank: int
    pid: int | None
    host: str
    device: str
    """For example ``cpu`` or ``cuda:1 (NVIDIA H100)``."""
    device_uuid: str | None
    """As NVML spells it; joins this rank to the device readings of a viewer."""
    state: RankState
    coordinates: dict[str, int]
    """Axis name to this rank's coordinate in the mesh."""
    phase: str | None
    """Where the rank is now, or was when it was last seen."""
    global_step: int
    epoch: int
    last_seen: float
    """Wall clock of the last record, seconds since 1970."""
    steps: tuple[StepRecord, ...]
    """The newest steps that the ring still holds, oldest first."""
    samples_per_second: float | None
    """Mean of this rank over its recent steps."""
    tokens_per_second: float | None
    memory: Memory
    collectives: tuple[CollectiveTotal, ...]
    in_flight: CollectiveInFlight | None
    error: str | None
    """The exception that this rank recorded, one line, or how it died where that is known."""
    groups: tuple[GroupProgress, ...] = ()
    """Every process group that this rank has a part in and telemetry knows."""
    peers: tuple[PeerTotal, ...] = ()
    memory_kinds: tuple[MemoryKind, ...] = ()
    offload: tuple[OffloadTotal, ...] = ()
    """Empty if nothing was ever offloaded."""
    chunks: tuple[Chunk, ...] = ()
    """The newest pipeline chunks that the ring still holds, oldest first."""
    live_microbatches: tuple[LiveMicrobatches, ...] = ()
    """One for each stage of this rank; empty until a batch has trained in a pipeline."""
    flops_per_batch: float | None = None
    """Model FLOPs of one batch on this rank, forward and backward: ``flops_per_batch`` of the
    LightningModule over the ranks that share the batch, else counted in its second batch."""
    recomputed_flops_per_batch: float | None = None
    """FLOPs of activations that the backward pass of the second batch computed again, which
    hardware FLOPs have beside the model's; None where they were not counted."""
    peak_flops_per_second: float | None = None
    """Peak of the device at the run's precision, by its data sheet."""
    skipped_records: int = 0
    """Records of its file that were damaged, or of a version that this reader does not know."""
    output: tuple[str, ...] = ()
    """The newest lines that this rank has printed, oldest first, without secrets."""
    experts: tuple[ExpertLoad, ...] = ()
    """Loads of divided experts, in the order of the model."""
    is_summary: bool = False
    """Known only through the job's own store, from another host: no steps, no collectives."""

    @property
    def is_alive(self) -> bool:
        """Whether its process is there, as far as is known."""
        return self.state in {"starting", "running"}


class JobSnapshot(msgspec.Struct, frozen=True):
    """One job, all of its ranks that this host can see."""

    schema: int
    id: str
    name: str
    state: JobState
    user: str
    command: tuple[str, ...]
    folder: str
    """Working directory of the job."""
    started: float
    updated: float
    strategy: str
    """Class name, for example ``DDPStrategy``."""
    mesh: dict[str, int]
    """Axis name to size, outermost first: pipeline, data, context, tensor."""
    world_size: int
    versions: dict[str, str]
    hyperparameters: dict[str, str]
    max_steps: int | None
    epoch: int
    global_step: int
    metrics: dict[str, float]
    """The newest value of every logged metric."""
    history: tuple[MetricPoint, ...]
    """Points in the ring of rank 0, oldest first; the training loss is named ``loss``."""
    samples_per_second: float | None
    """Rate of the whole job: summed over the data axis, counted once along the other axes."""
    tokens_per_second: float | None
    ranks: tuple[RankSnapshot, ...]
    expected: tuple[ExpectedTraffic, ...]
    """Bytes that one optimizer step moves on one rank, as the strategy states them."""
    communication_note: str | None
    """Why communication is not counted, if it is not."""
    events: tuple[Event, ...]
    cause: str | None
    """Cause of a failed or crashed job, in one sentence: which rank went first, where, and why."""
    checkpoint: str | None
    """The newest checkpoint that the job wrote."""
    recipe: str | None = None
    """The config that ``boltmesh fit`` was given; None for a script."""
    pipeline: PipelinePlan | None = None
    alerts: AlertThresholds = AlertThresholds()
    trends: tuple[MetricPoint, ...] = ()
    """``step_s`` (of an optimizer step), ``tokens_per_s``, ``memory_bytes``, ``bytes_per_s``,
    ``bubble_ratio``, ``utilisation_percent``, ``power_watts``, ``temperature_celsius`` and the
    clock ``wall_s`` over the whole run, thinned, of rank 0; the tokens are those of the whole job.
    """
    tensor_plan: TensorPlanTable | None = None
    """None if no layer is divided, or no rank has recorded it."""
    stop_reason: str | None = None
    """The signal or time limit that ended the job before its last step, and after which step."""
    is_restarting: bool = False
    """It failed or crashed, and the process that starts its ranks again under this id lives."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended and is not started again, so that nothing is left to watch."""
        return self.state != "running" and not self.is_restarting

"""The headline figures of a job: one function for the screens, ``--once`` and JSON.

The model FLOPs utilisation counts what the model needs, not what was run: recomputed activations
and padding do not raise it (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311).
The hardware FLOPs utilisation of the same appendix counts recomputed activations.
"""

from collections.abc import Sequence
from statistics import fmean

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.pipelines import bubble_ratio
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.status import rates_age_s, rates_are_current
from boltmesh.tui.metrics.step_time import batches_per_step, phase_split, rank_profiles
from boltmesh.tui.state import State


class DefinedFigure(msgspec.Struct, frozen=True):
    """One number of a job."""

    value: float | None
    """None if it is not known, and for a rate of a job that is stalled or has ended."""
    definition: str
    last: float | None = None
    """The last value of such a rate."""
    age_s: float | None = None
    """Seconds since ``last``."""

    @property
    def latest(self) -> float | None:
        """The value, or the last one."""
        return self.last if self.value is None else self.value


class Figures(msgspec.Struct, frozen=True):
    """The headline figures. Shares are from 0 to 1."""

    bubble_ratio: DefinedFigure
    mfu: DefinedFigure
    model_tflops: DefinedFigure
    hfu: DefinedFigure
    hardware_tflops: DefinedFigure
    samples_per_s: DefinedFigure
    tokens_per_s: DefinedFigure
    step_s: DefinedFigure
    exposed_communication: DefinedFigure
    utilisation: DefinedFigure
    memory_bytes: DefinedFigure


@remember_last
def figures(state: State) -> Figures:
    """Return the headline figures of the job."""
    job = state.job
    flops = _flops(job, job.ranks)
    split = phase_split(job)
    rows = rank_rows(state)
    used = [row.utilization_percent for row in rows if row.utilization_percent is not None]
    memory = [row.memory_used_bytes for row in rows if row.memory_used_bytes is not None]
    is_cpu = all(row.device.startswith("cpu") for row in rows)
    return Figures(
        bubble_ratio=DefinedFigure(
            bubble_ratio(job),
            "1 - busy / window of a pipeline's ranks, mean over ranks and recorded whole steps",
        ),
        mfu=_rate(
            state,
            None if flops is None else flops.utilization,
            "model_tflops over the summed peak of the devices at the run's precision; not known of "
            "CPUs",
        ),
        model_tflops=_rate(
            state,
            None if flops is None else flops.per_second / 1e12,
            "10^12 model FLOPs a second of the ranks whose batches are seen, recomputation not "
            "counted: flops_per_batch of the module, else counted in the second batch",
        ),
        hfu=_rate(
            state,
            None if flops is None else flops.hardware_utilization,
            "hardware_tflops over the same peak",
        ),
        hardware_tflops=_rate(
            state,
            None if flops is None else _tera(flops.hardware_per_second),
            "10^12 hardware FLOPs a second of the same ranks: model FLOPs, and those of "
            "activations that the second batch computed again in its backward pass",
        ),
        samples_per_s=_rate(state, job.samples_per_second, _definition("samples")),
        tokens_per_s=_rate(state, job.tokens_per_second, _definition("tokens")),
        step_s=DefinedFigure(
            None if split is None else split.seconds * batches_per_step(job),
            "seconds of an optimizer step, mean over the ranks' newest 20 batches, or more that "
            "make whole steps, without the first 3 and those that validate or write a checkpoint",
        ),
        exposed_communication=DefinedFigure(
            None if split is None else split.share("communication"),
            "share of a step in which a rank only waits for communication, its pipeline's bubble "
            "not counted",
        ),
        utilisation=DefinedFigure(
            fmean(used) / 100 if used else None,
            "CPU time of a rank's process over time, 1 is one core, mean over the ranks"
            if is_cpu
            else "share of time in which a kernel ran on the GPU, mean over the ranks",
        ),
        memory_bytes=DefinedFigure(
            max(memory, default=None),
            "resident host memory of the rank with most"
            if is_cpu
            else "memory in use on the GPU with most; of ranks that have ended, what they had "
            "reserved",
        ),
    )


def _definition(unit: str) -> str:
    return (
        f"{unit} of all data-parallel ranks over the time of the recent steps, validation and "
        "checkpoints left out"
    )


def _rate(state: State, value: float | None, definition: str) -> DefinedFigure:
    """Return a figure of the running job; once it stalls or ends, the last value and its age."""
    if rates_are_current(state):
        return DefinedFigure(value, definition)
    age_s = None if value is None else rates_age_s(state)
    return DefinedFigure(None, definition, last=value, age_s=age_s)


def _tera(value: float | None) -> float | None:
    return None if value is None else value / 1e12


class Flops(msgspec.Struct, frozen=True):
    """FLOPs of the job, over its recent ordinary steps."""

    per_second: float
    """Model FLOPs a second of the ranks whose FLOPs are known: those of other hosts are not."""
    hardware_per_second: float | None
    """The same with activations that are computed again; None where one rank has not counted."""
    peak: float | None
    """Peak of the devices of the same ranks; None where that of one is not known."""

    @property
    def utilization(self) -> float | None:
        """Model FLOPs as a share of the peak."""
        return self.per_second / self.peak if self.peak else None

    @property
    def hardware_utilization(self) -> float | None:
        """Hardware FLOPs as a share of the peak."""
        done = self.hardware_per_second
        return None if done is None or not self.peak else done / self.peak

    @property
    def is_recomputing(self) -> bool:
        """Whether hardware FLOPs are more than the model's."""
        return self.hardware_per_second is not None and self.hardware_per_second > self.per_second


def job_flops(state: State) -> Flops | None:
    """Return the job's FLOP rate, or None if no rank knows the FLOPs of a batch."""
    return _flops(state.job, state.job.ranks) if rates_are_current(state) else None


def rank_flops(job: JobSnapshot, rank: RankSnapshot) -> Flops | None:
    """Return the same of one rank."""
    return _flops(job, (rank,))


def _flops(job: JobSnapshot, ranks: Sequence[RankSnapshot]) -> Flops | None:
    profiles, batches = rank_profiles(job), batches_per_step(job)
    done = 0.0
    hardware: float | None = 0.0
    peak: float | None = 0.0
    for rank in ranks:
        profile, model = profiles.get(rank.rank), rank.flops_per_batch
        if profile is None or model is None or model <= 0:
            continue
        batch_s = profile.step_s / batches
        done += model / batch_s
        again, known = rank.recomputed_flops_per_batch, rank.peak_flops_per_second
        if hardware is not None:
            hardware = None if again is None else hardware + (model + again) / batch_s
        peak = None if peak is None or not known or known <= 0 else peak + known
    return Flops(done, hardware, peak) if done else None

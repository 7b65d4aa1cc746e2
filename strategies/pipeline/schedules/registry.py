"""The schedules by name: their sizes, orders and bubbles. Does not import torch itself.

A module in ``orders/`` registers each schedule; docs/pipeline_schedules.md has an example.
:func:`schedule_table` returns the checked order of a schedule for given sizes.

``simulate_ideal`` and ``closed_form_bubble`` give the ideal cost of a schedule: simulated, and by
the formula of its paper. A bubble is idle time over the common window of all ranks, from the first
start to the last end, averaged over the ranks ("of total"). Transfers take no time here.
"""

import difflib
import functools
import pkgutil
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import MappingProxyType

from boltmesh.errors import ConfigError
from boltmesh.schedule_sim import (
    NOMINAL,
    Action,
    DeadlockError,
    Order,
    StageTimes,
    Timetable,
    actions,
    carried,
    idle_shares,
    of_ideal,
    peak_live_activations,
    simulate,
    stage_owners,
    window_of,
)


@dataclass(frozen=True)
class MicrobatchRule:
    """Supported numbers of microbatches; both functions get ranks and microbatches."""

    fits: Callable[[int, int], bool]
    why: Callable[[int, int], str]
    """Why a number that does not fit is refused."""


def _num_rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


IN_ROUNDS = MicrobatchRule(
    lambda ranks, count: count % _num_rounds(ranks, count) == 0,
    lambda ranks, count: (
        f"they run in {_num_rounds(ranks, count)} rounds of at least {ranks}, all equally long, "
        f"and {_num_rounds(ranks, count)} does not divide {count}"
    ),
)
"""Rule of torch's interleaved schedules."""


def _live_of_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> float:
    """Return the number of ranks; more with several stages per rank.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.2.
    """
    extra = (num_ranks - 1) / stages_per_rank if stages_per_rank > 1 else 0.0
    return min(num_ranks + extra, num_microbatches)


@dataclass(frozen=True)
class ScheduleKind:
    """Properties of a schedule in all sizes."""

    name: str
    summary: str
    source: str
    """Its paper or other description."""
    order: Callable[[int, int, int], Order]
    """Takes numbers of ranks, microbatches and stages per rank; returns the order of each rank."""
    default_stages_per_rank: int = 1
    least_stages_per_rank: int = 1
    most_stages_per_rank: int | None = 1
    """None for no limit."""
    instead: str = ""
    """The schedule to suggest for a number of stages that this one does not support."""
    microbatch_rule: MicrobatchRule | None = None
    """None: any number, from 1 on."""
    has_forwards_first: bool = False
    """Whether all forward passes of a batch come before its first backward pass, so that the loss
    may be of the whole batch."""
    splits_backward: bool = False
    """Whether gradients of inputs and weights are computed separately (I and W in place of B)."""
    overlapped_step: Callable[[int, int, int], Timetable] | None = None
    """Timetable of a step that also runs backward passes of the batch before, whose gradient is a
    step late. Takes numbers of ranks, of microbatches of the batch before, and of the step's own.
    One stage per rank. None for synchronous schedules."""
    wait_per_rank: Callable[[int, int, StageTimes], float | None] | None = None
    """Published idle time that each rank after the first adds to the window, from the numbers of
    ranks and microbatches, for equal stages; None without a closed form."""
    is_searched: bool = False
    """Whether planners try it, with its default number of stages per rank."""
    bubble_over_1f1b: float | None = None
    """Its bubble relative to that of 1F1B, approximately, with which planners preselect layouts.
    None: one over the stages per rank."""
    live_microbatches: Callable[[int, int, int], float] = _live_of_1f1b
    """Takes numbers of ranks, microbatches and stages per rank; returns the most microbatches that
    the first rank keeps at the same time in all of its stages."""
    smaller: str = ""
    """A schedule with the same bubble and fewer live activations."""
    faster: str = ""
    """A schedule with a smaller bubble, which computes gradients of weights in the gaps."""
    note: str = ""
    """A remark beside the picture of a step."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether gradients are applied a step late."""
        return self.overlapped_step is not None

    def has_stages_per_rank(self, size: int) -> bool:
        """Whether it supports ``size`` stages per rank."""
        most = self.most_stages_per_rank
        return self.least_stages_per_rank <= size and (most is None or size <= most)


@dataclass(frozen=True)
class ScheduleTable:
    """The order of one optimizer step on every rank of a pipeline."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    order: Order
    rank_of_stage: tuple[int, ...]

    @property
    def stages_per_rank(self) -> int:
        """Number of stages of each rank."""
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)


_kinds: dict[str, ScheduleKind] = {}


def register(kind: ScheduleKind) -> None:
    """Make a schedule available by its name.

    Modules in ``orders/`` call it when they are imported. A module elsewhere has to be imported on
    every rank before the strategy is built.

    Raises:
        ValueError: There is another schedule of that name.
    """
    if kind.name in _kinds:
        raise ValueError(f"There is a schedule named '{kind.name}' already. Choose another name.")
    _kinds[kind.name] = kind


def schedules() -> Mapping[str, ScheduleKind]:
    """Return all schedules by name, in the order in which they were registered."""
    _import_orders()
    return MappingProxyType(_kinds)


def searched_schedules() -> list[str]:
    """Return the names of the schedules that planners try."""
    return [name for name, kind in schedules().items() if kind.is_searched]


@functools.cache
def _import_orders() -> None:
    package = import_module(f"{__package__}.orders")
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
        import_module(f"{package.__name__}.{module.name}")


def schedule_kind(name: str) -> ScheduleKind:
    """Return a schedule by name.

    Raises:
        ConfigError: There is none of that name; with the nearest name.
    """
    known = schedules()
    if name in known:
        return known[name]
    # As people write them: 1F1B, ZB-V, interleaved-1f1b.
    plain = name.lower().replace("-", "_").replace(" ", "_")
    similar = difflib.get_close_matches(plain, known, n=1)
    hint = f"Did you mean '{similar[0]}'?" if similar else f"Use one of {', '.join(known)}."
    raise ConfigError(f"There is no schedule '{name}'. {hint}")


def check_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> int:
    """Return the stages per rank, and refuse sizes that the schedule does not support.

    Args:
        name: One of :func:`schedules`.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of one optimizer step.
        stages_per_rank: None for the schedule's default.

    Raises:
        ConfigError: The schedule does not support this size; with the nearest ones.
    """
    kind = schedule_kind(name)
    if num_ranks < 1:
        raise ConfigError(f"schedule={name} on {num_ranks} ranks: a pipeline has at least 1.")
    if num_microbatches < 1:
        raise ConfigError(
            f"microbatches={num_microbatches} leaves nothing to do: at least 1 is needed. "
            f"Set microbatches={4 * num_ranks}, four for each rank."
        )
    size = kind.default_stages_per_rank if stages_per_rank is None else stages_per_rank
    if not kind.has_stages_per_rank(size):
        raise ConfigError(_wrong_stages(kind, size))
    rule = kind.microbatch_rule
    if rule is not None and not rule.fits(num_ranks, num_microbatches):
        nearest = " or ".join(map(str, _nearest_fits(rule, num_ranks, num_microbatches)))
        raise ConfigError(
            f"microbatches={num_microbatches} with schedule={name} on {num_ranks} ranks: "
            f"{rule.why(num_ranks, num_microbatches)}. Set microbatches={nearest}."
        )
    return size


def _wrong_stages(kind: ScheduleKind, size: int) -> str:
    least, most = kind.least_stages_per_rank, kind.most_stages_per_rank
    bound = "exactly" if least == most else "at least"
    nearest = least if size < least or most is None else most
    text = (
        f"stages_per_rank={size} with schedule={kind.name}: it has {bound} {least} "
        f"stage{'s' if least > 1 else ''} on each rank. Set stages_per_rank={nearest}"
    )
    other = schedules().get(kind.instead)
    if other is not None and size >= 1 and other.has_stages_per_rank(size):
        text += f", or schedule={other.name} for {size}"
    return f"{text}."


def _nearest_fits(rule: MicrobatchRule, num_ranks: int, asked: int) -> list[int]:
    """Return the nearest fitting numbers below and above, if there are any."""
    below = range(asked - 1, 0, -1)
    above = range(asked + 1, asked + 2 * num_ranks + 1)
    nearest = [
        next((count for count in numbers if rule.fits(num_ranks, count)), None)
        for numbers in (below, above)
    ]
    return [count for count in nearest if count is not None]


def schedule_table(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> ScheduleTable:
    """Return the checked order of a schedule for given sizes.

    Arguments as for :func:`check_schedule`.

    Raises:
        ConfigError: The schedule does not support this size, or its order cannot be run.
    """
    size = check_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    order = schedule_kind(name).order(num_ranks, num_microbatches, size)
    try:
        owners = stage_owners(order)
        table = ScheduleTable(
            name=name,
            num_ranks=num_ranks,
            num_stages=num_ranks * size,
            num_microbatches=num_microbatches,
            order=order,
            rank_of_stage=tuple(rank for _, rank in sorted(owners.items())),
        )
        check_order(table)
    except ValueError as error:
        raise ConfigError(
            f"The order of schedule={name} on {num_ranks} ranks with {num_microbatches} "
            f"microbatches cannot be run: {error}. Set schedule=1f1b."
        ) from error
    return table


def check_order(table: ScheduleTable) -> None:
    """Check that every stage runs each microbatch once forward and once backward.

    Raises:
        ValueError: Work is missing, done twice, or done by the wrong rank.
        DeadlockError: A rank would wait forever.
    """
    if dict(enumerate(table.rank_of_stage)) != stage_owners(table.order):
        raise ValueError("stages are worked on by other ranks than rank_of_stage says")
    stages = [len(table.stages_of(rank)) for rank in range(table.num_ranks)]
    if stages != [table.stages_per_rank] * len(table.order):
        raise ValueError(f"ranks have {', '.join(map(str, stages))} stages")
    done = Counter(action for row in actions(table.order) for action in row)
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            forward, whole, inputs, weights = (
                done.pop((stage, kind, microbatch), 0)  # type: ignore[call-overload]
                for kind in "FBIW"
            )
            if forward != 1 or (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                raise ValueError(
                    f"microbatch {microbatch} goes {forward} times forward and "
                    f"{whole} + {inputs}/{weights} times backward through stage {stage}"
                )
    if done:
        raise ValueError(f"{next(iter(done))} is not part of the step")
    kind = _kinds.get(table.name)
    if kind is None or not kind.is_asynchronous:
        for stage, microbatch in sorted(carried(table.order)):
            rank = table.rank_of_stage[stage]
            raise DeadlockError(f"pipeline rank {rank} waits forever before {stage}B{microbatch}")
    simulate(table.order, NOMINAL.seconds)


@dataclass(frozen=True)
class Ideal:
    """One simulated step of a schedule without transfers."""

    table: ScheduleTable
    timetable: Timetable

    @cached_property
    def window(self) -> float:
        """Time from the first start to the last end on any rank."""
        return window_of(self.timetable)

    @cached_property
    def idle_shares(self) -> tuple[float, ...]:
        """Idle time of each rank over the common window."""
        return tuple(idle_shares(self.timetable))

    @property
    def bubble(self) -> float:
        """Idle over total time, averaged over the ranks."""
        return statistics.fmean(self.idle_shares)

    @property
    def bubble_of_ideal(self) -> float:
        """Idle over busy time, as Megatron and Llama 3 report it."""
        return of_ideal(self.bubble)

    @cached_property
    def peak_live_activations(self) -> tuple[int, ...]:
        """Most microbatches of one stage that each rank keeps for their backward passes."""
        return tuple(peak_live_activations(self.table.order))


def simulate_ideal(
    table: ScheduleTable, seconds: Callable[[Action], float] = NOMINAL.seconds
) -> Ideal:
    """Simulate a step without transfers; ``seconds`` may differ by stage and microbatch."""
    return Ideal(table, simulate(table.order, seconds))


def closed_form_bubble(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    times: StageTimes = NOMINAL,
) -> float | None:
    """Return the published bubble of a schedule with equal stages; None without a formula.

    Sources: GPipe, 1F1B and interleaved: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473,
    section 2.2. ZB-H1 and ZB-V: Qi et al. 2023, https://arxiv.org/abs/2401.10241, sections 2 and
    6. The conditions of each are in its module in ``orders/``.
    """
    wait_per_rank = schedule_kind(name).wait_per_rank
    wait = None if wait_per_rank is None else wait_per_rank(num_ranks, num_microbatches, times)
    if wait is None:
        return None
    idle = (num_ranks - 1) * wait
    busy = num_microbatches * stages_per_rank * (times.forward + times.backward)
    return idle / (busy + idle)

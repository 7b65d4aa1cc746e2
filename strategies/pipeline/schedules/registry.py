"""The schedules by name: where they come from, and which sizes they can be had in. No torch.

A schedule that is worked out: which rank does what, in which order. No torch.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

from boltmesh.errors import ConfigError
from boltmesh.telemetry.schedule import Order, actions

STEP = re.compile(r"(\d+)(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)")
"""One step as torch writes it: the stage, what is done, the microbatch."""


@dataclass(frozen=True)
class ScheduleTable:
    """The order of one optimizer step on every rank of a pipeline."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    order: Order
    """For each rank what it computes: ``0F3`` is stage 0's forward of microbatch 3, B the whole
    backward, I that of the input, W that of the weights. None is a slot that torch leaves empty,
    ``(0F7;7B3)OVERLAP_F_B`` a forward and a backward that may run side by side."""
    rank_of_stage: tuple[int, ...]

    @property
    def stages_per_rank(self) -> int:
        """The same on every rank."""
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return self._stages[rank]

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)
            for rank in range(self.num_ranks)
        )


def owners(order: Order) -> dict[int, int]:
    """Return the rank that works on each stage.

    Raises:
        ValueError: Two ranks work on one stage.
    """
    found: dict[int, int] = {}
    for rank, row in enumerate(actions(order)):
        for action in row:
            if found.setdefault(action.stage, rank) != rank:
                both = f"{found[action.stage]} and {rank}"
                raise ValueError(f"ranks {both} both work on stage {action.stage}")
    return found


@dataclass(frozen=True)
class ScheduleKind:
    """What is true of a schedule in every size."""

    name: str
    summary: str
    source: str
    """The paper, or who describes it."""
    default_stages_per_rank: int = 1
    least_stages_per_rank: int = 1
    most_stages_per_rank: int | None = 1
    """None: no limit."""
    instead: str = ""
    """What to use for a number of stages that this one does not have."""
    splits_backward: bool = False
    """The gradients of input and weights are computed apart."""
    is_asynchronous: bool = False
    """A step does backward passes of the batch before, whose gradient comes a step late."""
    note: str = ""
    """What a picture of one step does not show."""


_KINDS = (
    ScheduleKind(
        "gpipe",
        "all forwards, then all backwards",
        "Huang et al. 2019, https://arxiv.org/abs/1811.06965",
        instead="looped_bfs",
    ),
    ScheduleKind(
        "1f1b",
        "one forward, one backward by turns",
        "Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.1",
        instead="interleaved_1f1b",
    ),
    ScheduleKind(
        "looped_bfs",
        "all microbatches through one stage of the rank, then through the next",
        "Lamy-Poirier 2023, https://arxiv.org/abs/2211.05953",
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=None,
        instead="gpipe",
    ),
    ScheduleKind(
        "interleaved_1f1b",
        "1F1B in rounds over several stages of a rank",
        "Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.2",
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=None,
        instead="1f1b",
    ),
    ScheduleKind(
        "zero_bubble",
        "1F1B, with the gradients of weights computed where a rank would wait (ZB-H1)",
        "Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 2.1",
        most_stages_per_rank=None,
        splits_backward=True,
    ),
    ScheduleKind(
        "zbv",
        "two stages a rank in a V, with the gradients of weights in the gaps (ZB-V)",
        "Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 6",
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        instead="zero_bubble",
        splits_backward=True,
    ),
    ScheduleKind(
        "dualpipev",
        "two stages a rank in a V, forwards paired with backwards of other microbatches",
        "DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.2.1, and "
        "https://github.com/deepseek-ai/DualPipe",
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        instead="zero_bubble",
        splits_backward=True,
        note="a forward and a backward that may run side by side are shown one after the other",
    ),
    ScheduleKind(
        "pipedream_2bw",
        "1F1B without a pause between steps, on weights that are one step old",
        "Narayanan et al. 2021, https://arxiv.org/abs/2006.09503, section 3.1",
        instead="interleaved_1f1b",
        is_asynchronous=True,
        note="shown is a step between two others: it begins with backward passes of the batch "
        "before, and leaves as many of its own to the next",
    ),
)
KINDS: Final = MappingProxyType({each.name: each for each in _KINDS})
"""In the order in which they are listed to people."""


def schedule_kind(name: str) -> ScheduleKind:
    """Return what is known of a schedule.

    Raises:
        ConfigError: There is none of that name; the nearest is named.
    """
    if name in KINDS:
        return KINDS[name]
    # As people write them: 1F1B, ZB-V, interleaved-1f1b.
    plain = name.lower().replace("-", "_").replace(" ", "_")
    alike = difflib.get_close_matches(plain, KINDS, n=1)
    hint = f"Did you mean '{alike[0]}'?" if alike else f"Use one of {', '.join(KINDS)}."
    raise ConfigError(f"There is no schedule '{name}'. {hint}")


def check_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> int:
    """Return the stages of a rank, and refuse sizes that the schedule does not have.

    Args:
        name: One of :data:`KINDS`.
        num_ranks: Of the pipeline.
        num_microbatches: Of one optimizer step.
        stages_per_rank: None for what is usual with this schedule.

    Raises:
        ConfigError: It cannot be had; says what is true and names the nearest numbers that can.
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
    most = kind.most_stages_per_rank
    if size < kind.least_stages_per_rank or (most is not None and size > most):
        raise ConfigError(_wrong_stages(kind, size))
    fits = _FITS.get(name)
    if fits is not None and not fits.holds(num_ranks, num_microbatches):
        near = " or ".join(map(str, _nearest_fits(fits.holds, num_ranks, num_microbatches)))
        raise ConfigError(
            f"microbatches={num_microbatches} with schedule={name} on {num_ranks} ranks: "
            f"{fits.why(num_ranks, num_microbatches)}. Set microbatches={near}."
        )
    return size


def _wrong_stages(kind: ScheduleKind, size: int) -> str:
    least, most = kind.least_stages_per_rank, kind.most_stages_per_rank
    if least == most:
        has = f"exactly {least} stage{'s' if least > 1 else ''} on each rank"
    else:
        has = f"at least {least} stage{'s' if least > 1 else ''} on each rank"
    near = least if size < least or most is None else most
    text = f"stages_per_rank={size} with schedule={kind.name}: it has {has}. "
    text += f"Set stages_per_rank={near}"
    other = KINDS.get(kind.instead)
    if other is not None and size >= 1 and _has(other, size):
        text += f", or schedule={other.name} for {size}"
    return f"{text}."


def _has(kind: ScheduleKind, size: int) -> bool:
    most = kind.most_stages_per_rank
    return kind.least_stages_per_rank <= size and (most is None or size <= most)


@dataclass(frozen=True)
class _Fit:
    """Which numbers of microbatches a schedule has, and why no others."""

    holds: Callable[[int, int], bool]
    why: Callable[[int, int], str]


def _num_rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


_IN_ROUNDS = _Fit(
    lambda ranks, count: count % _num_rounds(ranks, count) == 0,
    lambda ranks, count: (
        f"they run in {_num_rounds(ranks, count)} rounds of at least {ranks}, all equally long, "
        f"and {_num_rounds(ranks, count)} does not divide {count}"
    ),
)
_FITS = {
    "interleaved_1f1b": _IN_ROUNDS,
    "zero_bubble": _IN_ROUNDS,
    "dualpipev": _Fit(
        lambda ranks, count: count >= 2 * ranks,
        lambda ranks, _: f"it needs at least as many as there are stages, {2 * ranks}",
    ),
    # With fewer, a microbatch would meet weights older than the two versions that are kept.
    "pipedream_2bw": _Fit(
        lambda ranks, count: count >= ranks,
        lambda ranks, _: f"two versions of the weights are enough from {ranks} on, one a rank",
    ),
}


def _nearest_fits(holds: Callable[[int, int], bool], num_ranks: int, asked: int) -> list[int]:
    """The next number below and the next above that hold, where there is one."""
    below = next((count for count in range(asked - 1, 0, -1) if holds(num_ranks, count)), None)
    above = next(
        (count for count in range(asked + 1, asked + 2 * num_ranks + 1) if holds(num_ranks, count)),
        None,
    )
    return [each for each in (below, above) if each is not None]

"""The sizes of each schedule, the errors for other sizes, and what registration refuses."""

import re

import pytest

from boltmesh.errors import ConfigError
from boltmesh.schedule_sim import Order
from boltmesh.strategies.pipeline.schedules import registry
from boltmesh.strategies.pipeline.schedules.registry import (
    ScheduleKind,
    check_schedule,
    register,
    schedule_table,
    schedules,
)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("ZB-V", "zbv"),
        ("dualpipe", "dualpipev"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("interleaved", "interleaved_1f1b"),
        ("zero bubbles", "zero_bubble"),
        ("pipedream", "pipedream_2bw"),
    ],
)
def test_a_wrong_name_names_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_schedule(asked, num_ranks=2, num_microbatches=4)
    assert str(caught.value) == f"There is no schedule '{asked}'. Did you mean '{nearest}'?"


def test_a_name_like_none_lists_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        check_schedule("chimera", num_ranks=2, num_microbatches=4)
    assert all(name in str(caught.value) for name in schedules())


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "size", "said"),
    [
        ("interleaved_1f1b", 4, 9, None, "run in 2 rounds of at least 4.* microbatches=8 or 10."),
        ("zero_bubble", 4, 14, 1, "3 does not divide 14. Set microbatches=12 or 15."),
        ("dualpipev", 4, 6, None, "at least as many as there are stages, 8. Set microbatches=8."),
        ("pipedream_2bw", 4, 3, None, "from 4 on, one a rank. Set microbatches=4."),
        ("1f1b", 4, 0, None, "at least 1 is needed. Set microbatches=16, four for each rank."),
        ("1f1b", 0, 4, None, "on 0 ranks: a pipeline has at least 1."),
        ("1f1b", 4, 8, 2, "exactly 1 stage .*stages_per_rank=1, or schedule=interleaved_1f1b for"),
        ("gpipe", 4, 8, 3, "Set stages_per_rank=1, or schedule=looped_bfs for 3."),
        ("looped_bfs", 4, 8, 1, "at least 2 .*stages_per_rank=2, or schedule=gpipe for 1."),
        ("interleaved_1f1b", 4, 8, 0, "at least 2 stages on each rank. Set stages_per_rank=2.$"),
        ("zbv", 4, 8, 1, "exactly 2 .*stages_per_rank=2, or schedule=zero_bubble for 1."),
        ("dualpipev", 4, 8, 3, "exactly 2 .*stages_per_rank=2, or schedule=zero_bubble for 3."),
        ("zero_bubble", 4, 8, 0, "at least 1 stage on each rank. Set stages_per_rank=1.$"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    name: str, ranks: int, microbatches: int, size: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_schedule(name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=size)


def refusal(name: str, ranks: int, microbatches: int) -> str | None:
    try:
        check_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble", "dualpipev", "pipedream_2bw"])
def test_every_number_that_a_message_names_works(name: str) -> None:
    num_named = 0
    for ranks in range(1, 9):
        for microbatches in range(1, 40):
            text = refusal(name, ranks, microbatches)
            if text is None:
                continue
            found = re.findall(r"Set microbatches=(\d+)(?: or (\d+))?\.", text)
            for number in filter(None, found[0]):
                assert refusal(name, ranks, int(number)) is None
                num_named += 1
    assert num_named > 20


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="named '1f1b' already"):
        register(schedules()["1f1b"])


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((("0F0", "0B0"), ("1B0", "1F0")), "pipeline rank 1 waits forever before 1B0"),
        ((("0F0", "0B0"), ("1F0",)), "microbatch 0 goes 1 times forward and 0 "),
        ((("0F0", "0B0"), ("0F0", "0B0")), "ranks 0 and 1 both work on stage 0"),
        ((("0F0", "1F0", "1B0", "0B0"),), "ranks have 2, 0 stages"),
    ],
)
def test_an_order_that_cannot_be_run_is_refused_when_it_is_built(
    monkeypatch: pytest.MonkeyPatch, order: Order, said: str
) -> None:
    known = dict(schedules())
    known["broken"] = ScheduleKind("broken", "", "", lambda *_: order)
    monkeypatch.setattr(registry, "_kinds", known)
    with pytest.raises(ConfigError, match=f"schedule=broken on 2 ranks .*{said}.*schedule=1f1b"):
        schedule_table("broken", num_ranks=2, num_microbatches=1)

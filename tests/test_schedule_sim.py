"""The simulator of pipeline schedules, against closed forms and against torch's own orders."""

import pytest

from boltmesh.schedule_sim import (
    COMPUTATIONS,
    NOMINAL,
    Action,
    DeadlockError,
    Order,
    StageTimes,
    actions,
    idle_shares,
    one_forward_one_backward,
    parse_actions,
    peak_live_activations,
    simulate,
)
from boltmesh.strategies.pipeline.schedules.actions import with_communication
from boltmesh.strategies.pipeline.schedules.orders.gpipe_1f1b import gpipe
from boltmesh.strategies.pipeline.schedules.registry import schedule_table
from tests.support.message_sim import Sends, simulate_messages
from tests.tui.recorded import recorded_pipelines

SIZES = [(stages, microbatches) for stages in range(1, 7) for microbatches in (1, 2, 3, 5, 8)]


def idle(order: Order, times: StageTimes = NOMINAL) -> list[float]:
    return idle_shares(simulate(order, times.seconds))


@pytest.mark.pairwise
@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
def test_equal_stages_idle_as_the_formula_says(
    make: type, stages: int, microbatches: int, backward: float
) -> None:
    formula = (stages - 1) / (microbatches + stages - 1)
    times = StageTimes.of(1.0, backward)
    assert idle(make(stages, microbatches), times) == pytest.approx([formula] * stages)


@pytest.mark.parametrize(
    ("name", "formula"),
    [("gpipe", 3 / 11), ("interleaved_1f1b", 3 / 19), ("zero_bubble", 0.059)],
)  # fmt: skip
def test_the_orders_of_torch_have_the_bubble_of_their_papers(name: str, formula: float) -> None:
    """Four ranks, 8 microbatches, two stages a rank where the schedule is interleaved."""
    plan = recorded_pipelines()[name].pipeline
    assert plan is not None
    mean = sum(idle(plan.order)) / len(plan.order)
    assert mean == pytest.approx(formula, abs=0.001)


def test_a_slow_stage_sets_the_pace_of_all() -> None:
    order = one_forward_one_backward(3, 6)
    timetable = simulate(order, lambda action: NOMINAL.seconds(action) * (1 + (action.stage == 1)))
    # After its first backward, which the last stage has to send, it works without a pause.
    middle = timetable[1]
    first = next(at for at, slot in enumerate(middle) if slot.action.kind == "B")
    assert all(middle[at].start == middle[at - 1].end for at in range(first + 1, len(middle)))
    assert idle_shares(timetable)[1] < min(idle_shares(timetable)[::2])


def test_a_transfer_delays_the_next_rank_only() -> None:
    order: Order = (("0F0", "1F0", "0F1"), ("2F0",))
    timetable = simulate(order, lambda _: 1.0, transfer_s=0.25)
    assert [slot.start for slot in timetable[0]] == [0.0, 1.0, 2.0]
    assert [slot.start for slot in timetable[1]] == [2.25]


def test_the_weights_wait_for_the_input_gradient_and_delay_nothing() -> None:
    order: Order = (("0F0", "0I0", "0W0"), ("1F0", "1I0", "1W0"))
    first, last = simulate(order, lambda _: 1.0)
    assert [slot.start for slot in last] == [1.0, 2.0, 3.0]
    # The input gradient of stage 0 needs that of stage 1, not its weights'.
    assert first[1].start == 3.0


def test_communication_is_left_out_and_a_pair_is_two_actions() -> None:
    order: Order = (
        ("0UNSHARD", "0F0", "0SEND_F0", None, "(0F1;1B0)OVERLAP_F_B", "0REDUCE_GRAD", "1RECV_B12"),
    )
    assert actions(order) == ((Action(0, "F", 0), Action(0, "F", 1), Action(1, "B", 0)),)


@pytest.mark.parametrize(
    ("order", "where"),
    [
        ((("0F1", "0B0"),), "rank 0 waits forever before 0B0"),
        ((("0F0", "0B0"), ("1F1", "1B1")), "before 0B0"),
        ((("0W0",),), "before 0W0"),
        ((("1F0",),), "before 1F0"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_be_worked_off_is_refused(order: Order, where: str) -> None:
    with pytest.raises(DeadlockError, match=where):
        simulate(order, lambda _: 1.0)


def test_an_empty_order_takes_no_time() -> None:
    assert simulate((), lambda _: 1.0) == ()
    assert idle_shares(simulate(((), ()), lambda _: 1.0)) == [0.0, 0.0]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_live_activations_are_all_of_them_in_gpipe_and_at_most_the_stages_in_1f1b(
    stages: int, microbatches: int
) -> None:
    assert peak_live_activations(gpipe(stages, microbatches)) == [microbatches] * stages
    assert peak_live_activations(one_forward_one_backward(stages, microbatches)) == [
        min(microbatches, stages - stage) for stage in range(stages)
    ]


def test_an_activation_is_live_until_the_weights_have_their_gradient() -> None:
    order: Order = (("0F0", "0I0", "0F1", "0W0", "0F2", "0B1", "0B2"), ())
    assert peak_live_activations(order) == [2, 0]


def test_actions_are_written_as_they_are_read() -> None:
    texts = ["0F0", "1RECV_F12", "0SEND_B3", "1I2", "1W2", "12B345"]
    assert list(map(str, parse_actions(texts))) == texts


@pytest.mark.parametrize("text", ["0UNSHARD", "F0", "0F", "0F0 1F0", "(0F1;0X0)OVERLAP_F_B", ""])
def test_an_action_that_cannot_be_run_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot run the action"):
        parse_actions([text])
    with pytest.raises(ValueError, match="cannot run the action"):
        simulate_messages(((text,),), NOMINAL.seconds, sends="buffered")


def messages(*rows: str) -> Order:
    return tuple(tuple(row.split()) for row in rows)


def test_two_ranks_that_both_send_first_are_stuck_unless_sends_are_buffered() -> None:
    order = messages(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    simulate_messages(order, NOMINAL.seconds, sends="buffered")
    stuck = "rank 0 waits forever before 0SEND_F1; pipeline rank 1 waits forever before 1SEND_B0"
    with pytest.raises(DeadlockError, match=stuck):
        simulate_messages(order, NOMINAL.seconds, sends="rendezvous")


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ("0F0 0SEND_F0", "1F0", "rank 1 waits forever before 1F0"),
        ("0SEND_F0 0F0", "1RECV_F0 1F0", "rank 0 waits forever before 0SEND_F0"),
        ("0F0 0SEND_F0", "", "rank 0 waits forever before 0SEND_F0"),
        ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0", "message for 1RECV_F1 is never received"),
        ("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1RECV_F1 1F0 1F1", "message for 1RECV_F1 in 1REC"),
        ("0F0 0SEND_F0", "1RECV_F0 1F0 1I0 1W1", "rank 1 waits forever before 1W1"),
        ("0F0 0SEND_F0", "1RECV_F0 1F0 1B1", "rank 1 waits forever before 1B1"),
    ],
)  # fmt: skip
def test_actions_without_what_they_need_are_found(first: str, last: str, said: str) -> None:
    with pytest.raises(DeadlockError, match=said):
        simulate_messages(messages(first, last), NOMINAL.seconds, sends="buffered")


def test_every_action_of_a_schedule_is_needed() -> None:
    """Without any one of them, some rank waits forever."""
    table = schedule_table("zbv", num_ranks=2, num_microbatches=4)
    rows = with_communication(table)
    for rank, row in enumerate(rows):
        for at, text in enumerate(row):
            if "W" in text:
                continue
            broken = [list(row) for row in rows]
            del broken[rank][at]
            with pytest.raises(DeadlockError):
                simulate_messages(tuple(map(tuple, broken)), NOMINAL.seconds, sends="rendezvous")


@pytest.mark.parametrize("sends", ["buffered", "rendezvous"])
def test_a_message_arrives_when_a_value_without_messages_does(sends: Sends) -> None:
    order = messages("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    computed = tuple(
        tuple(slot for slot in row if slot.action.kind in COMPUTATIONS)
        for row in simulate_messages(order, NOMINAL.seconds, transfer_s=0.25, sends=sends)
    )
    assert computed == simulate(order, NOMINAL.seconds, transfer_s=0.25)
    assert [slot.start for row in computed for slot in row] == [0.0, 4.5, 1.25, 2.25]

"""What a step will ask for is what the last one asked for."""

from boltmesh.strategies.offload.store_api import MAX_RECORDED, AccessTrace

FORWARD, BACKWARD = [0, 1, 2, 3], [3, 2, 1, 0]
STEP = FORWARD + BACKWARD


def foreseen(order: AccessTrace, asked: list[int]) -> int:
    """How many of these requests were the one to expect next."""
    hits = 0
    for index in asked:
        hits += next(order.upcoming(), None) == index
        order.note(index)
    return hits


def after(steps: list[list[int]]) -> AccessTrace:
    order = AccessTrace()
    for step in steps:
        order.begin_step()
        for index in step:
            order.note(index)
    order.begin_step()
    return order


def test_the_first_step_foresees_nothing() -> None:
    order = AccessTrace()
    order.begin_step()
    assert foreseen(order, STEP) == 0


def test_the_second_step_is_foreseen_to_its_end_and_not_further() -> None:
    order = after([STEP])
    assert foreseen(order, STEP) == len(STEP)
    assert list(order.upcoming()) == []


def test_upcoming_names_each_shard_once() -> None:
    order = after([STEP])
    assert list(order.upcoming()) == [0, 1, 2, 3]
    for index in FORWARD:
        order.note(index)
    assert list(order.upcoming()) == [3, 2, 1, 0]


def test_accumulation_is_foreseen_over_all_micro_batches() -> None:
    order = after([STEP * 3])
    assert foreseen(order, STEP * 3) == 3 * len(STEP)


def test_validation_after_the_step_is_foreseen_within_each_batch() -> None:
    order = after([STEP])
    foreseen(order, STEP)
    hits = foreseen(order, FORWARD * 5)
    assert hits == 5 * (len(FORWARD) - 1)  # each batch begins as a surprise


def test_a_layer_that_is_left_out_is_one_surprise() -> None:
    order = after([STEP])
    assert foreseen(order, [0, 1, 3, 3, 2, 1, 0]) == 6


def test_a_step_that_changes_is_foreseen_from_the_next_one_on() -> None:
    order = after([STEP, [0, 2, 1, 2, 0]])
    assert foreseen(order, [0, 2, 1, 2, 0]) == 5


def test_a_shard_that_was_never_seen_changes_nothing() -> None:
    order = after([STEP])
    assert foreseen(order, [0, 1, 9, 2, 3]) == 4


def test_an_endless_step_does_not_replace_the_last_one() -> None:
    order = after([STEP, FORWARD * MAX_RECORDED])
    assert foreseen(order, STEP) == len(STEP)

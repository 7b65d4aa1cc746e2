"""Which collective may follow which without asking, tried on every small set of journeys."""

import itertools
import random

from boltmesh.strategies.data_parallel.order_check import KnownOrder, RankCall, describe_mismatch


def journey(routes, plans):
    """Walk ranks along their plans; return what was paired, and whether somebody was caught.

    A rank that takes a free continuation waits in that collective until all take it. One that does
    not waits until all ask. Neither ever meets the other.
    """
    paired: list[tuple[int, bool]] = []
    for step in itertools.zip_longest(*plans):
        is_free = [route.matches_last(event) for route, event in zip(routes, step, strict=True)]
        if len(set(step)) > 1:
            assert not all(is_free), "ranks that part must not both be free"
            return paired, True
        assert len(set(is_free)) == 1, "ranks that are together hold one table"
        for route, event in zip(routes, step, strict=True):
            if not is_free[0]:
                route.learn(event)
                route.advance(event)
        paired.append((step[0], is_free[0]))
    return paired, False


def test_nothing_is_asked_once_steps_repeat():
    routes = [KnownOrder(), KnownOrder()]
    for turn in range(3):
        for route in routes:
            route.restart()
        paired, is_caught = journey(routes, [[1, 2, 3, 2, 1]] * 2)
        assert not is_caught
        assert [is_free for _, is_free in paired] == [turn > 0] * 5


def test_a_place_is_all_that_was_passed_and_not_the_last_event():
    route = KnownOrder()
    for events in ([1, 2, 3], [4, 2, 5]):
        route.restart()
        for event in events:
            route.learn(event)
            route.advance(event)
    route.restart()
    for event in (1, 2):
        route.advance(event)
    assert not route.matches_last(5)
    assert route.matches_last(3)


def test_ranks_that_part_are_caught_whatever_they_did_before():
    draw = random.Random(0)
    for _ in range(300):
        routes = [KnownOrder() for _ in range(3)]
        for _ in range(6):
            for route in routes:
                route.restart()
            plan = [draw.randrange(3) + 1 for _ in range(draw.randrange(1, 5))]
            assert not journey(routes, [plan] * 3)[1]
        for route in routes:
            route.restart()
        plans = [[draw.randrange(3) + 1 for _ in range(4)] for _ in range(3)]
        is_parting = len({tuple(plan) for plan in plans}) > 1
        assert journey(routes, plans)[1] == is_parting


def test_who_changes_the_route_together_asks_once_at_each_change():
    routes = [KnownOrder(), KnownOrder()]
    asked = []
    for plan in ([1, 2], [1, 2], [3, 2], [3, 2], [1, 2]):
        for route in routes:
            route.restart()
        paired, _ = journey(routes, [plan] * 2)
        asked.append(sum(not is_free for _, is_free in paired))
    assert asked == [2, 0, 2, 0, 1]


def test_the_few_are_named_first_and_the_many_are_what_they_are_measured_by():
    text = describe_mismatch(
        [RankCall(rank, "called a") for rank in (0, 1, 3)] + [RankCall(2, "ended")]
    )
    assert "collectives: rank 2 ended while ranks 0, 1, 3 called a. With" in text
    even = describe_mismatch([RankCall(1, "called b"), RankCall(0, "called a")])
    assert "collectives: rank 1 called b while rank 0 called a." in even


def test_a_thousand_ranks_are_not_all_named():
    many = describe_mismatch([RankCall(rank, "called a") for rank in range(1000)])
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more called a" in many

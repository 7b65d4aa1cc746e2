"""Simulates the messages of a pipeline's order too: whether ranks deadlock under two models.

With "buffered" a send returns at once and a receive takes the oldest message of its peer, for
neither NCCL nor gloo match messages by content. With "rendezvous" a send and its receive each block
their rank until the other one has begun, which is the least that NCCL promises.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal

from typing_extensions import override

from boltmesh.schedule_sim import (
    RECEIVES,
    SENDS,
    Action,
    DeadlockError,
    Order,
    Simulation,
    Timetable,
    parse_actions,
)

Sends = Literal["buffered", "rendezvous"]


def simulate_messages(
    order: Order, seconds: Callable[[Action], float], *, sends: Sends, transfer_s: float = 0.0
) -> Timetable:
    """Return when each action would run, of an order with sends and receives.

    Args:
        order: As ``with_communication`` gives it.
        seconds: How long a computation takes.
        sends: See above.
        transfer_s: How long a message takes.

    Raises:
        DeadlockError: A rank waits forever, a receive would take another message than its own, or
            a message is never received.
        ValueError: An action cannot be run.
    """
    rows = [parse_actions([text for text in row if text is not None]) for row in order]
    simulation = _MessageSimulation(rows, seconds, transfer_s)
    simulation.sends = sends
    return simulation.run()


class _MessageSimulation(Simulation):
    sends: Sends

    @override
    def run(self) -> Timetable:
        self._in_flight: dict[tuple[int, int], deque[tuple[Action, float]]] = {}
        """By sender and receiver, the receives that messages are for, and when they arrive."""
        found = super().run()
        for queue in self._in_flight.values():
            for receive, _ in queue:
                raise DeadlockError(f"the message for {receive} is never received")
        return found

    @override
    def _advance(self, rank: int) -> bool:
        action = self._next(rank)
        if action is not None and action.kind in SENDS:
            return self._send(rank, action)
        if action is not None and action.kind in RECEIVES:
            return self.sends == "buffered" and self._receive(rank, action)
        return super()._advance(rank)

    @override
    def _hand_on(self, rank: int, value: tuple[str, int, int], end: float) -> None:
        pass  # by a message

    def _send(self, rank: int, action: Action) -> bool:
        """Send a value; a rendezvous does the receive of the other rank too."""
        stage, kind, microbatch = action
        to_stage = stage + (1 if kind == "SEND_F" else -1)
        value = ("F" if kind == "SEND_F" else "I", stage, microbatch)
        peer = self._rank_of.get(to_stage)
        ready = self._there.get((rank, value))
        if peer is None or ready is None:
            return False
        receive = Action(to_stage, f"RECV_{kind[-1]}", microbatch)
        start = max(self._free[rank], ready)
        if self.sends == "buffered":
            queue = self._in_flight.setdefault((rank, peer), deque())
            queue.append((receive, start + self._transfer_s))
            self._record(rank, action, start, start)
            return True
        if self._next(peer) != receive:
            return False
        start = max(start, self._free[peer])
        end = start + self._transfer_s
        self._record(rank, action, start, end)
        self._record(peer, receive, start, end)
        self._there[peer, value] = end
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        stage, kind, microbatch = action
        from_stage = stage + (-1 if kind == "RECV_F" else 1)
        queue = self._in_flight.get((self._rank_of.get(from_stage, -1), rank))
        if not queue:
            return False
        receive, arrival = queue.popleft()
        if receive != action:
            raise DeadlockError(f"pipeline rank {rank} gets the message for {receive} in {action}")
        end = max(self._free[rank], arrival)
        self._record(rank, action, end, end)
        self._there[rank, ("F" if kind == "RECV_F" else "I", from_stage, microbatch)] = end
        return True

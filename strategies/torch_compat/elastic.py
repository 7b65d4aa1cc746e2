"""Joining the ranks that torchrun starts again after a failure.

torchrun keeps one store over all attempts of a job. torch writes the same keys in each attempt, so
a rank of the second would connect to addresses of the first, which are closed.
``store_of_attempt`` puts a random id before all keys, one for each attempt.

``TORCHELASTIC_RESTART_COUNT`` cannot be this id: over several hosts each counts its own failures.
The ranks agree on one through the store instead. Each writes a random number. Rank 0 answers each
with that number and the id, and again when the number changes: so a rank knows an answer to itself
from one to its predecessor. Rank 0 begins when all have written the id back.
"""

import os
import time
from datetime import timedelta
from secrets import token_hex

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from boltmesh.errors import RankError

POLL_S = 0.05


def store_of_attempt(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """Return the store of this attempt; None where the launcher makes a new store for each.

    Collective over all ranks.

    Args:
        rank: The rank of this process.
        world_size: Number of ranks.
        timeout: Wait no longer for the other ranks.

    Raises:
        RankError: They did not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    attempt = agree(PrefixStore("boltmesh-join", store), rank, world_size, timeout)
    return PrefixStore(f"boltmesh-{attempt}", store)


def agree(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a random id that all ranks of this attempt have in common. Collective.

    Args:
        store: May hold what earlier attempts have written here.
        rank: See ``store_of_attempt``.
        world_size: See ``store_of_attempt``.
        timeout: See ``store_of_attempt``.

    Raises:
        RankError: A rank is missing.
    """
    until = time.monotonic() + timeout.total_seconds()
    own = token_hex(8)
    if rank == 0:
        return _lead(store, own, range(1, world_size), until)
    store.set(f"number-{rank}", own)
    key = f"answer-{rank}"
    while True:
        if store.check([key]):
            number, attempt = store.get(key).decode().split()
            if number == own:
                store.set(f"joined-{rank}", attempt)
                return attempt
        _wait(until, "rank 0")


def _lead(store: Store, attempt: str, others: range, until: float) -> str:
    numbers: dict[int, str] = {}
    missing = set(others)
    while missing:
        for rank in sorted(missing):
            if not store.check([f"number-{rank}"]):
                continue
            number = store.get(f"number-{rank}").decode()
            if numbers.get(rank) != number:
                numbers[rank] = number
                store.set(f"answer-{rank}", f"{number} {attempt}")
            if store.check([f"joined-{rank}"]) and store.get(f"joined-{rank}").decode() == attempt:
                missing.discard(rank)
        if missing:
            _wait(until, f"rank {min(missing)}")
    return attempt


def _wait(until: float, missing: str) -> None:
    if time.monotonic() > until:
        raise RankError(
            f"{missing} has not joined the others in time. See what it printed; if it only starts "
            f"slowly, give the strategy a larger timeout_s."
        )
    time.sleep(POLL_S)

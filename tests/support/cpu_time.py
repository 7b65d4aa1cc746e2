"""How much a call computes, where other processes and this one's past may disturb it."""

import time
from collections.abc import Callable


def least_cpu_s(call: Callable[[], object], *, times: int = 3) -> float:
    """Return the CPU time of the cheapest of several calls.

    In a process that has imported torch, a garbage collection takes longer than what is measured;
    it comes in one of many calls, and in which one depends on the tests before.
    """
    spent = []
    for _ in range(times):
        begun = time.process_time()
        call()
        spent.append(time.process_time() - begun)
    return min(spent)

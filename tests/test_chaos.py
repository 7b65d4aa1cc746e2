"""Three minutes of ``tests/chaos.py``."""

from pathlib import Path

import pytest

from tests.chaos import run_chaos


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(380)
@pytest.mark.parametrize("in_memory_every", [None, 9], ids=["disk", "memory"])
def test_a_run_that_is_killed_at_random_ends_like_one_that_was_left_alone(
    tmp_path: Path, in_memory_every: int | None
) -> None:
    seen = run_chaos(tmp_path, minutes=3, every_s=(40.0, 60.0), in_memory_every=in_memory_every)
    assert sum(seen.kills.values()) >= 2
    assert len(seen.restarts) >= seen.kills["rank"] + seen.kills["half of the ranks"] >= 1

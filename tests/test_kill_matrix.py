"""Each cell of ``tests/kill_matrix.py``."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kill_matrix import STRATEGIES, kill
from tests.support.killing import MOMENTS


@pytest.mark.sample("bolt_zero3-forward", "bolt_pipeline-optimizer step")
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_ends_by_itself_and_names_the_rank_that_was_killed(
    tmp_path: Path, figure: Callable[[str, int, int], None], strategy: str, moment: str
) -> None:
    kill(tmp_path, strategy, moment)
    figure("jobs end by themselves and name the killed rank", 1, 1)

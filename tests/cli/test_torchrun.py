"""torchrun starts killed ranks again, and the run goes on from its newest checkpoint."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from boltmesh.errors import RankError
from boltmesh.strategies.torch_compat.communication import agree
from tests.cli.test_run_ranks import TINY, assert_same, boltmesh, checkpoint, fit

ROOT = Path(__file__).parents[2]
KILLS = f"{TINY.with_name('tiny.py')}:KillOnce"
LAST = Path("runs/tiny/0/checkpoints/last.ckpt")


def test_ranks_of_an_attempt_agree_though_the_store_has_the_keys_of_earlier_ones() -> None:
    store, timeout = HashStore(), timedelta(seconds=20)
    seen = set()
    for world_size in (3, 3, 4, 2):  # elastic: the next attempt may have more ranks, or fewer
        order = [*range(1, world_size), 0]
        with ThreadPoolExecutor(world_size) as pool:
            ranks = [pool.submit(agree, store, rank, world_size, timeout) for rank in order]
            (attempt,) = {each.result() for each in ranks}
        assert attempt not in seen
        seen.add(attempt)


def test_a_rank_that_does_not_come_is_named() -> None:
    store, timeout = HashStore(), timedelta(seconds=0.2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(agree, store, 1, 3, timedelta(seconds=20))
        with pytest.raises(RankError, match="rank 2 has not joined the others in time"):
            agree(store, 0, 3, timeout)
    with pytest.raises(RankError, match="rank 0 has not joined"):
        agree(store, 1, 2, timeout)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(40)
def test_torchrun_restarts_a_job_that_is_killed_twice_with_no_step_lost(tmp_path: Path) -> None:
    kills = f"trainer.callbacks=[{{class_path: '{KILLS}', init_args: {{steps: [5, 9]}}}}]"
    keep = ["checkpoint.every_n_steps=2", "strategy.timeout_s=60"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2",
        "-m", "boltmesh", *fit(*keep, kills, "resume=auto"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"from {LAST} into runs/tiny/0") == 2
    straight = tmp_path / "straight"
    straight.mkdir()
    ((first, second),) = boltmesh(straight, fit(*keep))
    assert (first[0], second[0]) == (0, 0), first
    found, expected = checkpoint(tmp_path / LAST), checkpoint(straight / LAST)
    assert found["global_step"] == 24
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(found[key], expected[key])

"""``checkpoint_in_memory_every=N``: a failure loses at most N steps, and no bit."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from boltmesh.cli import run_command
from boltmesh.configs.load import load
from boltmesh.run_folder import make_run_folder
from boltmesh.strategies.checkpoint import host_memory
from boltmesh.strategies.checkpoint.async_save import serialised, take_snapshot
from boltmesh.strategies.checkpoint.directory import find_damage, load_directory
from boltmesh.strategies.checkpoint.host_part import HostRanks, send_part, write_part
from boltmesh.telemetry.reader.reader import list_jobs, open_job
from boltmesh.telemetry.writer import memory as telemetry_memory
from tests.cli.conftest import TINY
from tests.cli.test_run_ranks import assert_same, boltmesh, checkpoint, fit, metrics
from tests.support.forked_python import BOLTMESH, ForkedPython
from tests.support.ranks import run_ranks

CODE = TINY.with_name("tiny.py")
KILLS = {
    "between copies": f"{{class_path: '{CODE}:KillOnce', init_args: {{steps: [5, 9]}}}}",
    "in a copy": f"{{class_path: '{CODE}:KillInCopy', init_args: {{step: 5}}}}",
    "before a log": f"{{class_path: '{CODE}:KillBeforeLog', init_args: {{step: 5}}}}",
}
EVERY = 4
LAST = Path("runs/tiny/0/checkpoints/last.ckpt")


@pytest.fixture(autouse=True)
def memory(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("memory")
    monkeypatch.setenv(host_memory.DIR_VARIABLE, str(folder))
    return folder


@pytest.mark.ranks
@pytest.mark.slow(60)
@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        pytest.param("bolt_zero2", "between copies", marks=pytest.mark.full),
        pytest.param("bolt_zero3", "in a copy", marks=pytest.mark.full),
        pytest.param("bolt_zero2", "before a log", marks=pytest.mark.full),
        pytest.param("bolt_ddp", "between copies", marks=pytest.mark.full),
        pytest.param("bolt_zero3_cpu", "between copies", marks=pytest.mark.full),
        pytest.param("bolt_pipeline", "in a copy", marks=pytest.mark.full),
        pytest.param("bolt_tensor", "between copies", marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on_from_memory_and_equals_one_that_was_not(
    workplace, memory, strategy, kills
):
    overrides = [f"strategy={strategy}", "trainer.val_check_interval=6"]
    more = [
        f"trainer.callbacks=[{KILLS[kills]}]", "--restarts", "3",
        f"strategy.checkpoint_in_memory_every={EVERY}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = ForkedPython(*BOLTMESH, *fit(*overrides, *more), env=environment)
    out, error = command.communicate(timeout=800)
    assert command.returncode == 0, error
    told = re.findall(r"after step (\d+);.* from step (\d+) \((.*)\)", error)
    assert len(told) == (2 if kills == "between copies" else 1), error
    assert all(int(reached) + 1 - EVERY <= int(start) for reached, start, _ in told), told
    in_memory = [start for _, start, path in told if path.startswith(str(memory))]
    assert in_memory, "the validation saves to the disk as well, and not before the first kill"
    assert re.findall(r"from memory of the hosts, step=(\d+) into", out) == in_memory
    assert not list(memory.glob("*/*")), "the memory is freed at the end"
    assert not Path("runs/tiny/0", host_memory.ID_FILE).exists()

    straight = workplace / "straight"
    straight.mkdir()
    ((first, second),) = boltmesh(straight, fit(*overrides))
    assert (first[0], second[0]) == (0, 0), first
    found, expected = (metrics(Path(each, "runs/tiny/0")) for each in (".", "straight"))
    for row in (*found.values(), *expected.values()):
        row.pop("boltmesh/bubble_ratio", None)  # a time
    assert found == expected
    for folder in (Path(), straight):
        if LAST.is_dir():
            arguments = [str(folder / LAST), "--to", str(folder / "whole.ckpt")]
            assert run_command(["export", *arguments]) == 0
        else:
            (folder / LAST).rename(folder / "whole.ckpt")
    found, whole = checkpoint(Path("whole.ckpt")), checkpoint(straight / "whole.ckpt")
    for key in ("state_dict", "optimizer_states"):
        assert_same(found[key], whole[key])


def write_and_lose(rank: int, world_size: int, folder: Path) -> object:
    """Four ranks on two hosts; returns what each loads from the part that was sent."""
    ranks = HostRanks(dist.new_group(backend="gloo"), rank, 2)
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(24.0).view(8, 3)
    tensors = {"state_dict": {"cut": distribute_tensor(whole, mesh, [Shard(0)]), "same": whole * 2}}
    kept = take_snapshot(tensors, writes_plain=ranks.is_leader)
    rest = serialised({"state_dict": {}, "boltmesh_aliases": {}, "global_step": 7})
    place = folder / f"host-{ranks.host}" / f"part-{ranks.host}" / "step=7.ckpt"
    write_part(kept, rest if rank == 0 else b"", place, ranks, is_divided=False)
    copy = folder / f"host-{1 - ranks.host}" / f"part-{ranks.host}" / "step=7.ckpt"
    other = folder / f"host-{ranks.host}" / f"part-{1 - ranks.host}" / "step=7.ckpt"
    across = 2 * (1 - ranks.host)
    send_part(
        place if ranks.is_leader else None,
        across,
        other if ranks.is_leader else None,
        across,
        ranks,
    )
    ranks.gather(None)
    assert find_damage(copy) is None
    loaded = load_directory(copy)
    cut = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])
    cut.copy_(loaded["state_dict"]["cut"])
    same = torch.zeros(8, 3)
    same.copy_(loaded["state_dict"]["same"])
    return cut.to_local(), same, loaded["global_step"]


@pytest.mark.full
@pytest.mark.ranks
def test_each_host_has_all_that_its_ranks_load_and_the_other_one_a_copy(tmp_path):
    whole = torch.arange(24.0).view(8, 3)
    for rank, (cut, same, step) in enumerate(run_ranks(write_and_lose, 4, tmp_path)):
        assert torch.equal(cut, whole[2 * rank : 2 * rank + 2])
        assert torch.equal(same, whole * 2)
        assert step == 7
    for host in range(2):
        found = host_memory.steps_in(tmp_path / f"host-{host}")
        assert {step: set(parts) for step, parts in found.items()} == {7: {0, 1}}
        files = {path.name for path in found[7][host].iterdir()}
        assert files >= {f"__{2 * host}_0.distcp", f"__{2 * host + 1}_0.distcp"}
    path = tmp_path / "host-0/part-1/step=7.ckpt/manifest.json"
    path.unlink()
    assert set(host_memory.steps_in(tmp_path / "host-0")[7]) == {0}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["strategy.checkpoint_in_memory_every=1"], "takes 2 or more"),
        (
            ["strategy.checkpoint_in_memory_every=4", "trainer.val_check_interval=1"],
            "each step ends an epoch or is followed by a validation",
        ),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(workplace, capfd, overrides, said):
    assert run_command(fit("devices=1", "strategy=bolt_ddp", *overrides)) == 2
    assert said in capfd.readouterr().err


def test_too_little_memory_is_said_before_the_first_step(workplace, monkeypatch, capfd):
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 100)
    line = fit("devices=1", "strategy=bolt_ddp", "strategy.checkpoint_in_memory_every=4")
    assert run_command(line) == 2
    assert "checkpoint_in_memory_every needs 0.000 GB on this host, and" in capfd.readouterr().err


@pytest.mark.parametrize("strategy", ["bolt_ddp", "bolt_zero2"])
def test_the_dashboard_has_the_bytes_of_copies_and_those_that_were_predicted(
    workplace, monkeypatch, strategy
):
    for name in ("MEMORY_EVERY_NS", "WALK_EVERY_NS", "MAX_SHARE"):  # at each step
        monkeypatch.setattr(telemetry_memory, name, 0)
    line = fit("devices=1", f"strategy={strategy}", f"strategy.checkpoint_in_memory_every={EVERY}")
    assert run_command([*line, "max_steps=8", "model.init_args.width=40000"]) == 0
    (job,) = list_jobs()
    with open_job(job.path) as opened:
        (rank,) = opened.snapshot().ranks
    (copies,) = (each for each in rank.memory_kinds if each.kind == "copies")
    state = 3 * 4 * 40000 * 8  # parameters and two moments in fp32, of 6 + 1 weights and a bias
    assert copies.predicted_bytes == pytest.approx(2 * state, rel=0.01)
    assert copies.measured_bytes is not None
    assert state <= copies.measured_bytes <= 1.2 * 2 * state


def test_plans_say_how_much_memory_the_copies_take(workplace, capfd):
    for ranks, hosts, size in ((2, 1, "10.02 MiB"), (1, 2, "20.03 MiB")):
        line = ["plan", "zero2", "strategy.checkpoint_in_memory_every=20", f"devices={ranks}"]
        assert run_command([*line, f"trainer.num_nodes={hosts}"]) == 0
        said = capfd.readouterr().out
        assert f"checkpoint_in_memory_every=20 takes {size} of host memory for each rank" in said
    line = ["plan", "ddp", "strategy.checkpoint_in_memory_every=20", "devices=2"]
    assert run_command(line) == 0
    assert re.search(r"takes [\d.]+ MiB of host memory in all", capfd.readouterr().out)


def test_prune_deletes_what_a_killed_launcher_has_left_in_memory(workplace, memory, capfd):
    run = workplace / "runs/tiny/0"
    run.mkdir(parents=True)
    copies = host_memory.make_user_folder() / f"{host_memory.make_run_id(run)}-bolt_ddp-1x2x1-1"
    (copies / "part-0").mkdir(parents=True)
    (copies / "part-0/step=8.ckpt").write_bytes(b"a copy")
    (copies / host_memory.RUN_FILE).write_text(str(run))
    assert host_memory.newest_step_in_memory(run) == (copies / "part-0/step=8.ckpt", 8)
    assert run_command(["prune", "runs"]) == 0
    assert copies.exists(), "a restart may be about to come"
    for each in (copies, copies / "part-0"):
        os.utime(each, (0, 0))
    assert run_command(["prune", "runs"]) == 0
    assert f"{copies} (copies in memory" in capfd.readouterr().out
    assert not copies.exists()


def test_a_prediction_beside_a_run_that_may_go_on_has_a_folder_of_its_own(workplace):
    run = Path("runs/tiny/0")
    run.mkdir(parents=True)
    host_memory.make_run_id(run)
    config = load(TINY, ["resume=auto"])
    assert make_run_folder(config, None) == run
    assert make_run_folder(config, None, is_fit=False) == Path("runs/tiny/1")

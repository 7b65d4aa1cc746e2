"""``resume=auto`` takes the newest checkpoint that holds what was written, and says what it passes
over."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from boltmesh.cli import run_command
from boltmesh.errors import CheckpointError
from boltmesh.run_folder import newest_verified_checkpoint
from boltmesh.strategies.checkpoint.file import load_file
from tests.cli.conftest import TINY
from tests.cli.test_run_ranks import boltmesh, fit

KEPT = Path("runs/tiny/0/checkpoints")
OLD, NEW = "epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"
FILES, SHARDS = "strategy.name=bolt_ddp", "strategy.name=bolt_zero3"


def flip(path: Path, part: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * part)] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a file with a flipped bit": (FILES, flip),
    "a file that was cut short": (FILES, cut),
    "an empty file": (FILES, lambda path: path.write_bytes(b"")),
    "a file of zeros": (FILES, lambda path: path.write_bytes(bytes(path.stat().st_size))),
    "a shard with a flipped bit": (SHARDS, lambda path: flip(path / "__0_0.distcp")),
    "a shard that is missing": (SHARDS, lambda path: (path / "__0_0.distcp").unlink()),
    "a damaged meta.pt": (SHARDS, lambda path: flip(path / "meta.pt")),
    "a damaged manifest": (SHARDS, lambda path: flip(path / "manifest.json")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_whole_one_is_taken(
    kind: str, workplace: Path, capfd, figure: Callable[[str, int, int], None]
) -> None:
    strategy, harm = DAMAGE[kind]
    line = ["fit", str(TINY), "devices=1", strategy]
    keep = ["checkpoint.every_n_steps=4", "checkpoint.save_top_k=-1", "checkpoint.save_last=false"]
    assert run_command([*line, *keep, "max_steps=8"]) == 0
    assert sorted(each.name for each in KEPT.iterdir()) == [OLD, NEW]
    harm(KEPT / NEW)
    harmed = [KEPT / NEW, *(KEPT / NEW).rglob("*")]
    before = {path: path.read_bytes() for path in harmed if path.is_file()}
    capfd.readouterr()
    assert run_command([*line, *keep, "max_steps=8", "resume=auto"]) == 0
    out, error = capfd.readouterr()
    assert f"from {KEPT / OLD} into runs/tiny/0" in out
    (said,) = [each for each in error.splitlines() if each.startswith("boltmesh: passed over")]
    assert said.startswith(f"boltmesh: passed over {KEPT / NEW}: ")
    # The run has written it once more, and what was damaged is kept.
    assert said.endswith(f"; it is now {NEW}.damaged")
    assert {each.name for each in KEPT.iterdir()} == {OLD, NEW, f"{NEW}.damaged"}
    for path, data in before.items():
        assert (KEPT / f"{NEW}.damaged" / path.relative_to(KEPT / NEW)).read_bytes() == data
    assert newest_verified_checkpoint(KEPT.parents[1], "run.resume") == KEPT / NEW
    assert run_command(["validate", str(TINY), "devices=1", strategy]) == 0
    figure("kinds of damage of the newest checkpoint: the one before it is taken", 1, 1)


def test_without_a_whole_one_nothing_begins_anew(workplace: Path, capfd) -> None:
    line = ["fit", str(TINY), "devices=1", "max_epochs=1"]
    assert run_command([*line, "checkpoint.every_n_steps=8", "checkpoint.save_top_k=-1"]) == 0
    names = sorted(each.name for each in KEPT.iterdir())
    for each in KEPT.iterdir():
        cut(each)
    for verb, key in (("fit", "resume"), ("validate", "ckpt_path")):
        capfd.readouterr()
        for _ in range(2):
            assert run_command([verb, *line[1:], f"{key}=auto"]) == 2
        said = capfd.readouterr().err.splitlines()
        assert len(said) == 2, said
        assert said[0].startswith(
            f"boltmesh: run.{key}=auto finds no whole checkpoint below runs/tiny: "
        )
        assert "and neither are " in said[0]
        assert said[1] == said[0]
    assert sorted(each.name for each in KEPT.iterdir()) == names
    assert not Path("runs/tiny/1").exists()


def test_a_dry_run_and_a_folder_that_may_not_be_written_change_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["fit", str(TINY), "devices=1", "max_epochs=1", "checkpoint.every_n_steps=8"]
    assert run_command([*line, "checkpoint.save_top_k=-1"]) == 0
    shutil.copy(KEPT / "last.ckpt", KEPT / "later.ckpt")
    flip(KEPT / "later.ckpt")
    (KEPT / "foreign.ckpt").mkdir()  # of another program, say
    names = sorted(each.name for each in KEPT.iterdir())
    assert run_command([*line, "resume=auto", "--dry-run"]) == 0

    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        found = newest_verified_checkpoint(Path("runs/tiny"), "run.resume")
    assert found is not None
    assert found.name not in {"later.ckpt", "foreign.ckpt"}
    assert sorted(each.name for each in KEPT.iterdir()) == names


@pytest.mark.ranks
def test_all_ranks_load_what_the_first_has_verified(tmp_path: Path) -> None:
    keep = ("checkpoint.every_n_steps=4", "checkpoint.save_top_k=-1", "checkpoint.save_last=false")
    (first,) = boltmesh(tmp_path, fit(*keep, "max_steps=8"))
    assert [code for code, _, _ in first] == [0, 0], first
    flip(tmp_path / KEPT / NEW)
    resumed, validated = boltmesh(
        tmp_path, fit(*keep, "max_steps=6", "resume=auto"), ["validate", str(TINY)]
    )
    assert [code for code, _, _ in (*resumed, *validated)] == [0, 0, 0, 0], resumed
    assert f"from {KEPT / OLD} into runs/tiny/0" in resumed[0][1]
    assert f"passed over {KEPT / NEW}: it was damaged after it was written, " in resumed[0][2]
    assert "passed over" not in resumed[1][2]


def test_a_pipe_is_no_checkpoint(workplace: Path, capfd) -> None:
    line = ["fit", str(TINY), "devices=1", "max_epochs=1", "checkpoint.every_n_steps=8"]
    assert run_command(line) == 0
    os.mkfifo(KEPT / "later.ckpt")
    assert run_command([*line, "resume=auto"]) == 0
    said = f"passed over {KEPT}/later.ckpt: it is not a plain file\n"
    assert said in capfd.readouterr().err
    assert run_command([*line, f"resume={KEPT}/later.ckpt"]) == 2
    assert "later.ckpt is neither a file nor a directory" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match="it is not a plain file"):
        load_file(KEPT / "later.ckpt")

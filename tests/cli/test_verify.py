"""``boltmesh verify`` reads every byte, and names what is not whole."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from boltmesh.cli import run_command
from boltmesh.conversion.import_checkpoint import save_alone
from tests.cli.conftest import TINY

RECORDING = Path(__file__).parents[1] / "guards" / "data" / "recording"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def check(capfd, *paths: object) -> tuple[int, list[str]]:
    capfd.readouterr()
    code = run_command(["verify", *map(str, paths)])
    return code, capfd.readouterr().out.splitlines()


@pytest.fixture
def folder(workplace: Path) -> Path:
    """One of each kind."""
    line = ["fit", str(TINY), "devices=1", "max_steps=2", "checkpoint.save_last=false"]
    assert run_command(line) == 0
    (file,) = Path("runs/tiny/0/checkpoints").glob("*.ckpt")
    kept = Path("kept")
    kept.mkdir()
    shutil.copy(file, kept / "file.ckpt")
    shutil.copy(RECORDING, kept / "recording")
    save_alone(torch.load(file, weights_only=True), kept / "shards.ckpt")
    weights = str(kept / "weights.safetensors")
    assert run_command(["export", str(file), "--to", weights, "--prefix", ""]) == 0
    return kept


def test_all_of_a_folder_is_whole_and_each_damage_is_named(folder: Path, capfd) -> None:
    code, lines = check(capfd, folder)
    assert (code, lines[-1]) == (0, "4 whole, 0 not"), lines
    kinds = {"checkpoint file", "directory of shards", "recording", "safetensors"}
    assert {line.rpartition("(")[2].rstrip(")") for line in lines[:-1]} == kinds
    (shard,) = (folder / "shards.ckpt").glob("*.distcp")
    for path, said in (
        (folder / "file.ckpt", "file.ckpt (checkpoint file): it was damaged after it was"),
        (folder / "recording", "recording (recording): after "),
        (folder / "weights.safetensors", "weights.safetensors (safetensors): its checksum is"),
        (shard, "shards.ckpt (directory of shards): "),
    ):
        before = path.read_bytes()
        flip(path, len(before) * 2 // 3 if path != folder / "weights.safetensors" else -2)
        code, lines = check(capfd, folder)
        assert (code, lines[-1]) == (1, "3 whole, 1 not"), lines
        (line,) = [each for each in lines if each.startswith("NOT WHOLE")]
        assert said in line
        path.write_bytes(before)
    assert check(capfd, folder)[0] == 0


def test_what_is_cut_short_or_is_no_file_is_not_whole(folder: Path, capfd) -> None:
    for name in ("file.ckpt", "recording", "weights.safetensors"):
        os.truncate(folder / name, (folder / name).stat().st_size - 1)
    (folder / "shards.ckpt" / "manifest.json").unlink()
    os.mkfifo(folder / "pipe.ckpt")
    (folder / "empty.ckpt").touch()
    (folder / "odd.safetensors").write_bytes(b"\\xff" * 9)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))
    code, lines = check(capfd, folder)
    assert (code, lines[-1]) == (1, "0 whole, 8 not"), lines
    assert check(capfd, "absent") == (1, ["NOT WHOLE  absent (no file): it does not exist"])
    (folder / "nothing").mkdir()
    code, lines = check(capfd, folder / "nothing", TINY)
    assert code == 1
    assert "it has no checkpoint, recording or export" in lines[0]


def test_every_bit_of_an_export_counts_and_other_programs_read_it(folder: Path, capfd) -> None:
    path = folder / "weights.safetensors"
    content = path.read_bytes()
    assert load_file(path)
    for at in range(0, len(content), 7):
        flip(path, at)
        assert check(capfd, path)[0] == 1, at
        if at % 77 == 0 and b"boltmesh_crc32" in path.read_bytes():
            assert run_command(["import", str(path), "--to", "imported"]) == 2, at
            assert not Path("imported").exists()
        path.write_bytes(content)
    assert check(capfd, path)[0] == 0
    assert run_command(["import", str(path), "--to", "imported"]) == 0


def test_a_file_without_checksums_is_not_called_whole(workplace: Path, capfd) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"a": torch.arange(9)}}, "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    code, (line,) = check(capfd, "a.ckpt")
    assert code == 1
    assert "it has no checksums" in line

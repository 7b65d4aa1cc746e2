"""What a checkpoint's name leads to and cannot be read is named in one line, and leaves no run."""

import errno
import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from boltmesh.cli import run_command
from boltmesh.errors import ConfigError
from boltmesh.run_folder import checkpoint_to_resume
from boltmesh.strategies.checkpoint.archive_check import find_damage
from boltmesh.strategies.checkpoint.file import load_file
from boltmesh.strategies.checkpoint.storage import addresses
from boltmesh.strategies.checkpoint.storage.folder import LocalFolder
from tests.cli.conftest import TINY


def resume(place: str) -> Any:
    return checkpoint_to_resume(OmegaConf.create({"run": {"resume": place}}))


@pytest.mark.parametrize("place", ["reference://x", "dir://x", "simplecache://x"])
def test_an_address_that_needs_more_than_itself_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place} cannot be opened: "):
        resume(place)


@pytest.mark.parametrize("place", ["x" * 300 + ".ckpt", "a/" * 3000], ids=["name", "path"])
def test_a_name_that_is_too_long_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: File name too long\.$"):
        resume(place)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def test_a_server_that_refuses_is_told_from_a_missing_checkpoint(server: socket.socket) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: ClientConnectorError: Cannot connect"):
        resume(f"http://127.0.0.1:{server.getsockname()[1]}/last.ckpt")


def test_a_server_that_does_not_answer_is_given_up(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "HTTP_PATIENCE_S", 0.2)
    server.listen()
    with pytest.raises(ConfigError, match=r"cannot be read: SocketTimeoutError"):
        resume(f"http://127.0.0.1:{server.getsockname()[1]}/last.ckpt")


class FailingFile(io.FileIO):
    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_a_read_error_names_the_file_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with FailingFile(path) as file, pytest.raises(OSError, match="Input/output error"):
        find_damage(file)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode: FailingFile(self))
        with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
            load_file(path)
    monkeypatch.setattr(LocalFolder, "_open", lambda self, name: FailingFile(path))
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        LocalFolder(tmp_path).read("last.ckpt")


@pytest.mark.parametrize("kind", ["file", "shard"])
def test_a_damaged_one_that_is_named_leaves_no_run(kind: str, workplace: Path, capfd) -> None:
    if kind == "file":
        Path("bad.ckpt").write_bytes(bytes(3000))
        damage = "it is damaged, "
    else:
        line = ["fit", str(TINY), "devices=1", "strategy.name=bolt_zero3", "max_steps=1"]
        assert run_command([*line, "run.dir=other"]) == 0
        Path("other/tiny/0/checkpoints/last.ckpt").rename("bad.ckpt")
        shard = Path("bad.ckpt/__0_0.distcp")
        data = bytearray(shard.read_bytes())
        data[100] ^= 1
        shard.write_bytes(data)
        damage = "bad.ckpt/__0_0.distcp was damaged after it was written"
    for verb, key in (("fit", "resume"), ("predict", "ckpt_path")):
        capfd.readouterr()
        assert run_command([verb, str(TINY), "devices=1", f"{key}=bad.ckpt"]) == 2
        said = capfd.readouterr().err
        assert f"boltmesh: run.{key}=bad.ckpt cannot be loaded: {damage}" in said
        assert said.count("Resume from another checkpoint.") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("strategy", ["bolt_ddp", "bolt_zero3"])
def test_the_newest_that_cannot_be_read_is_passed_over_and_stays(
    strategy: str, workplace: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [
        "fit",
        str(TINY),
        "devices=1",
        f"strategy.name={strategy}",
        "checkpoint.save_last=false",
    ]
    save = ["checkpoint.every_n_steps=4", "checkpoint.save_top_k=-1"]
    assert run_command([*line, *save, "max_steps=8"]) == 0
    kept = Path("runs/tiny/0/checkpoints")
    old, new = kept / "epoch=0-step=4.ckpt", kept / "epoch=0-step=8.ckpt"
    before = {path: path.read_bytes() for path in (new, *new.rglob("*")) if path.is_file()}
    open_path, open_inside = Path.open, LocalFolder._open
    with monkeypatch.context() as patch:
        patch.setattr(
            Path,
            "open",
            lambda path, *args, **more: (
                FailingFile(path) if path == new else open_path(path, *args, **more)
            ),
        )
        patch.setattr(
            LocalFolder,
            "_open",
            lambda folder, name: (
                FailingFile(new / name)
                if folder._path == new and name.endswith(".distcp")
                else open_inside(folder, name)
            ),
        )
        capfd.readouterr()
        # It deletes what its state does not name, and is older than what it goes on from.
        assert run_command([*line, "max_steps=6", "resume=auto"]) == 0
        out, error = capfd.readouterr()
    assert f"boltmesh: passed over {new}: it cannot be read (Input/output error)\n" in error
    assert f"from {old} into" in out
    assert {path: path.read_bytes() for path in before} == before
    assert not list(kept.glob("*.damaged"))

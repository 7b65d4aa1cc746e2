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


def test_a_damaged_file_that_is_named_leaves_no_run(workplace: Path, capfd) -> None:
    Path("bad.ckpt").write_bytes(bytes(3000))
    for verb, key in (("fit", "resume"), ("predict", "ckpt_path")):
        assert run_command([verb, str(TINY), "devices=1", f"{key}=bad.ckpt"]) == 2
        said = capfd.readouterr().err
        assert f"boltmesh: run.{key}=bad.ckpt cannot be loaded: it is damaged, " in said
    assert not Path("runs").exists()

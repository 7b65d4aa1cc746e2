"""A run goes on from an address: a checkpoint there, or the newest complete one of a folder."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from omegaconf import OmegaConf

from boltmesh.errors import ConfigError
from boltmesh.run_folder import check_run_dir, checkpoint_to_evaluate, checkpoint_to_resume


@pytest.fixture
def memory() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/runs"):
        memory.rm("/runs", recursive=True)


def asked(place: str) -> Any:
    return OmegaConf.create({"run": {"resume": place, "ckpt_path": place, "dir": place}})


def write(memory: Any, name: str, *, is_complete: bool = True) -> None:
    for file in (".metadata", "meta.pt"):
        memory.pipe_file(f"/runs/{name}/{file}", b"abc")
    if is_complete:
        files = {".metadata": {"bytes": 3}, "meta.pt": {"bytes": 3}}
        content = json.dumps({"format": 1, "files": files}).encode()
        memory.pipe_file(f"/runs/{name}/manifest.json", content)


def test_the_newest_complete_checkpoint_of_a_folder_is_taken(memory: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume=memory://runs is no complete checkpoint"):
        checkpoint_to_resume(asked("memory://runs/"))
    write(memory, "step=3.ckpt", is_complete=False)
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        checkpoint_to_resume(asked("memory://runs"))
    write(memory, "step=2.ckpt")
    write(memory, "step=1.ckpt")
    memory.pipe_file("/runs/last.ckpt", b"a file of Lightning")
    earlier = datetime.now(tz=timezone.utc) - timedelta(hours=1)
    for name in ("step=1.ckpt/manifest.json", "last.ckpt"):
        memory.store[f"/runs/{name}"].modified = earlier
    for find in (checkpoint_to_resume, checkpoint_to_evaluate):
        assert find(asked("memory://runs/")) == "memory://runs/step=2.ckpt"
        for name in ("step=1.ckpt", "last.ckpt"):
            assert find(asked(f"memory://runs/{name}")) == f"memory://runs/{name}"
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        checkpoint_to_resume(asked("memory://runs/step=3.ckpt"))


def test_an_unknown_address_and_a_remote_run_folder_are_refused(memory: Any) -> None:
    with pytest.raises(ConfigError, match="unheard-of://runs cannot be opened: Protocol not"):
        checkpoint_to_resume(asked("unheard-of://runs"))
    with pytest.raises(ConfigError, match=r"run\.dir=memory://runs is on a remote file system"):
        check_run_dir(asked("memory://runs"))

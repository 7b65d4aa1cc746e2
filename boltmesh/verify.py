"""Reads every byte of checkpoints, recordings and exports, and says which are whole.

Each has checksums of its own: a directory of shards one per piece and file, a file of
``torch.save`` one per record, a recording one per frame, an exported safetensors file one.
Nothing is loaded or changed.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

from typing_extensions import override

from boltmesh.errors import BoltMeshError, TelemetryError
from boltmesh.strategies.checkpoint import archive_check
from boltmesh.strategies.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    REST,
    is_trainable_only,
)
from boltmesh.strategies.checkpoint.storage.addresses import as_os_errors, is_file, open_address
from boltmesh.strategies.checkpoint.storage.folder import folder_at
from boltmesh.tui.sources.frames import MAGIC, read_frame, read_magic

CHECKPOINT = ".ckpt"
SAFETENSORS = ".safetensors"
INDEX = ".safetensors.index.json"
THREADS = 4


class Verified(NamedTuple):
    """One checkpoint, recording or export that was read."""

    place: str | Path
    kind: str
    fault: str | None
    """Why it is not whole, in words."""

    @override
    def __str__(self) -> str:
        if self.fault is None:
            return f"whole      {self.place} ({self.kind})"
        return f"NOT WHOLE  {self.place} ({self.kind}): {self.fault}"


def verify(places: Iterable[str | Path]) -> Iterator[Verified]:
    """Verify some paths or addresses; of a folder, everything in it."""
    for place in places:
        if _is_folder(place):
            yield from _verify_folder(place)
        else:
            yield _verify_file(place)


def _is_folder(place: str | Path) -> bool:
    if isinstance(place, Path):
        return place.is_dir()
    return not is_file(place) and folder_at(place).is_there()


def _verify_folder(folder: str | Path) -> Iterator[Verified]:
    if not isinstance(folder, Path) or _is_checkpoint(folder):
        yield _verify_shards(folder)
        return
    has_found = False
    for path in _files_below(folder):
        has_found = True
        yield _verify_shards(path) if path.is_dir() else _verify_file(path)
    if not has_found:
        yield Verified(folder, "folder", "it has no checkpoint, recording or export")


def _files_below(folder: Path) -> Iterator[Path]:
    """Paths of checkpoints, recordings and exports; links are not followed."""
    for where, folders, files in os.walk(folder):
        here = Path(where)
        for name in sorted(folders):
            if _is_checkpoint(here / name):
                yield here / name
        folders[:] = sorted(
            name
            for name in folders
            if not _is_checkpoint(here / name) and CHECKPOINT not in here.joinpath(name).suffixes
        )
        for name in sorted(files):
            path = here / name
            is_known = name.endswith((CHECKPOINT, SAFETENSORS, INDEX)) or _is_recording(path)
            if is_known and not path.is_symlink():
                yield path


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a directory of shards, complete or not."""
    if folder.is_symlink():
        return False
    has_parts = any((folder / name).exists() for name in (MANIFEST, METADATA, REST))
    return folder.name.endswith(CHECKPOINT) or (has_parts and CHECKPOINT not in folder.suffixes)


def _is_recording(path: Path) -> bool:
    try:
        with path.open("rb") if path.is_file() else BytesIO() as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _verify_shards(place: str | Path) -> Verified:
    from boltmesh.strategies.checkpoint.directory import find_damage

    found = _read(place, "directory of shards", lambda: find_damage(place, threads=THREADS))
    if found.fault is None and is_trainable_only(folder_at(place)):
        return found._replace(kind=f"{found.kind}, trained parameters alone")
    return found


def _verify_file(place: str | Path) -> Verified:
    if not isinstance(place, Path):
        return _read(place, "checkpoint file", lambda: _damage_at_address(place))
    if not place.is_file():
        fault = "it is not a plain file" if place.exists() else "it does not exist"
        return Verified(place, "no file", fault)
    if place.name.endswith(INDEX):
        return _read(place, "index of safetensors", lambda: _damage_of_index(place))
    if place.name.endswith(SAFETENSORS):
        from boltmesh.conversion.safetensors_files import find_damage

        return _read(place, "safetensors", lambda: find_damage(place))
    if _is_recording(place):
        return _read(place, "recording", lambda: _damage_of_recording(place))
    return _read(place, "checkpoint file", lambda: _damage_of_file(place))


def _read(place: str | Path, kind: str, find_damage: Callable[[], str | None]) -> Verified:
    try:
        fault = find_damage()
    except (BoltMeshError, OSError) as error:
        fault = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    return Verified(place, kind, fault)


def _damage_at_address(address: str) -> str | None:
    system, path = open_address(address)
    with as_os_errors(), system.open(path, "rb") as file:
        return _damage_of_archive(file)


def _damage_of_file(path: Path) -> str | None:
    with path.open("rb") as file:
        return _damage_of_archive(file)


def _damage_of_archive(file: IO[bytes]) -> str | None:
    fault = archive_check.find_damage(file)
    if fault is None and not archive_check.has_checksums(file):
        return "it has no checksums, so that nothing can be said about its values"
    return fault


def _damage_of_recording(path: Path) -> str | None:
    num_frames = 0
    with path.open("rb") as file:
        try:
            read_magic(file)
            while read_frame(file) is not None:
                num_frames += 1
        except TelemetryError as error:
            return f"after {num_frames} whole frames {str(error).removesuffix('.')}"
    return None if num_frames else "it has no frame"


def _damage_of_index(path: Path) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "it is damaged"
    missing = [name for name in names if not (path.parent / Path(str(name)).name).is_file()]
    return f"{missing[0]} is not there" if missing else None

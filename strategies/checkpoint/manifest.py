"""The manifest of a directory of shards, which lists its files. Plain Python, without torch.

The manifest is the last file to be written: a directory without one, or one that lacks a file or
has one of another size, is not a checkpoint. (A truncated copy looks like that, and on a remote
file system a save that was killed; a directory on a disk is renamed when it is complete.)
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.archive_check import is_damage
from boltmesh.strategies.checkpoint.storage.folder import LAST, Draft, Folder, folder_at

MANIFEST = LAST
METADATA = ".metadata"
"""Name of the file with the positions of all pieces of tensors, as torch calls it."""
REST = "meta.pt"
"""Name of the file with everything except shards, as Lightning calls it."""

CRC32 = "crc32"
"""Key of a checksum: in a file's entry that of the file, at the top that of the other keys."""

FORMAT = 3
"""Formats 1 and 2 have no ``SAVE``: checksums of pieces are also right for those of other saves.
In format 2 and, on a remote file system, in format 3 the files may be in a subfolder, if the
directory replaced another one."""
NEWER = "it has format"
"""Start of the fault message for a directory that is complete, but newer than this version."""
TRAINABLE_ONLY = "trainable_only"
"""Key that is true in a directory without the frozen parameters of its model."""
SAVE = "save"
"""Key of the random id of a save. The checksum of each piece of a tensor begins with it."""


class Written(NamedTuple):
    """Size and checksum of a written file."""

    num_bytes: int
    crc32: int | None
    """None for files of shards, in which each piece has a checksum."""


def write_manifest(
    draft: Draft, *, world_size: int, files: Mapping[str, Written], is_trainable_only: bool = False
) -> None:
    """Write the list of all files of a directory, which completes it.

    Raises:
        CheckpointError: If a file is missing, as when ranks see different folders, or truncated.
    """
    entries: dict[str, dict[str, int]] = {}
    for name, (num_bytes, crc32) in sorted(files.items()):
        try:
            stored_bytes = draft.size(name)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"it holds no {name}, which another rank has written. "
                f"Write checkpoints to a folder that all machines share"
            ) from error
        if stored_bytes != num_bytes:
            raise CheckpointError(
                f"{name} has {stored_bytes} bytes there, and {num_bytes} were written"
            )
        entries[name] = {"bytes": num_bytes}
        if crc32 is not None:
            entries[name][CRC32] = crc32
    content: dict[str, Any] = {
        "format": FORMAT,
        SAVE: draft.save,
        "world_size": world_size,
        "files": entries,
    }
    if draft.within:
        content["within"] = draft.within
    if is_trainable_only:
        content[TRAINABLE_ONLY] = True
    content[CRC32] = zlib.crc32(_encode(content))
    draft.finish(_encode(content), list(entries))


def find_fault(place: str | Path, *, checks_files: bool = True) -> str | None:
    """Return why a directory is no complete checkpoint of boltmesh; None if it is one.

    It is enough if one rank checks all files; without ``checks_files`` only the manifest is read.

    Args:
        place: Path or address of the directory.
        checks_files: Check that all files exist, with their sizes.

    Raises:
        OSError: If the medium cannot be read.
    """
    folder = folder_at(place)
    try:
        content = _read_manifest(folder)
        form, files = int(content["format"]), dict(content["files"])
        inside = folder.inside(str(content.get("within", "")))
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        return f"its {MANIFEST} cannot be read ({getattr(error, 'strerror', None) or error})"
    except CheckpointError as error:
        return str(error)
    if form > FORMAT:
        return f"{NEWER} {form}, and this version of boltmesh reads up to {FORMAT}"
    for name in sorted({*files, METADATA, REST}) if checks_files else ():
        try:
            expected = int(files[name]["bytes"])
            size = inside.size(name)
        except (KeyError, TypeError, ValueError):
            return f"its {MANIFEST} does not tell the size of {name}"
        except FileNotFoundError as error:
            return f"{name} is not there ({error.strerror or error})"
        except OSError as error:
            if not is_damage(error):
                raise
            return f"{name} cannot be read ({error.strerror or error})"
        if size != expected:
            return f"{name} has {size} bytes instead of {expected}"
    return None


def is_trainable_only(folder: Folder) -> bool:
    """Whether a directory that has passed ``find_fault`` leaves out frozen parameters."""
    return bool(_read_manifest(folder).get(TRAINABLE_ONLY, False))


def files_of(folder: Folder) -> tuple[Folder, str]:
    """Return the folder of a checked directory's files, and the id of its save.

    The id is ``""`` if an earlier version wrote it. Checked by ``find_fault``.
    """
    content = _read_manifest(folder)
    return folder.inside(str(content.get("within", ""))), str(content.get(SAVE, ""))


def checksum_start(save: str, name: str, offset: int) -> int:
    """Return the value at which the CRC-32 of a piece starts.

    The checksum is then only right for bytes of this save, in this file, at this offset: a shard of
    another save or rank with the same length is recognized as wrong.

    Args:
        save: Id of the save; ``""`` if an earlier version wrote it.
        name: Name of the file.
        offset: Offset of the piece in the file.
    """
    return zlib.crc32(f"{save}/{name}/{offset}".encode()) if save else 0


def read_checked(folder: Folder, name: str) -> bytes:
    """Return a small file of a directory that has passed ``find_fault``.

    Raises:
        CheckpointError: If its bytes differ from those written.
    """
    content = _read_manifest(folder)
    inside = folder.inside(str(content.get("within", "")))
    data = inside.read(name)
    if zlib.crc32(data) != content["files"][name].get(CRC32):
        raise CheckpointError(
            f"{inside}/{name} was damaged after it was written: its checksum is wrong. "
            f"Resume from another checkpoint."
        )
    return data


def _read_manifest(folder: Folder) -> Any:
    content = json.loads(folder.read(MANIFEST).decode("utf-8"))
    if int(content["format"]) > FORMAT:
        return content
    checked = {key: each for key, each in content.items() if key != CRC32}
    # Earlier versions wrote none; if the name of the key is damaged, it is not one of these.
    is_without = checked.keys() <= {"format", "world_size", "files", "within"} and (
        CRC32 not in content
    )
    if not is_without and content.get(CRC32) != zlib.crc32(_encode(checked)):
        raise CheckpointError(f"its {MANIFEST} was damaged after it was written")
    within = str(content.get("within", "")).removesuffix("/")
    if any("/" in name or name == ".." for name in (within, *content["files"])):
        raise CheckpointError(f"its {MANIFEST} names a file outside of the folder")
    return content


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()

"""What a directory of shards holds, and whether it holds all of it. Plain Python, without torch.

The manifest is the last file to be written: a directory without one, or one that lacks a file or
has one of another size, is no checkpoint. (A copy that was cut short looks like that; what boltmesh
writes itself gets its name only when it is complete.)
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from boltmesh.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""Where pieces of tensors lie; torch's name."""
REST = "meta.pt"
"""All that is no shard; Lightning's name."""

FORMAT = 1


def write_manifest(folder: Path, *, world_size: int, shard_files: list[str]) -> None:
    """Name every file of a directory that is otherwise finished.

    Raises:
        CheckpointError: When a file is not there, as where ranks see different folders.
    """
    files: dict[str, dict[str, int]] = {}
    for name in sorted({*shard_files, METADATA, REST}):
        path = folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds no {name}, which another rank has written. "
                f"Write checkpoints to a folder that all machines share."
            )
        files[name] = {"bytes": path.stat().st_size}
        if name in {METADATA, REST}:
            files[name]["crc32"] = zlib.crc32(path.read_bytes())
    content = {"format": FORMAT, "world_size": world_size, "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def find_fault(folder: Path, *, checks_files: bool = True) -> str | None:
    """Why a directory is no complete checkpoint of ours, in words; None when it is one.

    One rank that looks at all files is enough; without ``checks_files`` the manifest is believed.
    """
    path = folder / MANIFEST
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        form, files = int(content["format"]), dict(content["files"])
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    if form > FORMAT:
        return f"it has format {form}, and this version of boltmesh reads up to {FORMAT}"
    for name in sorted({*files, METADATA, REST}) if checks_files else ():
        try:
            expected = int(files[name]["bytes"])
            size = (folder / name).stat().st_size
        except (KeyError, TypeError, ValueError):
            return f"its {MANIFEST} does not tell the size of {name}"
        except OSError as error:
            return f"{name} is not there ({error.strerror})"
        if size != expected:
            return f"{name} has {size} bytes instead of {expected}"
    return None


def read_checked(folder: Path, name: str) -> bytes:
    """A small file of a directory that has passed ``find_fault``.

    Raises:
        CheckpointError: When the bytes are not those that were written.
    """
    content: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    data = (folder / name).read_bytes()
    if zlib.crc32(data) != content["files"][name].get("crc32"):
        raise CheckpointError(
            f"{folder / name} was damaged after it was written: its checksum is wrong. "
            f"Resume from another checkpoint."
        )
    return data

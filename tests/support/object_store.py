"""A remote file system over a folder, with what object stores have and with what they lack.

Objects have keys and lie in no folders. A put is seen when its last byte has come, and not before;
a listing may be old until the cache is cleared. There is no rename, no link and no lock.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem  # type: ignore[import-untyped]

PROTOCOL = "objects"


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """``objects://bucket/key``; see ``install``."""

    protocol = PROTOCOL
    root: ClassVar[Path]
    before: ClassVar[Callable[[str, str], None] | None] = None
    """Asked before each ``part``, ``put``, ``get`` and ``delete`` of a key and before each ``list``
    of all, and may raise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listing: dict[str, int] | None = None

    def ask(self, action: str, key: str) -> None:
        if ObjectStore.before is not None:
            ObjectStore.before(action, key)

    def file_of(self, key: str) -> Path:
        return ObjectStore.root / quote(key, safe="")

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listing = None

    def _sizes(self) -> dict[str, int]:
        if self._listing is None:
            self.ask("list", "")
            self._listing = {}
            for each in ObjectStore.root.iterdir():
                if not each.name.startswith("."):
                    with suppress(FileNotFoundError):  # another rank deletes it just now
                        self._listing[unquote(each.name)] = each.stat().st_size
        return self._listing

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found: dict[str, dict[str, Any]] = {}
        for key, size in self._sizes().items():
            if key == path:
                found[key] = {"name": key, "size": size, "type": "file"}
            elif key.startswith(f"{path}/"):
                name, *below = key[len(path) + 1 :].split("/")
                whole = f"{path}/{name}"
                found[whole] = {
                    "name": whole,
                    "size": 0 if below else size,
                    "type": "directory" if below else "file",
                }
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def modified(self, path: str) -> Any:
        from datetime import datetime, timezone

        stat = self.file_of(self._strip_protocol(path)).stat()
        return datetime.fromtimestamp(stat.st_mtime, tz=timezone.utc)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: there are no folders."""

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Nothing: there are no folders."""

    def rmdir(self, path: str) -> None:
        """Nothing: there are no folders."""

    def _rm(self, path: str) -> None:
        key = self._strip_protocol(path)
        self.ask("delete", key)
        self.file_of(key).unlink(missing_ok=True)  # folders are deleted like keys
        self.invalidate_cache()

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an object cannot be renamed")

    cp_file = mv

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode not in {"rb", "wb"}:
            raise NotImplementedError(mode)
        return _Object(self, path, mode, **{**kwargs, "block_size": 1 << 20})


class _Object(AbstractBufferedFile):  # type: ignore[misc]
    """An upload in parts, or a download by ranges."""

    def _initiate_upload(self) -> None:
        self._parts = ObjectStore.root / f".{uuid4().hex}"
        self._parts.touch()

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.ask("part", self.path)
        with self._parts.open("ab") as file:
            file.write(self.buffer.getvalue())
        if final:
            self.fs.ask("put", self.path)
            os.replace(self._parts, self.fs.file_of(self.path))
            self.fs.invalidate_cache()
        return True

    def discard(self) -> None:
        if hasattr(self, "_parts"):
            self._parts.unlink(missing_ok=True)

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.ask("get", self.path)
        with self.fs.file_of(self.path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)


def install(root: Path) -> None:
    """Make the file system known to fsspec in this process, over a folder that ranks share."""
    root.mkdir(exist_ok=True)
    ObjectStore.root, ObjectStore.before = root, None
    ObjectStore.clear_instance_cache()
    fsspec.register_implementation(PROTOCOL, ObjectStore, clobber=True)


def keys(root: Path) -> set[str]:
    """The keys of all objects; unfinished uploads have none."""
    return {unquote(each.name) for each in root.iterdir() if not each.name.startswith(".")}

"""Distinguishes paths of the operating system from addresses that only fsspec can open."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.utils import get_protocol  # type: ignore[import-untyped]

from boltmesh.errors import ConfigError

_LOCAL = {"file", "local"}


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise errors of a file system's own library, of any class, as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def is_local(path: str | Path) -> bool:
    """Whether a path or address is on a file system of the operating system."""
    return get_protocol(str(path)) in _LOCAL


def local_path(path: str | Path) -> Path:
    """Return the path of an address that is local."""
    text = str(path)
    for name in _LOCAL:
        text = text.removeprefix(f"{name}://")
    return Path(text)


def path_or_address(text: str | Path) -> Path | str:
    """Return a path if it is local, else the address unchanged: a Path would drop a slash."""
    return local_path(text) if is_local(text) else str(text).rstrip("/")


def open_address(address: str) -> tuple[Any, str]:
    """Return the file system of a remote address, and the path in it.

    Raises:
        ConfigError: If fsspec does not know it, or lacks the package for it.
    """
    try:
        system, path = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{address} cannot be opened: {error}. Install what fsspec requires, or choose a path."
        ) from error
    return system, path


def is_file(place: str | Path) -> bool:
    """Whether a path or address is a file.

    Raises:
        ConfigError: If fsspec cannot open the address.
        OSError: If the file system cannot be read.
    """
    if isinstance(place, Path):
        return place.is_file()
    return kind_at(*open_address(place)) == "file"


def kind_at(system: Any, path: str) -> str | None:
    """Return the current kind of a path of fsspec: ``"file"``, ``"directory"``, or None.

    fsspec's own ``exists``, ``isfile`` and ``isdir`` return False after an error of the network.

    Raises:
        OSError: If the file system cannot be read.
    """
    with as_os_errors():
        system.invalidate_cache()  # others write here too
        try:
            kind: str = system.info(path)["type"]
        except (FileNotFoundError, NotADirectoryError):
            return None
    return kind


def mended(path: str) -> str:
    """Undo Lightning's change to a ModelCheckpoint's ``file://`` folder: a path below this one.

    ``os.path.realpath("file:///a/b")`` is ``<working directory>/file:/a/b``.
    """
    for name in _LOCAL:
        before, mark, after = path.partition(f"{os.sep}{name}:{os.sep}")
        if mark and before == os.path.realpath(os.curdir):
            return os.sep + after
    return path

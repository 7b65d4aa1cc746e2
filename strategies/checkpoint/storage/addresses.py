"""Distinguishes paths of the operating system from addresses that only fsspec can open."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.config import conf  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.utils import get_protocol  # type: ignore[import-untyped]

from boltmesh.errors import ConfigError

_LOCAL = {"file", "local"}
HTTP_PATIENCE_S = 60.0
"""After so long without a byte a request has failed. The library's own limit is five minutes for a
whole request, however much of a large file has come."""
_HTTP = {"http", "https"}


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise errors of a file system's own library, of any class, as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file to the errors of its reads, which do not have its name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


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
        ConfigError: If fsspec does not know it, lacks the package for it, or needs more than it.
        OSError: If the file system cannot be reached.
    """
    try:
        system, path = url_to_fs(address, **_options(address))
    except OSError:
        raise
    except Exception as error:  # of any class, for example where an argument is missing
        raise ConfigError(
            f"{address} cannot be opened: {error}. Install what fsspec requires, or choose a path."
        ) from error
    return system, path


def _options(address: str) -> dict[str, Any]:
    if get_protocol(address) not in _HTTP:
        return {}
    from aiohttp import ClientTimeout

    limit = ClientTimeout(total=None, sock_connect=HTTP_PATIENCE_S, sock_read=HTTP_PATIENCE_S)
    return {"client_kwargs": {"timeout": limit, **conf.get("http", {}).get("client_kwargs", {})}}


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
        except (FileNotFoundError, NotADirectoryError) as error:
            cause = error.__cause__
            if _HTTP.isdisjoint(system.protocol) or cause is None:
                return None
            # fsspec raises a FileNotFoundError for every failure of a request.
            status = getattr(cause, "status", None)
            if status is None or status >= 500:
                reason = str(cause) or "it does not answer"
                raise OSError(f"{type(cause).__name__}: {reason}") from error
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

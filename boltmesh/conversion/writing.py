"""A file or folder that is complete or absent, whatever happens while it is written."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies.checkpoint.atomic_replace import (
    flush_folder,
    partial_path,
    remove,
    remove_killed_saves,
    replace,
)
from boltmesh.strategies.checkpoint.file import cannot_write
from boltmesh.strategies.checkpoint.storage.addresses import is_file
from boltmesh.strategies.checkpoint.storage.folder import folder_at


def check_target(target: str | Path, source: str | Path, *, force: bool) -> None:
    """Check that output made from ``source`` may be written there.

    Raises:
        ConfigError: When the name is taken, and is not to be replaced, or cannot be: it is the
            source or a folder around it, or one around the working directory.
    """
    if not isinstance(target, Path):
        if not force and (is_file(target) or folder_at(target).is_there()):
            raise ConfigError(f"{target} exists. Choose another name, or say --force.")
        return
    if target.exists():
        place = target.resolve()
        if isinstance(source, Path) and source.resolve().is_relative_to(place):
            raise ConfigError(
                f"{target} is, or holds, {source}, which is to be read. Choose another name."
            )
        if Path.cwd().is_relative_to(place):
            raise ConfigError(f"{target} holds the working directory. Choose another name.")
    if not force and (target.is_symlink() or target.exists()):
        raise ConfigError(f"{target} exists. Choose another name, or say --force to replace it.")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no folder. Make it, or choose another one.")


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Give the path to write a file or a folder to, which then takes the name of ``target``.

    Files inside a folder have to be on their medium already; a file is flushed here.

    Raises:
        CheckpointError: When it could not be written. Nothing of it is left then.
    """
    partial = partial_path(target)
    try:
        remove_killed_saves(target)
        yield partial
        if partial.is_dir():
            flush_folder(partial)
        replace(partial, target)
    except BaseException as error:
        with suppress(OSError):
            remove(partial)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(cannot_write(target, error)) from error

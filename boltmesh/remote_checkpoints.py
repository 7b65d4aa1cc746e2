"""Which checkpoint an address means: itself, or the newest that is complete in the folder there."""

from typing import Any

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.folders.addresses import as_os_errors, is_file, open_address
from boltmesh.strategies.checkpoint.folders.opening import folder_at
from boltmesh.strategies.checkpoint.manifest import MANIFEST, find_fault


def checkpoint_at(key: str, address: str) -> str:
    """Return the address of the checkpoint that is meant.

    Args:
        key: Of the config, for errors.
        address: Of a checkpoint, or of a folder of checkpoints.

    Raises:
        ConfigError: When there is no complete one.
    """
    try:
        if is_file(address) or find_fault(address) is None:
            return address
        found = _newest_in(address) if folder_at(address).is_there() else None
    except OSError as error:
        raise ConfigError(f"{key}={address} cannot be read: {error}.") from error
    if found is None:
        raise ConfigError(
            f"{key}={address} is no complete checkpoint, and no folder that has one. Write the "
            f"address of a checkpoint, or of the folder that ModelCheckpoint saves to."
        )
    return found


def _newest_in(folder: str) -> str | None:
    system, path = open_address(folder)
    with as_os_errors():
        names = [each.rstrip("/").rpartition("/")[2] for each in system.ls(path, detail=False)]
    found = []
    for name in names:
        address = f"{folder}/{name}"
        if name.endswith(".ckpt") and (is_file(address) or find_fault(address) is None):
            last = f"{path}/{name}" if is_file(address) else f"{path}/{name}/{MANIFEST}"
            found.append((_when(system, last, folder), address))
    return max(found, default=(None, None))[1]


def _when(system: Any, path: str, folder: str) -> Any:
    try:
        with as_os_errors():
            return system.modified(path)
    except OSError as error:
        raise OSError(
            f"the file system does not tell which of {folder} is the newest ({error}); write the "
            f"address of a checkpoint"
        ) from error

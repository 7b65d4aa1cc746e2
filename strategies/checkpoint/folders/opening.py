"""From a path or an address to the folder there."""

from pathlib import Path

from boltmesh.strategies.checkpoint.folders.addresses import is_local, local_path
from boltmesh.strategies.checkpoint.folders.folder import Folder
from boltmesh.strategies.checkpoint.folders.local import LocalFolder
from boltmesh.strategies.checkpoint.folders.remote import RemoteFolder


def folder_at(place: str | Path) -> Folder:
    """Return the folder at a path or an address, which need not exist.

    Raises:
        ConfigError: When fsspec cannot open the address.
    """
    return LocalFolder(local_path(place)) if is_local(place) else RemoteFolder(str(place))

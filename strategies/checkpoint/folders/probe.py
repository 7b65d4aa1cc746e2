"""A file by which ranks find out whether they see one folder."""

from pathlib import Path
from uuid import uuid4

from boltmesh.strategies.checkpoint.folders.addresses import as_os_errors, kind_at, open_address


class Probe:
    """One rank writes it, the others look; what fails raises OSError.

    Args:
        place: Path or address of the folder, which the first rank makes.
    """

    def __init__(self, place: str | Path) -> None:
        self._place = place

    def write(self) -> str:
        """Make the file and return its name."""
        name = f".boltmesh-{uuid4().hex}"
        if isinstance(self._place, Path):
            self._place.mkdir(parents=True, exist_ok=True)
            (self._place / name).touch()
            return name
        system, path = open_address(self._place)
        with as_os_errors():
            system.makedirs(path, exist_ok=True)
            system.pipe_file(f"{path}/{name}", b"boltmesh")
        return name

    def is_seen(self, name: str) -> bool:
        """Whether the file is in this rank's folder."""
        if isinstance(self._place, Path):
            return (self._place / name).exists()
        system, path = open_address(self._place)
        return kind_at(system, f"{path}/{name}") is not None

    def remove(self, name: str) -> None:
        """Delete the file."""
        if isinstance(self._place, Path):
            (self._place / name).unlink(missing_ok=True)
            return
        system, path = open_address(self._place)
        with as_os_errors():
            system.rm_file(f"{path}/{name}")

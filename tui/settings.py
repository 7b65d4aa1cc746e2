"""The dashboard's settings that are kept between runs, in one small JSON file.

Only what a person chose: the theme, the screen, how tables were sorted. Nothing of a job is kept.
A file that cannot be read is no reason not to start, so :func:`load` never raises; a value that
this version does not know is left out, and the rest counts.
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import platformdirs

from boltmesh.tui.view import TableView, View

FOLDER_VARIABLE = "BOLTMESH_SETTINGS_DIR"
FILE_NAME = "dashboard.json"
_MAX_BYTES = 1 << 16


class Sorting(msgspec.Struct, frozen=True):
    """How one table was sorted."""

    column: str
    is_descending: bool = False


class Settings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the file; every part may be missing."""

    theme: str | None = None
    screen: str | None = None
    sorting: Mapping[str, Sorting] = {}
    """By the table's name."""
    heat_figure: str | None = None
    is_log: bool = False


def settings_path() -> Path:
    """Return the file: in BOLTMESH_SETTINGS_DIR, else where this system keeps settings."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return Path(folder) / FILE_NAME
    return platformdirs.user_config_path("boltmesh", appauthor=False) / FILE_NAME


def load(path: Path) -> tuple[Settings, str | None]:
    """Return the settings of the file, and why it was ignored if it was."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            return Settings(), f"{path} is no settings file, and was ignored: it is too large."
        return msgspec.json.decode(data, type=Settings), None
    except FileNotFoundError:
        return Settings(), None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Settings(), f"the settings in {path} were ignored: {reason}"


def save(path: Path, settings: Settings) -> str | None:
    """Write the file whole or not at all; return why it was not written where it was not."""
    text = msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        return f"the settings were not written to {path}: {error.strerror or error}"
    return None


def view_of(settings: Settings) -> View:
    """Return the view to begin with."""
    return View(
        heat_figure=settings.heat_figure,
        is_log=settings.is_log,
        tables={
            name: TableView(sort=sorting.column, is_descending=sorting.is_descending)
            for name, sorting in settings.sorting.items()
        },
    )


def settings_of(view: View, *, theme: str | None, screen: str | None) -> Settings:
    """Return the choices of a view that are worth remembering."""
    return Settings(
        theme=theme,
        screen=screen,
        sorting={
            name: Sorting(table.sort, table.is_descending)
            for name, table in view.tables.items()
            if table.sort is not None
        },
        heat_figure=view.heat_figure,
        is_log=view.is_log,
    )

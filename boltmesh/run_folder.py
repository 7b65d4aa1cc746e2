"""Where a run lives on disk, and which checkpoint continues it.

::

    runs/NAME/                 run.dir and run.name
        0/                     the first run of that name, then 1/, 2/, ...
            config.yaml        the config that was used, itself a valid config
            run.lock           which process writes here now, see run_lock.py
            checkpoints/       *.ckpt, complete or absent: files, or directories of shards;
                               *.ckpt.damaged, found to be so and kept
            logs/              metrics.csv, one folder per start

Which checkpoint an address means: itself, or the newest that is complete in the folder there.
"""

import contextlib
import errno
import io
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from boltmesh.configs.advice import nearest
from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.process import write_stderr
from boltmesh.strategies.checkpoint.archive_check import find_damage, find_step
from boltmesh.strategies.checkpoint.atomic_replace import ASIDE, REQUEUED, restore_aside
from boltmesh.strategies.checkpoint.host_memory import ID_FILE, newest_step_in_memory
from boltmesh.strategies.checkpoint.manifest import MANIFEST, NEWER, REST, files_of, find_fault
from boltmesh.strategies.checkpoint.storage.addresses import (
    as_os_errors,
    is_file,
    is_local,
    open_address,
    path_or_address,
)
from boltmesh.strategies.checkpoint.storage.folder import folder_at
from boltmesh.telemetry.redaction import holds_secret


def checkpoint_at(key: str, address: str) -> str:
    """Return the address of the checkpoint that is meant.

    Args:
        key: Key of the config, for errors.
        address: Address of a checkpoint, or of a folder of checkpoints.

    Raises:
        ConfigError: When there is no complete one.
    """
    try:
        if is_file(address) or (fault := find_fault(address)) is None:
            return address
        found = _newest_in(address) if folder_at(address).is_there() else None
    except OSError as error:
        raise ConfigError(f"{key}={address} cannot be read: {error}.") from error
    if found is None:
        raise ConfigError(
            f"{key}={address} is no complete checkpoint ({fault}), and no folder that has one. "
            f"Write the address of a checkpoint, or of the folder that ModelCheckpoint saves to."
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


CHECKPOINTS = "checkpoints"
DAMAGED = ".damaged"
"""Ends the name of a checkpoint that was found to be damaged, and is kept."""
CONFIG_FILE = "config.yaml"


def folder_of_name(config: DictConfig) -> Path:
    """The folder that holds all runs of this name."""
    return Path(config.run.dir).expanduser() / str(config.run.name)


def check_run_dir(config: DictConfig) -> None:
    """Check that runs can be stored there.

    Raises:
        ConfigError: For an address of a remote file system.
    """
    if not is_local(config.run.dir):
        raise ConfigError(
            f"run.dir={config.run.dir} is on a remote file system, and the folder of a run, with "
            f"its logs, is on a disk. Set run.dir to a path, run.checkpoint.enabled=false, and add "
            f"a lightning.pytorch.callbacks.ModelCheckpoint with that dirpath to trainer.callbacks."
        )
    try:
        folder_of_name(config).exists()
    except OSError as error:  # the name is too long, say
        raise ConfigError(
            f"run.dir={config.run.dir} cannot be used: {error.strerror or error}."
        ) from error


def refuse_unwritable(config: DictConfig, folder: Path) -> None:
    """Check that a run may write to its folder, which need not exist yet.

    Raises:
        ConfigError: The folder, or the one that it would be made in, cannot be written.
    """
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise _unwritable(config, existing, os.strerror(errno.ENOTDIR))
    if not os.access(existing, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        why = os.strerror(errno.EROFS if is_read_only else errno.EACCES)
        raise _unwritable(config, existing, why)


def _unwritable(config: DictConfig, folder: Path, why: str | None) -> ConfigError:
    return ConfigError(
        f"run.dir={config.run.dir}: {folder} cannot be written: {why}. "
        f"Set run.dir to a folder of yours, for example run.dir=/tmp/runs."
    )


def newest_checkpoint(folder: Path, *, run: str = "*") -> Path | None:
    """The complete checkpoint that was written last in any run of a name; not read for damage.

    Args:
        folder: Folder of all runs of a name.
        run: One run of them alone.
    """
    for path in _checkpoints(folder, run):
        with contextlib.suppress(OSError):
            if _missing(path) is None:
                return path
    return None


def newest_step(run_folder: Path) -> tuple[Path, int | None] | None:
    """The newest complete checkpoint of one run, or copy in memory, and the step of it."""
    path = newest_checkpoint(run_folder.parent, run=run_folder.name)
    copied = newest_step_in_memory(run_folder)
    if path is None:
        return copied
    step = step_of(path)
    return copied if copied is not None and copied[1] > (step or 0) else (path, step)


def step_of(path: Path) -> int | None:
    """The step after which a checkpoint was saved; None if it does not hold the step."""
    with contextlib.suppress(OSError, ValueError, KeyError, CheckpointError):
        if path.is_file():
            with path.open("rb") as file:
                return find_step(file)
        inside, _ = files_of(folder_at(path))
        return find_step(io.BytesIO(inside.read(REST)))
    return None


def newest_verified_checkpoint(
    folder: Path, key: str, *, run: str = "*", renames: bool = True
) -> Path | None:
    """The checkpoint that was written last in any run of a name and is undamaged.

    Newer ones that are skipped are named on stderr; damaged ones that boltmesh has written are
    renamed to ``.damaged``. One that cannot be read may be whole, and keeps its name. Reads whole
    checkpoints: for one process of a job.

    Args:
        folder: Folder of all runs of a name.
        key: Key of the config, for errors.
        run: One run of them alone.
        renames: Say which are damaged, and give them another name.

    Raises:
        ConfigError: There are checkpoints, and none is whole; they keep their names.
    """
    passed: dict[Path, str] = {}
    damaged: set[Path] = set()
    for path in _checkpoints(folder, run):
        try:
            fault = _missing(path) or _damage(path)
        except OSError as error:
            fault = _unreadable(error)
        else:
            if fault is not None and not fault.startswith(NEWER) and _is_ours(path):
                damaged.add(path)
        if fault is None:
            for each, why in passed.items() if renames else ():
                renamed = f"; it is now {_set_aside(each).name}" if each in damaged else ""
                write_stderr(f"boltmesh: passed over {each}: {why}{renamed}\n")
            return path
        passed[path] = fault
    if passed:
        newest, why = next(iter(passed.items()))
        others = f", and neither are {len(passed) - 1} older ones" if len(passed) > 1 else ""
        raise ConfigError(
            f"{key}=auto finds no whole checkpoint below {folder}: {newest} is not ({why})"
            f"{others}. Give the path of another one, or set {key}=null to begin without one."
        )
    return None


def _checkpoints(folder: Path, run: str, *, name: str = "*") -> list[Path]:
    """All checkpoints of a name, or of one run, complete or not, the newest first."""
    for aside in folder.glob(f"{run}/{CHECKPOINTS}/*.ckpt{ASIDE}"):
        restore_aside(aside.with_name(aside.name.removesuffix(ASIDE)))
    found: list[tuple[int, str, Path]] = []
    # Checkpoints that are being written or deleted have another suffix.
    for path in folder.glob(f"{run}/{CHECKPOINTS}/{name}.ckpt"):
        with contextlib.suppress(FileNotFoundError):  # another process renames it just now
            found.append((path.stat().st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def _is_ours(path: Path) -> bool:
    """Whether boltmesh has completed it, as far as that is known."""
    return path.is_file() or (path / MANIFEST).is_file()


def _unreadable(error: OSError) -> str:
    return f"it cannot be read ({error.strerror or error})"


def _missing(path: Path) -> str | None:
    """Return the fault of an incomplete checkpoint, in words; OSError when it cannot be read."""
    if path.is_dir():
        return find_fault(path)
    return None if path.is_file() else "it is not a plain file"


def _damage(path: Path) -> str | None:
    """Return the damage of a complete checkpoint, in words; None when its bytes are as written.

    Raises:
        OSError: It cannot be read.
    """
    if path.is_dir():
        from boltmesh.strategies.checkpoint.directory import find_damage as find_damage_in

        return find_damage_in(path, threads=8)
    with path.open("rb") as file:
        return find_damage(file)


def _set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is not found again."""
    number, target = 1, path.with_name(f"{path.name}{DAMAGED}")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}{DAMAGED}-{number}")
    try:
        return path.rename(target)
    except OSError:  # a folder that may not be written: it is passed over at every start
        return path


def checkpoint_to_resume(
    config: DictConfig, *, continued: Path | None = None, verifies: bool = False
) -> Path | str | None:
    """Return the checkpoint of ``run.resume``, a path or an address: None starts at the beginning.

    A SLURM job that was requeued by its signal to save resumes from that save.

    Args:
        config: As ``load`` gives it.
        continued: Folder of the run that is continued after a failure: its own newest checkpoint
            takes precedence over ``run.resume``.
        verifies: Read the checkpoint, and fall back to an older one if it is damaged. A checkpoint
            given by path is read too, so that a damaged one is refused before the folder is made.
    """
    if continued is not None:
        folder, run = continued.parent, continued.name
        found = (
            newest_verified_checkpoint(folder, "run.resume", run=run)
            if verifies
            else newest_checkpoint(folder, run=run)
        )
        if found is not None:
            return found
    asked = config.run.resume
    if asked is None:
        saved = _saved_for_requeue(config)
        return None if saved is None else _existing("run.resume", str(saved), verifies=verifies)
    if asked == "auto":
        return _automatic("run.resume", config, verifies=verifies)
    return _existing("run.resume", asked, verifies=verifies)


def _saved_for_requeue(config: DictConfig) -> Path | None:
    """The newest checkpoint that SLURM's signal has saved, in a job that was queued again."""
    if os.environ.get("SLURM_RESTART_COUNT", "") in {"", "0"}:
        return None
    saved = _checkpoints(folder_of_name(config), "*", name=f"{REQUEUED}*")
    return next((path for path in saved if _missing(path) is None), None)


def checkpoint_to_evaluate(config: DictConfig, *, verifies: bool = False) -> Path | str | None:
    """Return the checkpoint of ``run.ckpt_path``, a path or an address; None: the model as built.

    Args:
        config: As ``load`` gives it.
        verifies: See ``checkpoint_to_resume``.
    """
    asked = config.run.ckpt_path
    if asked is None:
        return None
    if asked != "auto":
        return _existing("run.ckpt_path", asked, verifies=verifies)
    found = _automatic("run.ckpt_path", config, verifies=verifies)
    if found is None:
        raise ConfigError(
            f"run.ckpt_path=auto finds no checkpoint below {folder_of_name(config)}. Run boltmesh "
            f"fit first, give a path, or set run.ckpt_path=null to take the model as it is built."
        )
    return found


def _automatic(key: str, config: DictConfig, *, verifies: bool) -> Path | None:
    folder = folder_of_name(config)
    return newest_verified_checkpoint(folder, key) if verifies else newest_checkpoint(folder)


def next_run_folder(config: DictConfig, resumed: Path | str | None, *, is_fit: bool = True) -> Path:
    """Return the folder that this run would have, which is not made. See ``make_run_folder``."""
    continued = _continued_folder(config, resumed) if is_fit else None
    return continued or _new_folder(folder_of_name(config))


def _new_folder(base: Path) -> Path:
    return base / str(max(_numbers(base), default=-1) + 1)


def _numbers(folder: Path) -> list[int]:
    """Return the numbers that name folders in a folder."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]


def _continued_folder(config: DictConfig, resumed: Path | str | None) -> Path | None:
    """The folder of the run that continues with ``resume=auto``.

    That of its checkpoint. Without one, that of the newest run, if it has failed and its state may
    be in the memory of its hosts.
    """
    if config.run.resume != "auto":
        return None
    if isinstance(resumed, Path):
        return resumed.parents[1]
    base = folder_of_name(config)
    newest = base / str(max(_numbers(base), default=0))
    return newest if (newest / ID_FILE).is_file() else None


def make_run_folder(config: DictConfig, resumed: Path | str | None, *, is_fit: bool = True) -> Path:
    """Return the folder of this run: a new one, or with ``resume=auto`` the one that is continued.

    Args:
        config: As ``load`` gives it.
        resumed: The checkpoint from which a fit resumes.
        is_fit: Only a fit continues an earlier run.
    """
    continued = _continued_folder(config, resumed) if is_fit else None
    if continued is not None:
        return continued
    base = folder_of_name(config)
    try:
        base.mkdir(parents=True, exist_ok=True)
        while True:
            # Another run of this name may begin at the same moment.
            with contextlib.suppress(FileExistsError):
                folder = _new_folder(base)
                folder.mkdir()
                return folder
    except OSError as error:
        raise _unwritable(config, base, error.strerror) from error


def store_config(config: DictConfig, folder: Path) -> Path:
    """Write the config beside the checkpoints, with paths to code that hold from anywhere.

    The owner alone may read it if it holds secrets.
    """
    stored = config.copy()
    _anchor_class_paths(stored)
    path = folder / CONFIG_FILE
    temporary = path.with_suffix(".partial")
    is_private = holds_secret(OmegaConf.to_container(stored))
    temporary.unlink(missing_ok=True)
    temporary.touch(0o600 if is_private else 0o666)
    temporary.write_text(OmegaConf.to_yaml(stored), encoding="utf-8")
    temporary.replace(path)
    return path


def next_log_number(folder: Path) -> int:
    """Each start of a run logs to a folder of its own; a resumed one keeps the earlier logs."""
    return max(_numbers(folder / "logs"), default=-1) + 1


def _anchor_class_paths(node: DictConfig | ListConfig) -> None:
    names = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for name in names:
        if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name):
            continue
        value = node[name]
        if isinstance(value, (DictConfig, ListConfig)):
            _anchor_class_paths(value)
        elif name == "class_path" and isinstance(value, str):
            file, colon, cls = value.rpartition(":")
            if colon:
                node[name] = f"{Path(file).resolve()}:{cls}"


def _existing(key: str, asked: str, *, verifies: bool) -> Path | str:
    place = path_or_address(asked)
    if isinstance(place, str):
        return checkpoint_at(key, place)
    try:
        path = _existing_path(key, asked, place.expanduser())
        damage = _damage(path) if verifies else None
    except OSError as error:  # the name is too long, say
        raise ConfigError(f"{key}={asked} cannot be read: {error.strerror or error}.") from error
    if damage is not None:
        raise ConfigError(
            f"{key}={asked} cannot be loaded: {damage}. Resume from another checkpoint."
        )
    return path


def _existing_path(key: str, asked: str, path: Path) -> Path:
    if path.is_dir() and (fault := find_fault(path)):
        raise ConfigError(
            f"{key}={asked} is a directory, but no complete checkpoint: {fault}. "
            f"Write for example {key}=auto."
        )
    if path.is_file() or path.is_dir():
        return path
    if path.exists():
        raise ConfigError(
            f"{key}={asked} is neither a file nor a directory. Write for example {key}=auto."
        )
    beside = [each.name for each in path.parent.glob("*.ckpt")]
    guess = nearest(path.name, beside)
    hint = f"Did you mean {path.with_name(guess)}?" if guess else f"Write for example {key}=auto."
    raise ConfigError(f"{key}={asked}: there is no such checkpoint. {hint}")

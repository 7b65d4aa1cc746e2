"""A checkpoint as a directory of shards: written by all ranks together, read by each alone."""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial as bind
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import Container, OmegaConf
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.beside import serialised, take_snapshot
from boltmesh.strategies.checkpoint.file import cannot_write
from boltmesh.strategies.checkpoint.manifest import (
    METADATA,
    REST,
    find_fault,
    read_checked,
    write_manifest,
)
from boltmesh.strategies.checkpoint.optimizer_state import is_named
from boltmesh.strategies.checkpoint.placeholder import stored
from boltmesh.strategies.checkpoint.replacing import (
    flush_folder,
    partial_path,
    remove,
    replace,
    restore_aside,
)
from boltmesh.strategies.checkpoint.saving import save_into
from boltmesh.strategies.checkpoint.shard_reader import ShardReader
from boltmesh.strategies.checkpoint.shard_writer import PiecePlanner, ShardWriter
from boltmesh.strategies.checkpoint.together import together

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
"""The keys of a Lightning checkpoint under which tensors may be shards."""

ALIASES = "boltmesh_aliases"
"""Names of tied parameters, and the name under which their tensor is stored."""


def save_directory(
    checkpoint: Mapping[str, Any], target: Path, *, is_divided: bool = False
) -> None:
    """Write a checkpoint whose tensors may be shards. Collective over all ranks.

    Args:
        checkpoint: As Lightning makes it, with optimizer states by the names of parameters. What
            is no shard counts as it is on the first rank.
        target: The directory to be. Alike on all ranks.
        is_divided: Tensors that are no shards, and other state of modules, are on one rank each,
            as the stages of a pipeline are.

    Raises:
        CheckpointError: On every rank, when one could not write its part. What was at ``target``
            is still there then.
    """
    tensors, rest = _divide(checkpoint)
    if is_divided:
        _join(rest)
    _write(tensors, rest, target, is_divided=is_divided)


def prepare_save(
    checkpoint: Mapping[str, Any], target: Path, group: dist.ProcessGroup, *, is_divided: bool
) -> Callable[[], None]:
    """Copy what ``save_directory`` would write, and return what writes it. Collective.

    Takes as much host memory as this rank's share of the checkpoint, until that is written.

    Args:
        checkpoint: See ``save_directory``.
        target: See ``save_directory``.
        group: Of all ranks, on the CPU, for this alone. The writing is collective over it, from
            any thread, and fails as ``save_directory`` does.
        is_divided: See ``save_directory``.
    """
    tensors, rest = _divide(checkpoint)
    if is_divided:
        _join(rest)
    is_first = dist.get_rank() == 0
    kept = take_snapshot(tensors, writes_plain=is_first or is_divided)
    data = serialised(rest) if is_first else b""
    return bind(_write, kept, data, target, is_divided=is_divided, group=group)


def _write(
    tensors: dict[str, Any],
    rest: Mapping[str, Any] | bytes,
    target: Path,
    *,
    is_divided: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    partial = partial_path(target)
    is_first = dist.get_rank() == 0
    try:
        together(bind(_begin, partial) if is_first else _nothing, group)
        files = _write_shards(tensors, partial, is_divided=is_divided, group=group)
        together(bind(_finish, rest, partial, target, files) if is_first else _nothing, group)
    except BaseException as error:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (CheckpointException, CheckpointError, OSError)):
            raise CheckpointError(cannot_write(target, _first_cause(error))) from error
        raise


def is_directory(path: Path) -> bool:
    """Whether a checkpoint is a directory; one that a kill had set aside is put back."""
    restore_aside(path)
    return path.is_dir()


def load_directory(
    folder: Path, *, weights_only: bool | None = None, checks_files: bool = True
) -> dict[str, Any]:
    """Read a checkpoint whose tensors are placeholders: copying one loads this rank's part of it.

    Args:
        folder: The directory.
        weights_only: As for ``torch.load``, of what is no shard.
        checks_files: Look whether all files are there; one rank of a job is enough.

    Raises:
        CheckpointError: When the directory is not complete, or not one of ours.
    """
    if fault := find_fault(folder, checks_files=checks_files):
        raise CheckpointError(
            f"{folder} is no complete checkpoint: {fault}. Resume from another one; a directory "
            f"of another program has to be made a single file first."
        )
    checkpoint = _load_rest(folder, weights_only=weights_only)
    reader = ShardReader(folder, read_checked(folder, METADATA))
    has_names = [is_named(each) for each in checkpoint.get(OPTIMIZERS, ())]
    model: dict[str, Any] = {}
    for name, keys in reader.paths().items():
        if keys[0] == MODEL:
            model[keys[1]] = stored(reader, name)
        else:
            number, (parameter, key) = int(keys[0].removeprefix("optimizer_")), keys[2:]
            # By number in a directory that was made of a Lightning file.
            of = parameter if has_names[number] else int(parameter)
            state = checkpoint[OPTIMIZERS][number]["state"].setdefault(of, {})
            state[key] = stored(reader, name)
    for alias, name in checkpoint.pop(ALIASES, {}).items():
        model[alias] = model[name]
    checkpoint[MODEL] = {**model, **checkpoint.get(MODEL, {})}
    return checkpoint


def _divide(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into the files of shards, and the rest."""
    rest = dict(checkpoint)
    model, aliases, extra = {}, {}, {}
    seen: dict[int, str] = {}
    for name, value in rest.pop(MODEL, {}).items():
        if not isinstance(value, Tensor):
            extra[name] = value
        elif id(value) in seen:
            aliases[name] = seen[id(value)]
        else:
            seen[id(value)] = name
            model[name] = value
    tensors: dict[str, Any] = {MODEL: model} if model else {}
    states = []
    for number, each in enumerate(rest.pop(OPTIMIZERS, ())):
        large: dict[str, dict[str, Tensor]] = {}
        small: dict[str, dict[str, Any]] = {}
        for parameter, state in each["state"].items():
            for key, value in state.items():
                # Counters are many and small: one file holds them better than pieces do.
                is_large = isinstance(value, DTensor) or (
                    isinstance(value, Tensor) and value.dim() > 0
                )
                (large if is_large else small).setdefault(parameter, {})[key] = value
        if large:
            tensors[f"optimizer_{number}"] = {"state": large}
        states.append({**each, "state": small})
    if OPTIMIZERS in checkpoint:
        rest[OPTIMIZERS] = states
    rest[MODEL], rest[ALIASES] = extra, aliases
    # Lightning notes the class of hyper-parameters, which are plain containers now.
    kept = {key: each for key, each in rest.items() if not _is_container_class(each)}
    return tensors, _plain(kept)


def _join(rest: dict[str, Any]) -> None:
    """Add what other ranks know of their modules: second names, extra state. Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (rest[MODEL], rest[ALIASES]))
    for extra, aliases in told:
        rest[MODEL] |= extra
        rest[ALIASES] |= aliases


def _is_container_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Container)


def _plain(value: Any, where: str = "checkpoint") -> Any:
    """The same in types that ``torch.load(weights_only=True)`` makes.

    Raises:
        CheckpointError: For a shard, which would be stored as the first rank has it.
    """
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{where} is a shard, and nobody could load it: only state_dict and optimizer states "
            f"are stored by shards. Store its full_tensor(), or make it a buffer of the module."
        )
    if isinstance(value, Container):
        return OmegaConf.to_container(value)
    if isinstance(value, dict):
        changed = {key: _plain(each, f"{where}[{key!r}]") for key, each in value.items()}
        is_same = all(changed[key] is each for key, each in value.items())
        return value if is_same else changed
    if type(value) in {list, tuple}:
        items = [_plain(each, f"{where}[{at}]") for at, each in enumerate(value)]
        is_same = all(one is other for one, other in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    return value


def _begin(partial: Path) -> None:
    remove(partial)  # left behind by a run that was killed
    partial.mkdir(parents=True)


def _write_shards(
    tensors: dict[str, Any], partial: Path, *, is_divided: bool, group: dist.ProcessGroup | None
) -> list[str]:
    """Write this rank's shards; return the names of all ranks' files. Collective."""
    with torch.no_grad():
        metadata = save(
            tensors,
            storage_writer=ShardWriter(partial),
            planner=PiecePlanner(is_divided=is_divided),
            process_group=group,
        )
    return sorted({str(each.relative_path) for each in metadata.storage_data.values()})


def _finish(
    rest: Mapping[str, Any] | bytes, partial: Path, target: Path, shard_files: list[str]
) -> None:
    with (partial / REST).open("wb") as file:
        if isinstance(rest, bytes):
            file.write(rest)
        else:
            save_into(dict(rest), file)
        file.flush()
        os.fsync(file.fileno())
    write_manifest(partial, world_size=dist.get_world_size(), shard_files=shard_files)
    flush_folder(partial)
    replace(partial, target)


def _nothing() -> None:
    """What other ranks do while the first one works."""


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        cause = error.failures[rank][0]
        return f"{getattr(cause, 'strerror', None) or cause} (rank {rank})"
    return str(getattr(error, "strerror", None) or error)


def _load_rest(folder: Path, *, weights_only: bool | None) -> dict[str, Any]:
    data = BytesIO(read_checked(folder, REST))
    try:
        rest: dict[str, Any] = torch.load(data, map_location="cpu", weights_only=weights_only)
    except UnpicklingError as error:
        raise CheckpointError(
            f"{folder / REST} holds objects that could run code when they are loaded, perhaps "
            f"among the hyper-parameters. Keep plain values there, or allow their classes with "
            f"torch.serialization.add_safe_globals first. torch says: {error}"
        ) from error
    return rest

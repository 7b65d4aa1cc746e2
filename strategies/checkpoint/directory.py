"""A checkpoint as a directory of shards: all ranks write it together, each reads it on its own.

If ranks write to different disks or memories, none holds the whole checkpoint, and only the first
save would show that. So ``refuse_unshared_folders`` checks before the first step that all ranks
see the same folders: they join the draft of a checkpoint that is not written.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from functools import partial as bind
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import Container, OmegaConf
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies.checkpoint.adapters import TRAINABLE_ONLY
from boltmesh.strategies.checkpoint.archive_check import is_damage
from boltmesh.strategies.checkpoint.async_save import serialised, take_snapshot
from boltmesh.strategies.checkpoint.file import SummedFile, cannot_write, save_into
from boltmesh.strategies.checkpoint.manifest import (
    METADATA,
    REST,
    Written,
    files_of,
    find_fault,
    read_checked,
    write_manifest,
)
from boltmesh.strategies.checkpoint.optimizer_state import is_named, is_stored_apart
from boltmesh.strategies.checkpoint.safe_load import safe_load
from boltmesh.strategies.checkpoint.shard_reader import ShardReader, refusing_nonsense, stored
from boltmesh.strategies.checkpoint.shard_writer import PiecePlanner, ShardWriter
from boltmesh.strategies.checkpoint.storage.addresses import mended
from boltmesh.strategies.checkpoint.storage.folder import Draft, DraftStart, Folder, folder_at
from boltmesh.strategies.object_collectives import (
    all_or_none,
    broadcast_from_rank0,
    gather_objects,
    run_on_rank0,
    run_on_rank0_and_broadcast,
)
from boltmesh.strategies.torch_compat.tensors import is_composite

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
"""Keys of a Lightning checkpoint whose tensors may be shards."""

CURRENT = "current_model_state"
"""Lightning's key for the trained weights, if a run stores their average as MODEL."""

AVERAGED = "boltmesh_averaged_model_state"
"""Key for averaged weights, if a run stores the trained weights as MODEL."""

ALIASES = "boltmesh_aliases"
"""Key for the names of tied parameters, each with the name under which the tensor is stored."""


def save_directory(
    checkpoint: Mapping[str, Any], target: str | Path, *, is_divided: bool = False
) -> None:
    """Write a checkpoint whose tensors may be shards. Collective over all ranks.

    Args:
        checkpoint: Lightning's, with optimizer states by the names of parameters. Values
            that are not shards are taken from the first rank.
        target: Path or address of the new directory. The same on all ranks.
        is_divided: Whether tensors that are not shards, and other state of modules, are on one rank
            each, as in the stages of a pipeline.

    Raises:
        CheckpointError: On every rank, if one cannot write its part. A previous checkpoint at
            ``target`` is kept then.
    """
    tensors, rest = _divide(checkpoint, is_divided=is_divided)
    is_trainable_only = TRAINABLE_ONLY in checkpoint
    _write(tensors, rest, target, is_divided=is_divided, is_trainable_only=is_trainable_only)


def prepare_save(
    checkpoint: Mapping[str, Any],
    target: str | Path,
    group: dist.ProcessGroup,
    *,
    is_divided: bool,
) -> Callable[[], None]:
    """Copy the data of ``save_directory``, and return a function that writes them. Collective.

    Uses as much host memory as this rank's part of the checkpoint, until it is written.

    Args:
        checkpoint: See ``save_directory``.
        target: See ``save_directory``.
        group: CPU group of all ranks, used only for this. Writing is collective over it, from
            any thread, and fails as ``save_directory`` does.
        is_divided: See ``save_directory``.
    """
    kept, rest = copy_part(checkpoint, is_divided=is_divided, writes_plain=dist.get_rank() == 0)
    is_trainable_only = TRAINABLE_ONLY in checkpoint
    return bind(
        _write,
        kept,
        rest,
        target,
        is_divided=is_divided,
        is_trainable_only=is_trainable_only,
        group=group,
    )


def copy_part(
    checkpoint: Mapping[str, Any], *, is_divided: bool, writes_plain: bool
) -> tuple[dict[str, Any], bytes]:
    """Copy what this rank writes of a checkpoint into host memory. Collective over all ranks.

    Args:
        checkpoint: See ``save_directory``.
        is_divided: See ``save_directory``.
        writes_plain: Whether this rank writes tensors that are not shards.

    Returns:
        Its tensors, and on the first rank the rest, serialized.
    """
    tensors, rest = _divide(checkpoint, is_divided=is_divided)
    kept = take_snapshot(tensors, writes_plain=writes_plain or is_divided)
    return kept, serialised(rest) if dist.get_rank() == 0 else b""


def _write(
    tensors: dict[str, Any],
    rest: Mapping[str, Any] | bytes,
    target: str | Path,
    *,
    is_divided: bool,
    is_trainable_only: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    draft: Draft | None = None
    try:
        draft = folder_at(target).draft()
        start = run_on_rank0_and_broadcast(draft.begin, group)
        all_or_none(bind(_join_draft, draft, start), group)
        written = _write_shards(tensors, draft, is_divided=is_divided, group=group)
        complete = bind(
            complete_directory, rest, draft, written, is_trainable_only=is_trainable_only
        )
        run_on_rank0(complete, group)
    except BaseException as error:
        if draft is not None and dist.get_rank() == 0:
            draft.abandon()
        if isinstance(error, (CheckpointException, CheckpointError, OSError)):
            raise CheckpointError(cannot_write(target, _first_cause(error))) from error
        raise


def _join_draft(draft: Draft, start: DraftStart) -> None:
    if not draft.joins(start):
        raise CheckpointError(
            "rank 0 has made a folder there that this rank does not see; write to one that all "
            "machines share, and not to memory://, which each process has for itself"
        )


def is_directory(place: str | Path) -> bool:
    """Whether a checkpoint is a directory; restores one whose replacement was killed."""
    return folder_at(place).is_there()


def load_directory(place: str | Path, *, checks_files: bool = True) -> dict[str, Any]:
    """Read a checkpoint whose tensors are placeholders, which load this rank's part when copied.

    Args:
        place: Path or address of the directory.
        checks_files: Check that all files exist; it is enough if one rank of a job does.

    Raises:
        CheckpointError: If the directory is not complete, or not boltmesh's.
    """
    if fault := find_fault(place, checks_files=checks_files):
        raise CheckpointError(
            f"{place} is no complete checkpoint: {fault}. Resume from another one; a directory "
            f"of another program has to be made a single file first."
        )
    with refusing_nonsense(place):
        return _read(folder_at(place))


def _read(folder: Folder) -> dict[str, Any]:
    rest = BytesIO(read_checked(folder, REST))
    checkpoint: dict[str, Any] = safe_load(rest, f"{folder}/{REST}")
    reader = ShardReader(*files_of(folder), read_checked(folder, METADATA))
    has_names = [is_named(each) for each in checkpoint.get(OPTIMIZERS, ())]
    models: dict[str, dict[str, Any]] = {MODEL: {}}
    for name, keys in reader.paths().items():
        if keys[0] in {MODEL, CURRENT, AVERAGED}:
            models.setdefault(keys[0], {})[keys[1]] = stored(reader, name)
        else:
            number, (parameter, key) = int(keys[0].removeprefix("optimizer_")), keys[2:]
            # Numbers, in a directory made from a Lightning file.
            of = parameter if has_names[number] else int(parameter)
            state = checkpoint[OPTIMIZERS][number]["state"].setdefault(of, {})
            state[key] = stored(reader, name)
    aliases, extra = checkpoint.pop(ALIASES, {}), checkpoint.get(MODEL, {})
    for key, model in models.items():
        tied = {alias: model[name] for alias, name in aliases.items()}
        checkpoint[key] = {**model, **tied, **extra}
    for state in checkpoint.get("callbacks", {}).values():
        # Under replicas StochasticWeightAveraging reads it as Lightning does.
        if isinstance(state, dict) and "average_model_state" in state:
            state["average_model_state"] = checkpoint.get(AVERAGED, checkpoint[MODEL])
    return checkpoint


def find_damage(place: str | Path, *, threads: int = 1) -> str | None:
    """Return a description of damage to the files of a directory; None if there is none.

    Reads all files, one piece of about 64 MiB per thread at a time.

    Raises:
        OSError: If the medium cannot be read.
    """
    if fault := find_fault(place):
        return fault
    folder = folder_at(place)
    try:
        with refusing_nonsense(place):
            read_checked(folder, REST)
            metadata = read_checked(folder, METADATA)
        reader = ShardReader(*files_of(folder), metadata)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(reader.check, reader.pieces()):
                pass
    except CheckpointError as error:
        return re.sub(r"\. (Resume from|Take) another checkpoint\.$", "", str(error))
    except OSError as error:
        if not is_damage(error):
            raise
        return str(error)
    return None


def _divide(
    checkpoint: Mapping[str, Any], *, is_divided: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors for the files of shards, and the rest. Collective if ``is_divided``."""
    rest = dict(checkpoint)
    model, aliases, extra = {}, {}, {}
    seen: dict[int, str] = {}
    for name, value in rest.pop(MODEL, {}).items():
        if not isinstance(value, Tensor) or is_composite(value):
            extra[name] = value
        elif id(value) in seen:
            aliases[name] = seen[id(value)]
        else:
            seen[id(value)] = name
            model[name] = value
    tensors: dict[str, Any] = {MODEL: model} if model else {}
    for key in (CURRENT, AVERAGED):
        if key in rest:  # has the names of the other
            beside = rest.pop(key)
            tensors[key] = {name: beside[name] for name in model}
    states = []
    for number, each in enumerate(rest.pop(OPTIMIZERS, ())):
        large: dict[str, dict[str, Tensor]] = {}
        small: dict[str, dict[str, Any]] = {}
        for parameter, state in each["state"].items():
            for key, value in state.items():
                # Counters are many and small: one file suits them better than pieces.
                chosen = large if is_stored_apart(value) else small
                chosen.setdefault(parameter, {})[key] = value
        if large:
            tensors[f"optimizer_{number}"] = {"state": large}
        states.append({**each, "state": small})
    if OPTIMIZERS in checkpoint:
        rest[OPTIMIZERS] = states
    rest[MODEL], rest[ALIASES] = extra, aliases
    # Lightning records the class of hyper-parameters, which are plain containers now.
    rest = _plain({key: each for key, each in rest.items() if not _is_container_class(each)})
    if is_divided:  # other ranks have further tied names, and extra state of modules
        for extra, aliases in gather_objects((rest[MODEL], rest[ALIASES])):
            rest[MODEL] |= extra
            rest[ALIASES] |= aliases
    return tensors, rest


def _is_container_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Container)


def _plain(value: Any, where: str = "checkpoint") -> Any:
    """Return the value with types that ``torch.load(weights_only=True)`` can load.

    Raises:
        CheckpointError: If it contains a shard, of which only the first rank's would be stored.
    """
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{where} is a shard, which could not be loaded: only state_dict and optimizer states "
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


def _write_shards(
    tensors: dict[str, Any], draft: Draft, *, is_divided: bool, group: dist.ProcessGroup | None
) -> dict[str, Written]:
    """Write this rank's shards; the first rank returns all files so far. Collective."""
    writer = ShardWriter(draft)
    with torch.no_grad():
        save(
            tensors,
            storage_writer=writer,
            planner=PiecePlanner(is_divided=is_divided),
            process_group=group,
        )
    return writer.written


def complete_directory(
    rest: Mapping[str, Any] | bytes,
    draft: Draft,
    shards: Mapping[str, Written],
    *,
    is_trainable_only: bool = False,
) -> None:
    """Write all other state of a checkpoint, perhaps serialized, and the manifest."""
    with draft.create(REST) as opened:
        file = SummedFile(opened)
        if isinstance(rest, bytes):
            file.write(rest)
        else:
            save_into(dict(rest), cast("IO[bytes]", file))
    files = {**shards, REST: file.written()}
    write_manifest(
        draft,
        world_size=dist.get_world_size(),
        files=files,
        is_trainable_only=is_trainable_only,
    )


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        cause = error.failures[rank][0]
        return f"{getattr(cause, 'strerror', None) or cause} (rank {rank})"
    return str(getattr(error, "strerror", None) or error)


def mend_folders(trainer: Trainer) -> None:
    """Restore ``file://`` addresses of callbacks' folders, see ``mended``."""
    for callback in _savers(trainer):
        callback.dirpath = mended(str(callback.dirpath))


def refuse_unshared_folders(trainer: Trainer) -> None:
    """Refuse folders of callbacks that not all ranks see. Collective over all ranks.

    Raises:
        ConfigError: On every rank, naming the folder and a rank that does not see it.
    """
    if trainer.world_size == 1 or getattr(trainer, "fast_dev_run", False):
        return
    saving = (each for each in _savers(trainer) if each.save_top_k != 0 or each.save_last)
    for folder in dict.fromkeys(str(each.dirpath) for each in saving):
        _refuse_unshared(folder)


def _savers(trainer: Trainer) -> Iterator[ModelCheckpoint]:
    for each in trainer.checkpoint_callbacks:
        if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
            yield each


def _refuse_unshared(folder: str) -> None:
    name = broadcast_from_rank0(f".boltmesh-{uuid4().hex}")
    # Opened at its first use, which all ranks share: one that cannot open it does not fail alone.
    probe = cache(lambda: folder_at(folder).inside(name).draft())
    try:
        start = run_on_rank0_and_broadcast(lambda: probe().begin())
    except CheckpointError as error:
        raise ConfigError(
            f"ModelCheckpoint saves to {folder}, and nothing can be written there: {error}. "
            f"Give it another dirpath."
        ) from error
    reports = gather_objects(_look(probe, start))
    if dist.get_rank() == 0:
        probe().abandon()
    for rank, report in enumerate(reports):
        if report is not None:
            raise ConfigError(
                f"ModelCheckpoint saves to {folder}, where all ranks write their shards together, "
                f"and rank {rank} does not see what rank 0 writes there{report}. Give it a dirpath "
                f"that all ranks share: a mounted folder, or an address like s3://bucket/folder."
            )


def _look(probe: Callable[[], Draft], start: DraftStart) -> str | None:
    """Return why this rank does not see the draft; None if it does."""
    try:
        return None if probe().joins(start) else ""
    except (ConfigError, OSError) as error:
        return f" ({error})"

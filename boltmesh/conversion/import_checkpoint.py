"""``boltmesh import``: converts files of other programs to a directory of shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning import __version__ as lightning_version
from torch.distributed import HashStore  # type: ignore[attr-defined]

from boltmesh.conversion.safetensors_files import StoredModel, is_safetensors, open_safetensors
from boltmesh.conversion.source import open_file, second_names, tensors_of
from boltmesh.conversion.writing import check_target
from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.directory import MODEL, OPTIMIZERS, save_directory
from boltmesh.strategies.checkpoint.manifest import MANIFEST


def import_checkpoint(
    source: str | Path, target: str | Path, *, prefix: str, ties: Mapping[str, str], force: bool
) -> list[str]:
    """Write a directory of shards; return the lines to show.

    Args:
        source: A Lightning file, a safetensors file, or a folder of those.
        target: Path or address of the directory to be.
        prefix: Put before the names of safetensors.
        ties: Names that are to be there besides, and the tensors that they are.
        force: Replace what is at ``target``.

    Raises:
        ConfigError: When something given is wrong.
        CheckpointError: When it could not be written.
    """
    if not isinstance(source, Path):
        raise ConfigError(
            f"{source} is on a remote file system, and files are read from a local disk alone, "
            f"where they can be mapped. Copy it to one. (Directories of shards need no import.)"
        )
    if source.is_dir() and (source / MANIFEST).is_file():
        raise ConfigError(f"{source} is a checkpoint of boltmesh as it is: every layout loads it.")
    check_target(target, source, force=force)
    is_model = is_safetensors(source)
    if is_model:
        checkpoint = weights_alone(open_safetensors(source), prefix=prefix, ties=ties)
    elif source.is_dir():
        raise ConfigError(
            f"{source} has no .safetensors file. Name a Lightning file, a safetensors file, or a "
            f"folder of those."
        )
    elif prefix or ties:
        raise ConfigError(
            "A Lightning file has the names of its LightningModule. Leave --prefix and --tie out."
        )
    else:
        checkpoint = open_file(source)
    save_alone(checkpoint, target)
    tensors = tensors_of(checkpoint)
    count = len(tensors) - len(second_names(tensors))
    states = len(checkpoint.get(OPTIMIZERS, ()))
    state = f" and {states} optimizer{'s' if states > 1 else ''}" if states else ""
    lines = [f"{target}: {count} tensors of the model{state}"]
    if is_model:
        first = next(iter(tensors))
        lines.append(f"names: as {first}")
    return lines


def weights_alone(model: StoredModel, *, prefix: str, ties: Mapping[str, str]) -> dict[str, Any]:
    """Return the checkpoint that Lightning makes of a model whose weights alone are saved.

    Raises:
        ConfigError: When a tie names a tensor that is not there, or gives a name that is taken.
    """
    state = dict(model.tensors)
    for name, kept in {**model.aliases, **ties}.items():
        if kept not in model.tensors:
            raise ConfigError(f"--tie {name}={kept}: there is no tensor {kept}.")
        if name in model.tensors:
            raise ConfigError(f"--tie {name}={kept}: {name} has a tensor of its own.")
        state[name] = model.tensors[kept]
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning_version,
        MODEL: {f"{prefix}{name}": each for name, each in state.items()},
    }


def save_alone(checkpoint: Mapping[str, Any], target: str | Path) -> None:
    """Write a directory of shards in this process alone, a piece of one tensor at a time.

    Raises:
        CheckpointError: When it could not be written.
    """
    state = checkpoint[MODEL]
    first = second_names(tensors_of(checkpoint))
    # One object per tensor: that is how tied ones are known.
    one = {name: state[first[name]] if name in first else each for name, each in state.items()}
    has_group = dist.is_initialized()
    if not has_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        save_directory({**checkpoint, MODEL: one}, target)
    finally:
        if not has_group:
            dist.destroy_process_group()

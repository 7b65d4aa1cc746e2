"""``boltmesh export``: a checkpoint for programs that know nothing of boltmesh.

Names of parameters in a LightningModule, and in the model that it holds.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from boltmesh.conversion.lightning_file import write_lightning_file
from boltmesh.conversion.peft_adapter import adapters_of, write_adapters
from boltmesh.conversion.safetensors_files import CONFIG, SUFFIX, num_bytes, write_model
from boltmesh.conversion.source import load_value, open_checkpoint, tensors_of
from boltmesh.conversion.writing import check_target
from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.adapters import TRAINABLE_ONLY
from boltmesh.strategies.checkpoint.storage.addresses import is_file

T = TypeVar("T")


def find_prefix(names: Iterable[str]) -> str:
    """The attribute of the LightningModule that holds its model, with a point behind it.

    It can be told when the module has parameters and buffers in one attribute only.

    Raises:
        ConfigError: When there are several.
    """
    counts: dict[str, int] = {}
    for name in names:
        first, point, _ = name.partition(".")
        key = first + point
        counts[key] = counts.get(key, 0) + 1
    if len(counts) == 1:
        (found,) = counts
        if found.endswith("."):
            return found
    found = ", ".join(f"{key} ({count})" for key, count in sorted(counts.items())[:6])
    raise ConfigError(
        f"Which tensors are those of the model cannot be told: they begin with {found}. Say "
        f"--prefix '' to keep all names as they are, or what is to be taken off them, such as "
        f"--prefix {_likeliest(counts)}"
    )


def take_off(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Those whose names begin with a prefix, by the rest of their names.

    Raises:
        ConfigError: When there are none.
    """
    kept = {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }
    kept.pop("", None)
    if not kept:
        first = next(iter(tensors), "none")
        raise ConfigError(
            f"No tensor has a name that begins with {prefix!r}; the first one is {first}."
        )
    return kept


def _likeliest(counts: Mapping[str, int]) -> str:
    attributes = [each for each in counts if each.endswith(".")]
    return max(attributes, key=lambda each: (counts[each], each), default="''")


LIGHTNING_SUFFIX = ".ckpt"
FOREIGN_SUFFIXES = {".pt", ".pth", ".bin"}
DEFAULT_SHARD_BYTES = 5_000_000_000

Progress = Callable[[int], Any]
Counted = Callable[[int], Progress]
"""Takes the number of bytes there will be, and gives what is told of those that are done."""


def export(
    source: str | Path,
    target: str | Path,
    *,
    prefix: str | None,
    max_shard_bytes: int | None,
    force: bool,
    counted: Counted,
    is_for_peft: bool = False,
    hugging_face: Path | None = None,
) -> list[str]:
    """Write ``target`` from a checkpoint; return the lines to show.

    Args:
        source: A directory of shards, by its path or address, or for safetensors also a Lightning
            file.
        target: ``.ckpt`` for a Lightning file, ``.safetensors`` for one file of the weights, else
            a folder of the weights.
        prefix: What to take off the names for safetensors; None finds it.
        max_shard_bytes: Of a file in a folder.
        force: Replace what is at ``target``.
        counted: Shows how far it is.
        is_for_peft: Write the adapters of peft alone, into a folder.
        hugging_face: A config.json, or a folder with one: write a folder that ``from_pretrained``
            loads, under the names of the model's files on the Hub. Holds all tensors in memory.

    Raises:
        ConfigError: When something given is wrong.
        CheckpointError: When it could not be written.
    """
    if not isinstance(target, Path):
        raise ConfigError(
            f"{target} is on a remote file system, and what is exported is written to a local disk "
            f"alone. Name a path, and copy the result."
        )
    is_folder = target.suffix not in {LIGHTNING_SUFFIX, SUFFIX}
    if target.suffix in FOREIGN_SUFFIXES:
        raise ConfigError(
            f"{target.name} is to be a file of a kind that is not written. End its name in .ckpt "
            f"for a Lightning file or in .safetensors, or name a folder for safetensors."
        )
    if not is_folder and max_shard_bytes is not None:
        raise ConfigError(
            f"{target.name} is one file, and --max-shard-size divides a folder. Say --to FOLDER."
        )
    if target.suffix == LIGHTNING_SUFFIX and prefix is not None:
        raise ConfigError(
            "A Lightning file keeps the names of the LightningModule. Leave --prefix out, or say "
            "--to FOLDER for safetensors."
        )
    if is_for_peft and (not is_folder or prefix is not None or max_shard_bytes is not None):
        raise ConfigError(
            "--peft writes a folder with names of peft's own. Say --to FOLDER, and leave --prefix "
            "and --max-shard-size out."
        )
    if hugging_face is not None and (not is_folder or is_for_peft):
        raise ConfigError("--hf writes a folder. Say --to FOLDER, and leave --peft out.")
    if isinstance(source, Path) and source.exists() and target.resolve() == source.resolve():
        raise ConfigError(f"{target} is what is to be exported. Choose another name.")
    check_target(target, force=force)
    checkpoint = open_checkpoint(source)
    if is_for_peft:
        adapters = adapters_of(checkpoint, source)
        total = sum(_total(each) for each in adapters.values())
        return write_adapters(checkpoint, adapters, target, progress=counted(total))
    if target.suffix == LIGHTNING_SUFFIX:
        if is_file(source):
            raise ConfigError(f"{source} is a Lightning file as it is: copy it.")
        return _export_file(checkpoint, target, counted)
    tensors = tensors_of(checkpoint)
    found = find_prefix(tensors) if prefix is None else prefix
    model = take_off(tensors, found)
    left_out = [name for name in tensors if not name.startswith(found)]
    config = None if hugging_face is None else config_file(hugging_face)
    if config is not None:
        model = as_on_the_hub(model, config)
    limit = (max_shard_bytes or DEFAULT_SHARD_BYTES) if is_folder else None
    total = _total(model)
    aliases = write_model(
        model, target, max_shard_bytes=limit, progress=counted(total), config=config
    )
    lines = [f"{target}: {len(model) - len(aliases)} tensors, {_size(total)}"]
    if found:
        lines.append(f"names: without {found!r}")
    lines += [f"tied: {name} is {kept}, written once" for name, kept in aliases.items()]
    if frozen := checkpoint.get(TRAINABLE_ONLY):
        lines.append(f"not there: {len(frozen)} frozen parameters, which the checkpoint leaves out")
    if left_out:
        lines.append(f"left out: {len(left_out)} tensors elsewhere, such as {left_out[0]}")
    return lines


def config_file(path: Path) -> Path:
    """Return the config.json that is meant.

    Raises:
        ConfigError: When there is none.
    """
    found = path / CONFIG if path.is_dir() else path
    if not found.is_file():
        raise ConfigError(
            f"{path} has no {CONFIG}. Write it with model.config.save_pretrained(FOLDER), and say "
            f"--hf FOLDER."
        )
    return found


def as_on_the_hub(tensors: Mapping[str, Tensor], config: Path) -> dict[str, Tensor]:
    """Return tensors under the names, and in the parts, of a Hugging Face model's own files.

    A model in memory may have several of them as one, such as the matrices of its experts.

    Args:
        tensors: By their names in memory.
        config: The model's config.json.

    Raises:
        ConfigError: When the model has no such tensors.
    """
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    read = transformers.AutoConfig.from_pretrained(config, local_files_only=True)
    kind = getattr(transformers, (read.architectures or ["none"])[0], None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(read) if kind is None else kind(read)
    unknown = [name for name in tensors if name not in model.state_dict()]
    if unknown:
        raise ConfigError(
            f"{type(model).__name__} of {config} has no tensor {unknown[0]!r}. Say --prefix for "
            f"what is before its names, or name the configuration of this model."
        )
    loaded = {name: load_value(each, name) for name, each in tensors.items()}
    made: dict[str, Tensor] = revert_weight_conversion(model, loaded)
    return {name: each.contiguous() for name, each in made.items()}


def _export_file(checkpoint: Mapping[str, Any], target: Path, counted: Counted) -> list[str]:
    total = _total(_all_tensors(checkpoint))
    write_lightning_file(checkpoint, target, progress=counted(total))
    parts = [f"{len(tensors_of(checkpoint))} tensors of the model"]
    if states := checkpoint.get("optimizer_states"):
        parts.append(f"{len(states)} optimizer{'s' if len(states) > 1 else ''}")
    if frozen := checkpoint.get(TRAINABLE_ONLY):
        parts.append(f"without {len(frozen)} frozen parameters")
    if "loops" in checkpoint:
        parts.append(f"step {checkpoint.get('global_step', 0)}")
    return [f"{target}: {', '.join(parts)}, {_size(total)}"]


def _all_tensors(value: Any) -> dict[str, Tensor]:
    """Every tensor of nested dictionaries and lists, once."""
    found: dict[str, Tensor] = {}
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, Tensor):
            found[str(id(each))] = each
        elif isinstance(each, Mapping):
            stack += each.values()
        elif isinstance(each, (list, tuple)):
            stack += each
    return found


def _total(tensors: Mapping[str, Tensor]) -> int:
    return sum(num_bytes(each) for each in {id(each): each for each in tensors.values()}.values())


def _size(num: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num >= size:
            return f"{num / size:.1f} {unit}"
    return f"{num} bytes"

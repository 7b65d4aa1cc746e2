"""Names and shapes of a Hugging Face model's tensors in the files that the Hub has of it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from boltmesh.conversion.safetensors_files import CONFIG
from boltmesh.conversion.source import load_value
from boltmesh.errors import ConfigError


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

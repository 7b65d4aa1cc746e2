"""``StartingWeights``: training that starts from the weights of a checkpoint.

``Trainer.fit(ckpt_path=...)`` resumes a run and needs optimizers, loops and schedulers. For a new
run that starts from other weights, such as imported ones, each rank reads its part of them.
"""

from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.collective_errors import all_or_none
from boltmesh.strategies.checkpoint.directory import MODEL, is_directory, load_directory
from boltmesh.strategies.checkpoint.file import load_file
from boltmesh.strategies.checkpoint.storage.addresses import is_file, path_or_address


class StartingWeights(Callback):
    """Loads weights when a fit begins.

    No effect on a fit that resumes; except with ``save_trainable_only=True`` and a strategy that
    shards, where these are the base of what is resumed.

    ::

        Trainer(strategy="bolt_zero3", callbacks=[StartingWeights("model.boltmesh")])

    No rank holds the full model meanwhile. ``strict_loading`` of the module decides whether all
    names have to be present.

    Args:
        path: A directory of shards or a Lightning file, or its address for fsspec. Relative
            paths are those of the working directory.

    Raises:
        ConfigError: If ``path`` does not exist.
    """

    def __init__(self, path: str) -> None:
        self.path = path_or_address(path)
        if not is_directory(self.path) and not is_file(self.path):
            raise ConfigError(
                f"{path} does not exist. Give StartingWeights a checkpoint; 'boltmesh import' "
                f"makes one of safetensors."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        is_base = (
            getattr(strategy, "save_trainable_only", False)
            and strategy.restore_checkpoint_after_setup
        )
        if trainer.ckpt_path is not None and not is_base:
            return
        checkpoint = all_or_none(partial(self._load, checks_files=trainer.is_global_zero))
        # As Lightning does for checkpoints it loads.
        pl_module.on_load_checkpoint(checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)

    def _load(self, *, checks_files: bool) -> dict[str, Any]:
        if is_directory(self.path):
            checkpoint = load_directory(self.path, checks_files=checks_files)
        else:
            checkpoint = load_file(self.path, is_mapped=True, checks_values=checks_files)
        if MODEL not in checkpoint:
            raise ConfigError(f"{self.path} has no 'state_dict', as checkpoints of Lightning have.")
        return checkpoint

"""A callback that finds the recording of a run."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class RecordingPath(Callback):
    """Keeps where the telemetry of a run is."""

    path = ""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.path = str(strategy.recorder.path)

"""``ReplicatedStrategy``: one process, a copy of the model on each of several devices."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from typing_extensions import override

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies.data.lone import LoneRank
from boltmesh.strategies.data.scattering import scattered_step
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.steps.metrics import find_metrics


class ReplicatedStrategy(MeshStrategy):
    """Data parallelism as ``torch.nn.DataParallel`` has it, to be compared with.

    One process cuts each batch along its rows, copies the model to every device for every batch,
    and runs a thread for each. The numbers are those of one device with the same batch, where the
    loss is a mean over rows; buffers keep what the first device's rows have made of them. Memory
    of the first device: the whole model, its gradients and its optimizer state; of the others a
    copy of the parameters and its gradients. ``DDPStrategy`` is faster and is what to train with.

    Args:
        devices: Indices of CUDA devices, the first one that of the Trainer; None: all that there
            are, from that one on.
        **kwargs: As for ``MeshStrategy``.

    Raises:
        ConfigError: At ``setup``, without several CUDA devices, for manual optimisation, and for
            modules that keep metrics.
        LayoutError: For several processes, when the Trainer is built.
    """

    strategy_name = "bolt_replicated"

    is_distributed = False
    """Loaders keep the sampler that their author gave them: there is nobody to share data with."""

    def __init__(self, *, devices: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(data_axis=LoneRank(), **kwargs)
        self._asked = None if devices is None else tuple(devices)
        self.devices: tuple[torch.device, ...] = ()
        """Set by ``setup``."""

    @override
    def layout_of(self, world_size: int) -> MeshLayout:
        if world_size > 1:
            raise LayoutError(
                f"bolt_replicated is one process over several devices, and the job has "
                f"{world_size}. Set devices=1 for the Trainer, and strategy.devices for the copies."
            )
        return super().layout_of(world_size)

    @override
    def place(self, trainer: Trainer) -> None:
        self.devices = self.find_devices()
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} optimises by hand, within steps that copies of it would "
                f"make at the same time. Use automatic optimisation, or bolt_ddp."
            )
        if metrics := find_metrics(module):
            raise ConfigError(
                f"{type(module).__name__} keeps the metric {next(iter(metrics))!r}, which copies "
                f"of it would update at the same time. Leave it out, or use bolt_ddp."
            )
        super().place(trainer)

    def find_devices(self) -> tuple[torch.device, ...]:
        """Return where copies are.

        Raises:
            ConfigError: Where there are no several CUDA devices.
        """
        root = self.root_device
        if root.type != "cuda":
            raise ConfigError(
                f"bolt_replicated copies the model to several CUDA devices, and this runs on "
                f"{root}. Use bolt_ddp, whose processes may share a CPU."
            )
        available = torch.cuda.device_count()
        first = root.index or 0
        chosen = tuple(range(first, available)) if self._asked is None else self._asked
        if len(chosen) < 2 or len(set(chosen)) < len(chosen):
            raise ConfigError(
                f"bolt_replicated is for several CUDA devices, and gets {list(chosen)} of "
                f"{available}. Use bolt_ddp with devices=1."
            )
        if chosen[0] != first or max(chosen) >= available:
            raise ConfigError(
                f"strategy.devices={list(chosen)} has to begin with device {first}, which is the "
                f"Trainer's, and name some of the {available} that there are. "
                f"Set strategy.devices={list(range(first, available))}."
            )
        return tuple(torch.device("cuda", each) for each in chosen)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        self.check_batch(args[0])
        with self.recorder.phase("forward"):
            return scattered_step(
                module,
                args,
                kwargs,
                devices=self.devices,
                around=self.precision_plugin.train_step_context,
            )

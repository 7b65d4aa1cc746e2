"""``ReplicatedStrategy``: one process with a copy of the model on each of several devices.

A training step runs on the devices as in ``torch.nn.DataParallel``: the batch is divided along its
rows over the devices; the model is copied to all of them and runs there, in a thread each, and
gradients come back through the copies. In addition to ``DataParallel``, the loss of the batch is
the mean of the parts' losses, weighted by their rows, and logged values are combined likewise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import parallel_apply, replicate, scatter
from typing_extensions import override

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies.data_parallel.single_rank import SingleRankAxis
from boltmesh.strategies.dry_run.metrics import find_metrics
from boltmesh.strategies.dry_run.unsupported import refuse_quantized
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.lightning_compat.trainer import tell_device
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.torch_compat.tensors import tree_leaves

Call = tuple[str, Any, dict[str, Any]]
"""Name, value and options of one ``self.log``."""


class _StepModule(Module):
    """Makes a training step the forward of a module, which is all that torch replicates."""

    def __init__(self, module: LightningModule, around: Any) -> None:
        super().__init__()
        self.module = module
        self.around = around
        self.logged: list[Call] = []

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Threads do not inherit autocast from the one that started them.
        with self.around():
            return self.module.training_step(*args, **kwargs)

    def keep_logs(self) -> None:
        """Make ``self.log`` of this copy record here: the loops support no threads."""
        calls: list[Call] = []
        self.logged = calls

        def keep(name: str, value: Any, *positional: Any, **options: Any) -> None:
            if positional:
                raise ConfigError(
                    f"self.log({name!r}, ...) gives options by position, and replicas take them by "
                    f"name. Write self.log({name!r}, value, prog_bar=True)."
                )
            calls.append((name, value, options))

        vars(self.module)["log"] = keep


def scattered_step(
    module: LightningModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    devices: Sequence[torch.device],
    around: Any,
) -> Any:
    """Run a training step on copies of a module, and return its result for the whole batch.

    Args:
        module: The module, on the first device.
        args: Positional arguments of the step: a batch ``(B, ...)``, and further ones.
        kwargs: Keyword arguments of the step.
        devices: One for each copy; a batch with fewer rows uses fewer.
        around: Context of the steps' precision.

    Returns:
        The mean loss, a scalar on the first device, or the step's mapping with it.

    Raises:
        ConfigError: If the batch has no rows to divide.
    """
    shares = [tuple(each) for each in scatter(args, devices)]
    named = scatter(dict(kwargs), devices) if kwargs else [{} for _ in shares]
    rows = [_rows(each[0]) for each in shares]
    step = _StepModule(module, around)
    step.train(module.training)
    copies = replicate(step, devices[: len(shares)])
    for copy, device in zip(copies, devices, strict=False):
        tell_device(copy, device)
        copy.keep_logs()
    results = parallel_apply(copies, shares, list(named)[: len(shares)], devices[: len(shares)])
    _log(module, [each.logged for each in copies], rows)
    losses = [each.get("loss") if isinstance(each, Mapping) else each for each in results]
    known = [(loss, count) for loss, count in zip(losses, rows, strict=True) if loss is not None]
    loss = _mean(known, devices[0]) if known else None
    if not isinstance(results[0], Mapping):
        return loss
    keys = [key for key in results[0] if key != "loss"]
    return {**{key: [each[key] for each in results] for key in keys}, "loss": loss}


def _rows(share: Any) -> int:
    for each in tree_leaves(share):
        if isinstance(each, Tensor) and each.dim():
            return len(each)
    raise ConfigError(
        "A batch without a tensor that has rows cannot be divided over devices. Use bolt_ddp, "
        "which gives every process batches of its own."
    )


def _mean(values: Sequence[tuple[Any, int]], device: torch.device) -> Tensor:
    total = sum(count for _, count in values)
    parts = [torch.as_tensor(value, device=device) * (count / total) for value, count in values]
    return torch.stack(parts).sum(0)


def _log(module: LightningModule, logged: Sequence[Sequence[Call]], rows: Sequence[int]) -> None:
    """Make the log calls of all copies once on the module, in the order of the first copy."""
    device = module.device
    for at, (name, value, options) in enumerate(logged[0]):
        same = [calls[at] for calls in logged if len(calls) > at and calls[at][0] == name]
        if len(same) < len(logged):
            raise ConfigError(
                f"training_step logs {name!r} for the share of one device and not for that of "
                f"another. Log the same on all of them, or use bolt_ddp."
            )
        if isinstance(value, Mapping):
            mean: Any = {
                key: _mean([(each[1][key], n) for each, n in zip(same, rows, strict=True)], device)
                for key in value
            }
        else:
            mean = _mean([(each[1], n) for each, n in zip(same, rows, strict=True)], device)
        sizes = [each[2]["batch_size"] for each in same if each[2].get("batch_size") is not None]
        counted = {"batch_size": sum(sizes)} if sizes else {}
        module.log(name, mean, **{**options, **counted})


class ReplicatedStrategy(MeshStrategy):
    """Data parallelism like ``torch.nn.DataParallel``, for comparisons.

    One process divides each batch along its rows, copies the model to every device for every batch,
    and runs a thread for each. Results are those of one device with the same batch, if the loss is
    a mean over rows; buffers keep the values of the first device's rows. Memory of the first
    device: the whole model, its gradients and its optimizer state; of the others, a copy of the
    parameters and its gradients. ``DDPStrategy`` is faster, and should be used for training.

    Args:
        devices: Indices of CUDA devices, the first one being the Trainer's; None for all devices
            from that one on.
        **kwargs: As for ``MeshStrategy``.

    Raises:
        ConfigError: At ``setup``, without several CUDA devices, for manual optimisation, and for
            modules with metrics.
        LayoutError: For several processes, when the Trainer is built.
    """

    strategy_name = "bolt_replicated"

    is_distributed = False
    """Loaders keep their author's sampler: there are no other processes to share data with."""

    def __init__(self, *, devices: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(axes=[SingleRankAxis()], **kwargs)
        self._asked = None if devices is None else tuple(devices)
        self.devices: tuple[torch.device, ...] = ()
        """Set by ``setup``."""

    @override
    def choose_layout(self, world_size: int) -> MeshLayout:
        if world_size > 1:
            raise LayoutError(
                f"bolt_replicated is one process over several devices, and the job has "
                f"{world_size}. Set devices=1 for the Trainer, and strategy.devices for the copies."
            )
        return super().choose_layout(world_size)

    @override
    def setup(self, trainer: Trainer) -> None:
        self.devices = self.find_devices()
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} optimises by hand, within steps that copies of it would "
                f"make at the same time. Use automatic optimisation, or bolt_ddp."
            )
        refuse_quantized(module, self.public_name, divides_layers=True)
        if metrics := find_metrics(module):
            raise ConfigError(
                f"{type(module).__name__} keeps the metric {next(iter(metrics))!r}, which copies "
                f"of it would update at the same time. Leave it out, or use bolt_ddp."
            )
        super().setup(trainer)

    def find_devices(self) -> tuple[torch.device, ...]:
        """Return the devices of the copies.

        Raises:
            ConfigError: Without several CUDA devices.
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

"""Callbacks: ``DetectNonFinite`` and ``StartingWeights``.

``DetectNonFinite`` names the first module whose output is not finite, its rank and its step.

``StartingWeights`` starts training from the weights of a checkpoint. ``Trainer.fit(ckpt_path=...)``
resumes a run and needs optimizers, loops and schedulers. For a new run that starts from other
weights, such as imported ones, each rank reads its part of them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import ConfigError, DivergenceError
from boltmesh.strategies.checkpoint.directory import MODEL, is_directory, load_directory
from boltmesh.strategies.checkpoint.file import load_file
from boltmesh.strategies.checkpoint.storage.addresses import is_file, path_or_address
from boltmesh.strategies.object_collectives import all_or_none, gather_objects
from boltmesh.strategies.patch import Changes
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pytree import tensors_in
from boltmesh.strategies.torch_compat.tensors import is_fake

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

BATCH, LOSS = "the batch itself", "the loss"


class DetectNonFinite(Callback):
    """Ends training at the first output of a module that contains a NaN or an infinity.

    A cheaper ``Trainer(detect_anomaly=True)``: one comparison of each module's output, and one
    small collective per batch, which waits for the device. Modules are checked in the order in
    which they finish: the one that is named holds the operation, and no module inside it does.
    Negative infinity is allowed, since masks use it.

    The error is raised after the batch, before a checkpoint of it is saved, and is the same on all
    ranks: it names the rank with the earliest module. In a pipeline, the layers that a stage runs
    are checked, with the modules in them: the earliest layer of any microbatch is named. Compiled
    modules are not checked, only modules that contain them.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._forwards = Changes()
        """Forwards of the layers of a pipeline."""
        self._places = {BATCH: -1}
        """Index of the layer of a pipeline that a module is or is part of."""
        self._seen: list[tuple[str, Tensor]] = []
        """Names, each with a 0-dim bool on the device: whether no element is NaN or +inf."""
        self._last: Tensor | None = None
        self._step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for axis in getattr(trainer.strategy, "axes", ()):
            if isinstance(axis, PipelineAxis) and axis.staged.placement is not None:
                self._look_at_units(axis.staged.placement.plans.units)
                return
        for name, module in pl_module.named_modules():
            if name:
                self._add_hook(name, module)

    def _add_hook(self, name: str, module: Module) -> None:
        hook = partial(self._look, name)
        self._handles.append(module.register_forward_hook(hook, always_call=False))

    def _look_at_units(self, units: Mapping[str, Module]) -> None:
        """Check units where their stage runs them: hooks on a unit would run on every stage."""
        for place, (name, unit) in enumerate(units.items()):
            for inner, module in unit.named_modules(prefix=name):
                self._places[inner] = place
                if module is not unit:
                    self._add_hook(inner, module)
            self._forwards.set(unit, "forward", partial(self._run, name, unit, unit.forward))
        self._places[LOSS] = len(units)

    def _run(
        self, name: str, unit: Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        output = forward(*args, **kwargs)
        self._look(name, unit, args, output)
        return output

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._seen.clear()
        self._step = trainer.global_step + 1
        self._note(BATCH, batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note(LOSS, outputs.get("loss") if isinstance(outputs, dict) else outputs)
        device = trainer.strategy.root_device
        seen, self._seen, self._last = self._seen, [], None
        flags = [flag.to(device) for _, flag in seen]
        is_finite = torch.stack(flags) if flags else torch.ones(1, dtype=torch.bool, device=device)
        is_fine = is_finite.all().int()
        if dist.is_initialized():
            dist.all_reduce(is_fine, dist.ReduceOp.MIN)
        if bool(is_fine):
            return
        own = min(
            (
                (self._places.get(name, 0), at, trainer.global_rank, name)
                for at, (name, _) in enumerate(seen)
                if not is_finite[at]
            ),
            default=None,
        )
        failures: list[tuple[int, int, int, str] | None] = [own]
        if dist.is_initialized():
            failures = gather_objects(own)
        _, _, rank, name = min(each for each in failures if each is not None)
        what = name if name in {BATCH, LOSS} else f"the output of {name}"
        raise DivergenceError(
            f"in step {self._step} (batch {batch_idx} of the epoch) {what} is not finite on rank "
            f"{rank}; all that came before it was. Resume from an earlier checkpoint, with a lower "
            f"learning rate, gradient_clip_val, or a wider precision."
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for each in self._handles:
            each.remove()
        self._handles.clear()
        self._forwards.undo()
        self._seen.clear()

    def _look(self, name: str, module: Module, inputs: Any, output: Any) -> None:
        if module.training and not torch.compiler.is_compiling():
            self._note(name, output)

    def _note(self, name: str, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor is self._last or not tensor.is_floating_point() or not tensor.numel():
                continue
            self._last = tensor  # which the module around it often gives out again
            local = tensor.detach()
            if isinstance(local, DTensor):
                local = local.to_local()
            if local.device.type == "meta" or is_fake(local):
                continue
            self._seen.append((name, (local < float("inf")).all()))


class StartingWeights(Callback):
    """Loads weights when a fit begins.

    No effect on a fit that resumes, except with ``save_trainable_only=True`` and a strategy that
    shards: the resumed checkpoint then lacks the frozen weights, which are loaded from here.

    ::

        Trainer(strategy="bolt_zero3", callbacks=[StartingWeights("model.boltmesh")])

    No rank holds the full model while loading. ``strict_loading`` of the module decides whether all
    names have to be present.

    Args:
        path: A directory of shards or a Lightning file, or its address for fsspec. A relative path
            starts at the working directory.

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

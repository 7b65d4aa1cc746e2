"""Opens a strategy's telemetry: describes the job, this rank's place, and the groups of axes."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.optim import Optimizer

from boltmesh.strategies.deferred_initialization.recording import tensors_of
from boltmesh.strategies.lightning_compat.trainer import trainer_of
from boltmesh.telemetry.callback import TelemetryCallback
from boltmesh.telemetry.job import ID_VARIABLE, JobInfo, is_switched_off, new_job_id
from boltmesh.telemetry.writer.memory import StoredBytes
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder, open_recorder

if TYPE_CHECKING:
    from boltmesh.strategies.engine import MeshStrategy


def follow_loops(trainer: Trainer | None) -> None:
    """Add a ``TelemetryCallback`` to a Trainer, once, in front of the callbacks that save."""
    if trainer is None or is_switched_off():
        return
    known: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(each, TelemetryCallback) for each in known):
        savers = (at for at, each in enumerate(known) if isinstance(each, Checkpoint))
        known.insert(next(savers, len(known)), TelemetryCallback())


def open_recorder_of(strategy: "MeshStrategy") -> Recorder | NullRecorder:
    """Open this rank's recorder and name the groups of the axes.

    Collective over all ranks, which agree on the job's id.
    """
    trainer = trainer_of(strategy.lightning_module)
    max_steps = trainer.max_steps if trainer is not None else -1
    job_id = strategy.broadcast(os.environ.get(ID_VARIABLE) or new_job_id())
    try:
        info = JobInfo.create(
            strategy=strategy.public_name,
            mesh=strategy.layout.sizes,
            world_size=strategy.world_size,
            id=job_id,
            hyperparameters=_hyperparameters(strategy),
            max_steps=max_steps if max_steps > 0 else None,
            recipe=strategy.recipe,
            alerts=strategy.alerts,
        )
    except Exception as error:  # noqa: BLE001 - telemetry never stops training
        warnings.warn(f"boltmesh telemetry is off: {error!r}", RuntimeWarning, stacklevel=2)
        return NullRecorder()
    recorder = open_recorder(
        info,
        rank=strategy.global_rank,
        local_rank=strategy.local_rank,
        device=strategy.root_device,
        coordinates=strategy.coordinates,
        is_fit=strategy.is_fitting,
    )
    for axis, group in strategy.groups.items():
        recorder.name_group(group, axis)
    recorder.watch_for_hangs(strategy.timeout_s)
    return recorder


def shows_expectations(strategy: "MeshStrategy") -> bool:
    """Whether telemetry shows what an optimizer step is expected to move.

    The number of backward passes is unknown under manual optimisation.
    """
    module = strategy.lightning_module
    is_known = strategy.is_fitting and module is not None and module.automatic_optimization
    return strategy.recorder.is_on and is_known


def record_expectations(strategy: "MeshStrategy") -> None:
    """Record the expected traffic and memory of a step, and watch what it holds."""
    strategy.recorder.expect(strategy.expected_traffic())
    copies = strategy.memory_checkpoints
    planned = [] if copies is None else [copies.expected_memory()]
    strategy.recorder.expect_memory([*strategy.expected_memory(), *planned])
    strategy.recorder.watch_memory(partial(tensors_by_kind, strategy))


def tensors_by_kind(strategy: "MeshStrategy") -> Mapping[str, Sequence[Tensor | StoredBytes]]:
    """Return the tensors that this rank holds now by kind, for ``Recorder.watch_memory``."""
    offload = strategy.recomputation.offload
    kept = [] if offload is None else offload.stored_bytes()
    copies = strategy.memory_checkpoints
    return {
        **_state_by_kind(strategy),
        **({"activations": kept} if kept else {}),
        **({} if copies is None else {"copies": [copies.stored_bytes()]}),
    }


def _state_by_kind(strategy: "MeshStrategy") -> Mapping[str, Sequence[Tensor | StoredBytes]]:
    module = strategy.lightning_module
    if strategy.model is not None:
        held = strategy.data_axis.tensors_by_kind(strategy.model, strategy.optimizers)
        if held is not None:
            return held
    parameters: list[Tensor] = list(strategy.held_parameters())
    kept = [axis.kept_beside() for axis in strategy.axes]
    return {
        "parameters": [*parameters, *(each for weights, _ in kept for each in weights)],
        "gradients": [
            *(each.grad for each in parameters if each.grad is not None),
            *(each for _, gradients in kept for each in gradients),
        ],
        "optimizer": optimizer_tensors(strategy.optimizers),
        "buffers": list(module.buffers()) if module is not None else [],
    }


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the tensors of optimizers' states, including those in lists and mappings."""
    states = (state for each in optimizers for state in each.state.values())
    return [tensor for state in states for tensor in tensors_of(state)]


def _hyperparameters(strategy: "MeshStrategy") -> Mapping[str, object]:
    """Return the module's hyperparameters, and the config's values if there is one."""
    module = strategy.lightning_module
    settings = strategy.settings
    own = {} if module is None else dict(module.hparams)
    rest = {name: own[name] for name in own if f"model.init_args.{name}" not in settings}
    return {**rest, **settings}

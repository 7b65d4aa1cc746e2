"""Follows Lightning's loops for whatever recorder the strategy of a Trainer has.

A strategy adds it to the Trainer that it is set up by. The engine records the phases inside a step;
this adds the loop around it: waiting for data, validation, losses, logged metrics, the end. It
never communicates: a rank whose telemetry is off would not take part.
"""

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from typing_extensions import override

from boltmesh.telemetry.reader.cause import STOPPED
from boltmesh.telemetry.writer.lightning_compat import computed_metrics, loader_queue
from boltmesh.telemetry.writer.throughput import count, flops_per_batch, peak_flops
from boltmesh.telemetry.writer.torch_compat.flops import can_count

if TYPE_CHECKING:
    from boltmesh.telemetry.writer.recorder import Recorder
    from boltmesh.telemetry.writer.throughput import BatchFlops

COUNTED_BATCH = 1
"""The batch whose FLOPs are counted: in the first one layers are still built and plans proven."""


class TelemetryCallback(Callback):
    """Reports the position of the loop to the strategy's recorder; idle if it records nothing."""

    def __init__(self) -> None:
        self._index = 0
        self._logged_step = -1
        self._seen: dict[str, Tensor] = {}
        self._is_validating = False
        self._peak_flops: float | None = None
        self._batch_flops: BatchFlops | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._index = 0
            self._logged_step = trainer.global_step
            self._seen = {}
            recorder.begin_loop(epoch=trainer.current_epoch, global_step=trainer.global_step)
            self._peak_flops = peak_flops(trainer)
            self._record_compute(recorder, trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._record_metrics(recorder, trainer.global_step, computed_metrics(trainer))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if recorder := _recorder_of(trainer):
            recorder.begin_batch(index=self._index, epoch=trainer.current_epoch)
            with contextlib.suppress(NotImplementedError, AttributeError):  # no qsize on macOS
                if (ready := loader_queue(trainer)) is not None:
                    recorder.trend("loader_queue", ready)
            if self._index == COUNTED_BATCH and can_count(pl_module):
                recorder.count_flops()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        recorder = _recorder_of(trainer)
        if recorder is None:
            return
        global_step = trainer.global_step
        try:
            loss = _loss(outputs)
            divisor = trainer.accumulate_grad_batches
            if loss is not None and divisor > 1 and pl_module.automatic_optimization:
                loss = loss * divisor  # Lightning has divided it
            samples, tokens = count(batch)
            if self._index == COUNTED_BATCH:
                self._batch_flops = recorder.counted_flops()
                self._record_compute(recorder, trainer, pl_module)
            if global_step != self._logged_step and _is_log_step(trainer, global_step):
                self._logged_step = global_step
                self._record_metrics(recorder, global_step, trainer.callback_metrics)
                recorder.metrics(global_step, _learning_rates(trainer) | _gradient_norms(trainer))
                self._record_compute(recorder, trainer, pl_module)
        except Exception as error:  # noqa: BLE001 - telemetry never stops training
            recorder.turn_off(error)
            return
        recorder.end_batch(global_step=global_step, loss=loss, samples=samples, tokens=tokens)
        self._index += 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._record_metrics(recorder, trainer.global_step, computed_metrics(trainer))
            if _is_out_of_time(trainer):
                recorder.event("end", f"{STOPPED}max_time after step {trainer.global_step}")
            recorder.end_loop()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._begin_evaluation(recorder)
            if not trainer.sanity_checking:
                recorder.event("validation", f"validation in epoch {trainer.current_epoch}")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            if not trainer.sanity_checking:
                self._record_metrics(recorder, trainer.global_step, computed_metrics(trainer))
            self._end_evaluation(recorder)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._begin_evaluation(recorder)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._record_metrics(recorder, trainer.global_step, computed_metrics(trainer))
            self._end_evaluation(recorder)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._begin_evaluation(recorder)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if recorder := _recorder_of(trainer):
            self._end_evaluation(recorder)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._is_validating = False
        recorder = getattr(trainer.strategy, "recorder", None)
        if explain := getattr(trainer.strategy, "explain", None):
            explain(exception)
        if recorder is not None and hasattr(recorder, "is_on"):
            recorder.fail(exception)  # also when it is off, or its rank would look well

    def _begin_evaluation(self, recorder: "Recorder") -> None:
        if not self._is_validating:
            self._is_validating = True
            recorder.phase("validation").__enter__()

    def _end_evaluation(self, recorder: "Recorder") -> None:
        if self._is_validating:
            self._is_validating = False
            recorder.phase("validation").__exit__(None, None, None)

    def _record_compute(
        self, recorder: "Recorder", trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Record the FLOPs of a batch; a module may learn them only while it runs.

        A rank counts its own. A module states those of the whole model, of which each of the
        ranks that share a batch is taken to compute the same part.
        """
        counted, stated = self._batch_flops, flops_per_batch(pl_module)
        model = None if counted is None else counted.model
        recorder.compute(
            flops_per_batch=model if stated is None else stated / _ranks_per_batch(trainer),
            recomputed_flops_per_batch=None if counted is None else counted.recomputed,
            peak_flops_per_second=self._peak_flops,
        )

    def _record_metrics(
        self, recorder: "Recorder", global_step: int, metrics: Mapping[str, Tensor]
    ) -> None:
        """Record metrics that were logged since the last time; others keep their storage."""
        changed = {}
        for name, value in metrics.items():
            before = self._seen.get(name)
            if before is None or before.data_ptr() != value.data_ptr():
                self._seen[name] = changed[name] = value
        if changed:
            recorder.metrics(global_step, changed)


def _recorder_of(trainer: Trainer) -> "Recorder | None":
    recorder = getattr(trainer.strategy, "recorder", None)
    return recorder if getattr(recorder, "is_on", False) else None


def _ranks_per_batch(trainer: Trainer) -> int:
    """Return how many ranks share each batch: all axes but the data axis do."""
    sampling = trainer.distributed_sampler_kwargs
    return 1 if sampling is None else trainer.world_size // sampling["num_replicas"]


def _loss(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, Tensor) else None


def _is_out_of_time(trainer: Trainer) -> bool:
    """Say whether ``Trainer(max_time=...)`` ends the run before its last step."""
    timers = [each for each in trainer.callbacks if isinstance(each, Timer)]  # type: ignore[attr-defined]
    left = [each.time_remaining(RunningStage.TRAINING) for each in timers]
    return trainer.global_step != trainer.max_steps and any(
        seconds is not None and seconds <= 0 for seconds in left
    )


def _is_log_step(trainer: Trainer, global_step: int) -> bool:
    every: int = getattr(trainer, "log_every_n_steps", 0)
    return every > 0 and global_step % every == 0


def _learning_rates(trainer: Trainer) -> dict[str, float | Tensor]:
    """Return each optimizer's rate, of its first parameter group: ``lr``, ``lr-2``, and so on."""
    return {
        "lr" if number == 1 else f"lr-{number}": optimizer.param_groups[0]["lr"]
        for number, optimizer in enumerate(trainer.optimizers, start=1)
    }


def _gradient_norms(trainer: Trainer) -> dict[str, float | Tensor]:
    """Return the norm of each optimizer's gradients, where the strategy clips them by it."""
    norms = getattr(trainer.strategy, "clipped_norms", {})
    return {
        "boltmesh/grad_norm" if number == 1 else f"boltmesh/grad_norm-{number}": norms[optimizer]
        for number, optimizer in enumerate(trainer.optimizers, start=1)
        if optimizer in norms
    }

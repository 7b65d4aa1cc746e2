"""Parts of a run from a config beside training: its folder, metrics, errors and summary."""

import contextlib
import math
import os
import shutil
import time
from argparse import Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import CheckpointError, LossError
from boltmesh.launch.rank import Rank
from boltmesh.launch.stopping import StoppedBySignal
from boltmesh.process import write_stderr
from boltmesh.prune import names_in_states, remove_left_by_kills
from boltmesh.run_folder import CHECKPOINTS, step_of
from boltmesh.strategies.checkpoint.atomic_replace import PARTIAL
from boltmesh.strategies.checkpoint.host_memory import make_run_id
from boltmesh.strategies.lightning_compat.loops import log_step
from boltmesh.strategies.lightning_compat.trainer import load_instead, save_for_requeue_in
from boltmesh.telemetry.redaction import holds_secret
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.throughput import count

if TYPE_CHECKING:
    from boltmesh.launch.graceful_stop import GracefulStop


PRIVATE = 0o600


class RunLogger(CSVLogger):
    """Lightning's ``CSVLogger``, for files that a full disk or a quota may not take.

    Rows that cannot be written are kept, and written with the next ones. ``hparams.yaml`` is
    readable by its owner alone if it holds secrets. A row that is logged twice is written once.
    """

    _has_warned = False
    _last_row: tuple[str, int | None] | None = None

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        row = repr(metrics), step  # as text, in which NaN equals NaN
        if step is None or row != self._last_row:
            super().log_metrics(metrics, step)
        self._last_row = row

    @override
    @rank_zero_only
    def save(self) -> None:
        writer = self.experiment
        path = Path(str(writer.metrics_file_path))
        size = path.stat().st_size if path.exists() else None
        rows, columns = list(writer.metrics), list(writer.metrics_keys)
        draft = path.with_name(path.name + PARTIAL)
        has_new_columns = size is not None and not set().union(*rows) <= set(columns)
        try:
            if has_new_columns:  # the whole file is written again, and a kill may come meanwhile
                shutil.copyfile(path, draft)
                writer.metrics_file_path = str(draft)
            super().save()
            if has_new_columns:
                draft.replace(path)
        except OSError as error:
            self._warn(path, error)
            writer.metrics, writer.metrics_keys = rows, columns
            if path.exists() and path.stat().st_size > (size or 0):
                os.truncate(path, size or 0)  # a part of the rows, which will be written again
            draft.unlink(missing_ok=True)
        finally:
            writer.metrics_file_path = str(path)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        path = Path(str(self.experiment.log_dir), "hparams.yaml")
        given = vars(params) if isinstance(params, Namespace) else params
        try:
            if holds_secret(given):
                path.touch(PRIVATE)
                path.chmod(PRIVATE)
            super().log_hyperparams(params)
        except OSError as error:
            self._warn(path, error)

    def _warn(self, path: Path, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            write_stderr(
                f"boltmesh: {path} cannot be written: {error.strerror or error}. The training "
                f"goes on; rows are kept in memory until they can be.\n"
            )


class LogBeforeSave(Callback):
    """Logs a step before the state after it is saved.

    Lightning logs a step behind the hooks that save it. A run that is killed in between, and goes
    on from there, would have no row of that step.

    Args:
        logger: Gets the row; once more from Lightning.
    """

    def __init__(self, logger: RunLogger) -> None:
        self._logger = logger

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        log_step(trainer, self._logger)


LAST_LOSSES = 20
"""Steps over which the loss at the end is a mean: one batch alone says little."""


class ErrorReport(Callback):
    """Reports an exception at once, before the Trainer unwinds and perhaps waits for a peer."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if explain := getattr(trainer.strategy, "explain", None):
            explain(exception)
        self._rank.report_error(exception)
        if isinstance(exception, StoppedBySignal):
            # It ended as requested: telemetry, whose callback comes next, would call it a failure.
            recorder = getattr(trainer.strategy, "recorder", NullRecorder())
            recorder.event("end", str(exception))
            recorder.finish()


class RunFolder(Callback):
    """Gives every rank the folder that rank 0 has chosen, and says how to watch the run.

    Args:
        rank: This process.
        title: Activity, for the first line.
        folder: On rank 0 the run's folder, None where the command writes nothing.
        checkpoint: Checkpoint that this rank has found; that of rank 0 is loaded.
        followers: Callbacks that write into a folder inside the run's.
        pattern: ``filename`` of its ModelCheckpoint.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        title: str,
        folder: Path | None,
        checkpoint: Path | str | None,
        followers: "Sequence[GracefulStop | PredictionFiles]",
        pattern: str,
    ) -> None:
        self.folder = folder
        self._pattern = pattern
        self._followers = followers
        self._rank = rank
        self._title = title
        self._checkpoint = checkpoint

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        chosen, checkpoint = trainer.strategy.broadcast((self.folder, self._checkpoint))
        self.folder = self._rank.run_folder = chosen
        for each in self._followers:
            if each.folder is not None and chosen is not None:
                each.folder = chosen / each.folder.name
        is_seen = (self._checkpoint is None) == (checkpoint is None) and (
            not isinstance(checkpoint, Path) or checkpoint.exists()
        )
        if not trainer.strategy.reduce_boolean_decision(is_seen):
            raise CheckpointError(
                f"Rank 0 goes on from {checkpoint or 'no checkpoint'}, and not every rank sees the "
                f"same. Set run.dir to a folder that all machines share."
            )
        if chosen is not None:
            if trainer.state.fn == TrainerFn.FITTING:
                save_for_requeue_in(trainer, chosen / CHECKPOINTS)
            self._find_in_memory(trainer, chosen)
        if trainer.is_global_zero:
            self._announce(trainer)

    def _find_in_memory(self, trainer: Trainer, folder: Path) -> None:
        """Resume from a copy in memory that is newer than the checkpoint. Collective."""
        copies = getattr(trainer.strategy, "memory_checkpoints", None)
        if copies is None or trainer.state.fn != TrainerFn.FITTING:
            return
        known = (make_run_id(folder), self._step()) if trainer.is_global_zero else ("", 0)
        run_id, step_on_disk = trainer.strategy.broadcast(known)
        step = copies.find(folder, run_id, newer_than=step_on_disk)
        if step is not None:
            address = copies.address_of(step)
            self._checkpoint = address
            load_instead(trainer, address)

    def _step(self) -> int:
        """The step of the checkpoint that rank 0 has found."""
        if self._checkpoint is None:
            return 0
        return step_of(Path(self._checkpoint)) or 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # ModelCheckpoint has its state for the rest of the run by now.
        if self._rank.run_lock is None or self.folder is None:
            return
        savers = [
            each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)
        ]
        keeps_all = any(each.save_top_k == -1 for each in savers)
        states = {} if keeps_all else {each.state_key: each.state_dict() for each in savers}
        kept = names_in_states(states, self.folder / CHECKPOINTS)
        start = self._checkpoint if isinstance(self._checkpoint, Path) else None
        remove_left_by_kills(self.folder, kept, self._pattern, start)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._rank.run_lock is not None:
            self._rank.run_lock.check()

    def _announce(self, trainer: Trainer) -> None:
        ranks = "1 rank" if trainer.world_size == 1 else f"{trainer.world_size} ranks"
        parts = [f"{self._title} on {ranks}"]
        if self._checkpoint is not None:
            parts.append(f"from {self._checkpoint}")
        if self.folder is not None:
            parts.append(f"into {self.folder}")
        watch = watch_command(trainer)
        print_line("boltmesh: " + " ".join(parts) + (f"; watch it: {watch}" if watch else ""))


class Summary(Callback):
    """Prints the result of a training run, on rank 0, in a few lines.

    The losses are means over all ranks; the throughput leaves out the first batch, validation
    and checkpoints. The caller of ``fit`` prints the lines, once the progress bar is gone.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._end: tuple[int, float, float] | None = None
        """The last step, the first loss, and the mean of the last ones."""
        self._first: Tensor | None = None
        self._last: deque[Tensor] = deque(maxlen=LAST_LOSSES)
        self._validation: dict[str, Tensor] = {}
        self._known_before: set[str] = set()
        self._began = 0.0
        self._first_step = 0
        self._has_trained = False
        self._mark: float | None = None
        self._samples = 0
        self._seconds = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()
        self._first_step = trainer.global_step

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._has_trained = True
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # The Trainer has divided it for accumulation. Nothing is read here: on a device that
            # would wait for the step.
            loss = loss.detach().float() * trainer.accumulate_grad_batches
            self._first = loss if self._first is None else self._first
            self._last.append(loss)
        now = time.monotonic()
        if self._mark is not None:
            self._seconds += now - self._mark
            self._samples += count(batch)[0] or 0
        self._mark = now

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._known_before = set(trainer.callback_metrics) - set(self._validation)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None
        if not trainer.sanity_checking:
            self._validation = {
                name: value
                for name, value in trainer.callback_metrics.items()
                if name not in self._known_before
            }

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._mark = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._first is None:
            return
        seconds = time.monotonic() - self._began
        losses = torch.stack((self._first, torch.stack(tuple(self._last)).mean()))
        losses = trainer.strategy.reduce(losses.to(trainer.strategy.root_device), reduce_op="mean")
        self._end = (trainer.global_step, *losses.tolist())
        if trainer.is_global_zero:
            self.lines = self._describe(trainer, seconds, self._end[1:])

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self._has_trained:
            self.lines = [f"boltmesh: nothing is left to train after step {trainer.global_step}"]

    def refuse_loss_that_is_not_finite(self) -> None:
        """End a run as failed if its weights are of no use, equally on all ranks.

        Raises:
            LossError: The last losses of a training run are infinite or not numbers.
        """
        if self._end is not None and not math.isfinite(self._end[2]):
            raise LossError(
                f"the training loss is {self._end[2]} after step {self._end[0]}, so its last "
                f"checkpoints are of no use. Resume from an earlier one with a lower learning "
                f"rate or gradient_clip_val; the overview of boltmesh top shows where it began."
            )

    def _describe(self, trainer: Trainer, seconds: float, losses: Sequence[float]) -> list[str]:
        steps = trainer.global_step - self._first_step
        rate = ""
        if self._seconds:
            kwargs = trainer.distributed_sampler_kwargs or {}
            samples = self._samples * int(kwargs.get("num_replicas", 1))
            rate = f", {samples / self._seconds:.1f} samples/s"
        rows = [("train loss", f"{losses[0]:.4f} before, {losses[1]:.4f} after")]
        rows += [(name, f"{value.item():.4f}") for name, value in self._validation.items()]
        rows += [("checkpoint", path) for path in kept_checkpoints(trainer)]
        if watch := watch_command(trainer):
            rows.append(("look back", watch))
        width = max(len(name) for name, _ in rows)
        title = f"boltmesh: trained {steps} steps in {describe_seconds(seconds)}{rate}"
        return ["", title, *(f"  {name:<{width}}  {value}" for name, value in rows)]


class PredictionFiles(BasePredictionWriter):
    """Writes the predictions of each rank to a file of its own.

    ``rank-R.pt`` holds ``predictions``, one entry per batch, and ``batch_indices``, the indices
    into the dataset that each batch was made of; lists per loader where there are several.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(write_interval="epoch")
        self.folder = folder

    @override
    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{trainer.global_rank}.pt"
        torch.save({"predictions": predictions, "batch_indices": batch_indices}, path)
        trainer.strategy.barrier("predictions")
        if trainer.is_global_zero:
            count = len(list(self.folder.glob("rank-*.pt")))
            files = "rank-0.pt" if count == 1 else f"rank-0.pt to rank-{count - 1}.pt"
            print_line(f"boltmesh: predictions in {self.folder}: {files}")


def kept_checkpoints(trainer: Trainer) -> list[str]:
    """The best checkpoint, with its score, and the last one."""
    kept: list[str] = []
    for each in trainer.checkpoint_callbacks:
        if not isinstance(each, ModelCheckpoint):
            continue
        if each.best_model_path:
            score = each.best_model_score
            note = "" if score is None else f" ({each.monitor} {score.item():.4f})"
            kept.append(f"{from_here(each.best_model_path)}{note}")
        if each.last_model_path:
            kept.append(from_here(each.last_model_path))
    return kept


def from_here(path: str) -> str:
    """A path as one would type it: relative where it lies below the working directory."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def watch_command(trainer: Trainer) -> str | None:
    """How to look at the job, or None when telemetry is off."""
    folder = getattr(getattr(trainer.strategy, "recorder", None), "path", None)
    return None if folder is None else f"boltmesh top {Path(folder).name}"


def describe_seconds(seconds: float) -> str:
    """``1 h 2 min 3 s``, without leading zeros."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in parts)


def print_line(line: str) -> None:
    """Write a line of the result at once, whatever stdout is."""
    print(line, flush=True)  # noqa: T201 - the output of the command

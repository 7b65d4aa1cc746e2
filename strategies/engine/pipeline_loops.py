"""The loops over a model in stages: every batch is cut into microbatches, every step into parts."""

from typing import Any

from typing_extensions import override

from boltmesh.strategies.data_parallel.early_zero_grad import zeroed_by
from boltmesh.strategies.dry_run.batch_check import BatchDigest, batch_digest
from boltmesh.strategies.dry_run.sample import batch_sizes
from boltmesh.strategies.engine.shared_batch import SharedBatchStrategy
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
from boltmesh.strategies.lightning_compat.loops import evaluation_batch_index, loggers_follow
from boltmesh.strategies.lightning_compat.trainer import zeroes_gradients
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.evaluation import Evaluation
from boltmesh.strategies.pipeline.microbatch_runs import Around
from boltmesh.strategies.pipeline.options import refuse_accumulation
from boltmesh.strategies.pipeline.training import training_step
from boltmesh.strategies.torch_compat.optimizers import TOTAL_NORM, total_norm_replaced

BUBBLE = "boltmesh/bubble_ratio"
"""Idle over total time of the pipeline in the batch before, see ``executor/idle.py``."""


class PipelineLoops(SharedBatchStrategy):
    """Runs steps over stages, one of which or some this rank has."""

    pipeline_axis: PipelineAxis
    _evaluation: Evaluation
    _digest: tuple[Any, BatchDigest] | None = None
    """The batch that was made ready last, and what it was before its transfer."""
    _has_logged_bubble = False
    """In this run."""

    # The beginnings and ends of loops.

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._has_logged_bubble = False

    @override
    def on_train_end(self) -> None:
        self.pipeline_axis.drain()
        super().on_train_end()

    @override
    def on_validation_start(self) -> None:
        # For the memory of what is kept for backward passes; numbers would be the same.
        self.pipeline_axis.drain()
        super().on_validation_start()

    @override
    def _sigterm_agreement(self) -> SigtermAgreement:
        if self.layout.pipeline < self.world_size:
            return super()._sigterm_agreement()
        # All ranks of the job tell each other at the end of each batch how it went.
        signals = self.pipeline_axis.signals
        agreement = SigtermAgreement(self._trainer, signals.take_heard)
        signals.told = agreement.flags
        return agreement

    @override
    def _adopt_metrics(self) -> None:
        super()._adopt_metrics()
        self.pipeline_axis.find_metrics()

    # Batches.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        self.pipeline_axis.cutter.batch_sizes |= batch_sizes(dataloader)
        return dataloader

    @override
    def announce_batch(self, batch: Any, digest: BatchDigest) -> None:
        super().announce_batch(batch, digest)
        self._digest = batch, digest

    def _digest_of(self, batch: Any) -> BatchDigest:
        """Return the digest of a batch that a step is given."""
        made, self._digest = self._digest, None
        if made is not None and made[0] is batch:
            return made[1]
        return batch_digest(batch)

    # Steps.

    def _around(self, step: str) -> Around:
        plugin = self.precision_plugin
        contexts: dict[str, Around] = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }
        return contexts[step]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        axis = self.pipeline_axis
        if axis.delayed is not None:
            refuse_accumulation(self._trainer)
        self._check(args[0])
        axis.runner.digest = self._digest_of(args[0])
        self._free_stale_gradients()
        told = axis.sharing.length, axis.sharing.size_per_batch()
        with self.recorder.phase("forward"), total_norm_replaced(TOTAL_NORM):
            output = training_step(
                axis,
                args,
                kwargs,
                ordinal=self._trainer.fit_loop.total_batch_idx,
                around=self._around("training_step"),
            )
        if told != (axis.sharing.length, axis.sharing.size_per_batch()):  # it logs something else
            self.recorder.expect(self.expected_traffic())
        self._log_bubble()
        return output

    def _check(self, batch: Any) -> None:
        """Let what other axes refuse of a batch end the step on all ranks of the pipeline."""
        try:
            self.check_batch(batch)
        except Exception as error:  # noqa: BLE001 - told to all ranks and raised again
            self.pipeline_axis.runner.refuse(error)

    def _free_stale_gradients(self) -> None:
        """Let go of the gradients of the step before where the Trainer is going to zero them.

        It does so when ``training_step`` has returned, in which a pipeline makes the new ones: both
        would be in memory at once, and the new ones in pages that are new in every step.
        """
        if zeroes_gradients(self._trainer):
            for each in zeroed_by(self.optimizers):
                each.grad = None

    def _log_bubble(self) -> None:
        """Log the newest bubble that is known, the same on all ranks; of the first batch none.

        Once it is known, and then for the batches that loggers are given: a call of ``log`` takes
        as long as several chunks of a small model.
        """
        bubble = self.pipeline_axis.bubble
        if bubble is None:
            return
        if not self._has_logged_bubble or loggers_follow(self._trainer):
            self._has_logged_bubble = True
            assert self.lightning_module is not None
            self.lightning_module.log(BUBBLE, bubble, on_step=True, on_epoch=False, batch_size=1)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(args[0])
        self.pipeline_axis.runner.digest = self._digest_of(args[0])
        with self._evaluation_batch():
            return self._evaluation.step(
                step,
                args,
                kwargs,
                ordinal=evaluation_batch_index(self._trainer),
                around=self._around(step),
            )

    # Gradients.

    @override
    def norm_shares(self) -> list[NormShare]:
        return [*super().norm_shares(), self.pipeline_axis.holdings.norm_share]

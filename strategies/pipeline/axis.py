"""The pipeline axis: runs the steps of a LightningModule as the stages of a pipeline.

Every rank cuts the batch that all of them get into microbatches and runs the module's own step on
each, as far as its stages go (``replay/``), in the order of the schedule (``executor/``). What a
batch of training is made of is in ``training.py``, one of the other loops in ``evaluation.py``.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from boltmesh.strategies.clipping import gradients_of, scale_to_norm
from boltmesh.strategies.pipeline.executor.executor import Executor
from boltmesh.strategies.pipeline.executor.traffic import expected_traffic
from boltmesh.strategies.pipeline.metrics.replacing import find_metrics
from boltmesh.strategies.pipeline.microbatches import cut, even_sizes, num_rows
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.placement import Placement, place
from boltmesh.strategies.pipeline.programs import Programs
from boltmesh.strategies.pipeline.proofs import Proofs
from boltmesh.strategies.pipeline.quiet import quiet
from boltmesh.strategies.pipeline.replay.absent import make_absent
from boltmesh.strategies.pipeline.replay.stage_run import StageRun
from boltmesh.strategies.pipeline.runs import Around, Finish, Run, RunStage
from boltmesh.strategies.pipeline.sharing import SharedParameters, norm_over_stages
from boltmesh.strategies.pipeline.step_logs import Sharing, StepLogs
from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder
from boltmesh.telemetry.snapshot import PipelinePlan
from boltmesh.telemetry.traffic import ExpectedTraffic

SEED_STRIDE = 1_000_003
"""Between the seeds of two steps: a prime above any number of microbatches."""


@dataclass(frozen=True)
class PipelineContext:
    """Where the axis finds itself."""

    group: ProcessGroup
    """The ranks of this pipeline."""
    device: torch.device
    recorder: Recorder | NullRecorder
    seed: int
    """What random numbers within steps start from; alike on all ranks of the pipeline."""
    timeout: timedelta | None = None
    scaler: GradScaler | None = None


class PipelineAxis:
    """Keeps the ranks of the pipeline axis one model, of which each holds its stages."""

    def __init__(self, options: PipelineOptions) -> None:
        self.options = options
        self.placement: Placement | None = None
        """None before a model was placed."""

    # Placing the model.

    def place(
        self,
        module: LightningModule,
        step: str,
        batch: Any,
        context: PipelineContext,
        around: Around,
    ) -> None:
        """Cut the model, and let go of what other ranks hold. Collective over the pipeline.

        Args:
            module: The whole model.
            step: The method that the run begins with.
            batch: One that it is called with.
            context: Where the axis finds itself.
            around: Precision.

        Raises:
            ConfigError: When model or batch cannot be cut.
        """
        self.context = context
        self.module = module
        self.metrics = find_metrics(module)
        num_ranks = context.group.size()
        self._programs = Programs(self.options, num_ranks, context.group.rank())
        parts, sizes = self.cut(batch)
        with around():
            self.placement = place(
                module,
                step,
                (parts[0], 0),
                num_stages=self._programs.num_stages,
                rank_of_stage=self._programs.rank_of_stage,
                split=self.options.split,
                seed=context.seed,
            )
        self.last = dist.get_global_rank(context.group, self._programs.rank_of_stage[-1])
        self.holds_last_stage = dist.get_rank() == self.last
        self.proofs = Proofs(context.device)
        self.sharing = Sharing(context.group, self.last, context.device)
        self._executor = Executor(
            context.group,
            context.device,
            on_chunk=self._record_chunk,
            name_of=self._name_of,
            timeout=context.timeout,
            on_stuck=context.recorder.fail,
        )
        self._sample = (step, parts)
        self._num_microbatches = len(sizes)
        self._let_go()

    def _let_go(self) -> None:
        assert self.placement is not None
        rank = self.context.group.rank()
        holders = self.placement.ranks_of_parameter
        named = dict(self.module.named_parameters())
        first_names = {id(each): name for name, each in named.items()}
        self._first_names = {
            name: first_names[id(each)]
            for name, each in self.module.named_parameters(remove_duplicate=False)
        }
        self.held = [each for name, each in named.items() if rank in holders[name]]
        make_absent(each for name, each in named.items() if rank not in holders[name])
        shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        own = {name: named[name] for name, ranks in shared.items() if rank in ranks}
        self.shared = SharedParameters(own, shared, self.context.group)

    def start(self) -> None:
        """Called when parameters are on their device. Collective over the pipeline."""
        self.shared.broadcast()
        recorder = self.context.recorder
        for group in self.shared.groups():
            recorder.name_group(group, "pipeline")
        recorder.schedule(
            PipelinePlan(
                schedule=self.options.schedule,
                num_stages=self._programs.num_stages,
                num_microbatches=self._num_microbatches,
                order=self._programs.order(self._num_microbatches),
            )
        )

    def holders(self, name: str) -> tuple[int, ...]:
        """Return which ranks of the pipeline have the values of a parameter or buffer.

        Args:
            name: In the module's state; any name of a parameter that has several.
        """
        assert self.placement is not None
        if name in self.placement.rank_of_buffer:
            # Every rank has all of them, and one the model's values.
            first = self.placement.rank_of_buffer[name]
            return (first, *(each for each in range(self.context.group.size()) if each != first))
        known = self._first_names.get(name)
        if known is None:  # other state of a module, alike everywhere
            return tuple(range(self.context.group.size()))
        return self.placement.ranks_of_parameter[known]

    # Steps.

    def work_off(self, run: Run, finish: Finish, around: Around) -> StepLogs:
        """Run all chunks of this rank; return what the last stage logged."""
        assert self.placement is not None
        with around():
            runs = [
                self.placement.plans.stages(
                    run.step, part, *run.rest, kwargs=run.kwargs, seed=run.seeds[number]
                )
                for number, part in enumerate(run.parts)
            ]
        logs = StepLogs(self.module)
        program = self._programs.of(len(runs))
        end = self._programs.num_stages - 1
        stages = [
            RunStage(
                [each[index] for each in runs],
                run,
                around,
                logs.of_microbatch if index == end else self._quiet,
                finish if index == end else None,
                is_last=index == end,
            )
            for index in program.stages
        ]
        self._executor.run(program, stages)
        return logs

    def _quiet(self, microbatch: int) -> AbstractContextManager[None]:
        return quiet(self.module, self.metrics)

    def pass_through(
        self, run: Run, last: Sequence[StageRun], around: Around
    ) -> list[tuple[Tensor, ...]]:
        """Run the units of all stages forward.

        Args:
            run: The step and its microbatches.
            last: The last stage, by microbatch; ends behind its last unit.
            around: Precision.

        Returns:
            What it gave for each microbatch; nothing on the other stages' ranks.
        """
        assert self.placement is not None
        program = self._programs.of(len(run.parts)).forward_only
        end = self._programs.num_stages - 1
        with around():
            runs = [
                (
                    *self.placement.plans.stages(
                        run.step, part, *run.rest, kwargs=run.kwargs, seed=run.seeds[number]
                    )[:end],
                    last[number],
                )
                for number, part in enumerate(run.parts)
            ]
        stages = [
            RunStage(
                [each[index] for each in runs],
                run,
                around,
                lambda _: nullcontext(),
                is_last=index == end,
            )
            for index in program.stages
        ]
        outputs = self._executor.run(program, stages).outputs
        return [outputs[number] for number in sorted(outputs)]

    def cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return a batch's microbatches and how many rows each has."""
        wanted = self.options.num_microbatches(self.context.group.size())
        if wanted == 1:
            return [batch], [1]
        sizes = even_sizes(num_rows(batch), wanted)
        return cut(batch, sizes), sizes

    def seeds(self, ordinal: int, count: int) -> list[int]:
        """Return what the random numbers of each microbatch start from."""
        start = self.context.seed + SEED_STRIDE * (ordinal + 1)
        return [(start + number) % 2**63 for number in range(count)]

    def _record_chunk(
        self, stage: int, microbatch: int, kind: str, start_ns: int, end_ns: int
    ) -> None:
        self.context.recorder.chunk(
            stage=stage, microbatch=microbatch, kind=kind, start_ns=start_ns, end_ns=end_ns
        )

    def _name_of(self, module: torch.nn.Module) -> str | None:
        return next((name for name, each in self.module.named_modules() if each is module), None)

    # Gradients.

    def clip_by_norm(self, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Scale gradients so that their norm over all stages is at most ``max_norm``."""
        norm = self.norm(parameters)
        scale_to_norm(gradients_of(parameters), norm, max_norm)
        return norm

    def norm(self, parameters: Sequence[Parameter]) -> Tensor:
        """Return the norm of gradients over all stages. Collective over the pipeline."""
        return norm_over_stages(parameters, self.context.group, self.shared.counted_elsewhere)

    # Telling.

    def expected_traffic(self, accumulated: int) -> list[ExpectedTraffic]:
        """What one optimizer step should move over this rank's borders."""
        assert self.placement is not None
        step, parts = self._sample
        runs = [self.placement.plans.stages(step, part, 0) for part in parts]

        def values_at(border: int, microbatch: int) -> tuple[ValueSpec, ...]:
            return runs[microbatch][border].plan.values_in

        return expected_traffic(self._programs.of(len(parts)), values_at, accumulated=accumulated)

    def close(self) -> None:
        """End what runs beside the training. Parameters stay as they are."""
        if self.placement is not None:
            self._executor.close()

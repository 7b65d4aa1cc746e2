"""The pipeline axis: runs the steps of a LightningModule as the stages of a pipeline.

Every rank cuts the batch that all of them get into microbatches and runs the module's own step on
each, as far as its stages go (``replay/``), in the order of the schedule (``executor/``). Gradients
are handed to Lightning with the loss (``deposit.py``), and what the last stage found out is told to
all ranks (``step_logs.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
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
from boltmesh.strategies.pipeline.counting import Counts
from boltmesh.strategies.pipeline.deposit import Deposit
from boltmesh.strategies.pipeline.executor.executor import Executor
from boltmesh.strategies.pipeline.executor.traffic import expected_traffic
from boltmesh.strategies.pipeline.losses import StepWeights
from boltmesh.strategies.pipeline.microbatches import cut, even_sizes, num_rows
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.outputs import merge
from boltmesh.strategies.pipeline.placement import Placement, place
from boltmesh.strategies.pipeline.programs import Programs
from boltmesh.strategies.pipeline.replay.absent import make_absent
from boltmesh.strategies.pipeline.replay.stage_run import StageRun
from boltmesh.strategies.pipeline.sharing import SharedParameters, norm_over_stages
from boltmesh.strategies.pipeline.step_logs import Sharing, StepLogs, repeat
from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.strategies.torch_compat import tree_map_only
from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder
from boltmesh.telemetry.snapshot import PipelinePlan
from boltmesh.telemetry.traffic import ExpectedTraffic

Around = Callable[[], AbstractContextManager[None]]
"""The precision plugin's context of a step."""

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
        self._context = context
        self._module = module
        num_ranks = context.group.size()
        self._programs = Programs(self.options, num_ranks, context.group.rank())
        parts, sizes = self._cut(batch)
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
        self._last = dist.get_global_rank(context.group, self._programs.rank_of_stage[-1])
        self.holds_last_stage = dist.get_rank() == self._last
        self._sharing = Sharing(context.group, self._last, context.device)
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
        rank = self._context.group.rank()
        holders = self.placement.ranks_of_parameter
        named = dict(self._module.named_parameters())
        first_names = {id(each): name for name, each in named.items()}
        self._first_names = {
            name: first_names[id(each)]
            for name, each in self._module.named_parameters(remove_duplicate=False)
        }
        self._held = [each for name, each in named.items() if rank in holders[name]]
        make_absent(each for name, each in named.items() if rank not in holders[name])
        shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        own = {name: named[name] for name, ranks in shared.items() if rank in ranks}
        self.shared = SharedParameters(own, shared, self._context.group)

    def start(self) -> None:
        """Called when parameters are on their device. Collective over the pipeline."""
        self.shared.broadcast()
        recorder = self._context.recorder
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
            return (first, *(each for each in range(self._context.group.size()) if each != first))
        known = self._first_names.get(name)
        if known is None:  # other state of a module, alike everywhere
            return tuple(range(self._context.group.size()))
        return self.placement.ranks_of_parameter[known]

    # Steps.

    def training_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, ordinal: int, around: Around
    ) -> Any:
        """Run forward and backward passes of a batch; return a loss that hands gradients over.

        Collective over the pipeline.

        Args:
            args: Of ``training_step``: the batch on the device, and its number.
            kwargs: Also of it.
            ordinal: Of the batch in the whole run, for random numbers that repeat.
            around: Precision.

        Returns:
            The loss of the whole batch, or a dict with it where the step returned one; None where
            every microbatch gave None. What else is in the dict is on the last stage's rank.
        """
        parts, sizes = self._cut(args[0])
        weights, results = StepWeights(), _Results()
        scale = 1.0 if self._context.scaler is None else float(self._context.scaler.get_scale())

        def finish(number: int, result: Any) -> tuple[Tensor, ...]:
            loss = result.get("loss") if isinstance(result, Mapping) else result
            if loss is None:
                return ()
            scaled, weight = weights.weigh(loss, sizes[number])
            results.add(number, loss, result, weight, scaled)
            return (scaled * scale,)

        run = _Run("training_step", parts, args[1:], kwargs, self._seeds(ordinal, len(parts)))
        deposit = Deposit(self._held)
        with deposit.taking():
            logs = self._work_off(run, finish, around, trains=True)
        loss, total = self._tell(results, weights, logs)
        if loss is None:
            return None
        deposit.replace(self.shared.add_up(deposit.made()))
        signed = deposit.sign(loss, total * scale)
        if not self._sharing.is_mapping:
            return signed
        return {**results.merged(sizes), "loss": signed}

    def _tell(
        self, results: "_Results", weights: StepWeights, logs: StepLogs
    ) -> tuple[Tensor | None, Tensor | float]:
        """Let all ranks know the loss, what it was weighed by, and what was logged."""
        if self.holds_last_stage:
            logged = logs.collected(results.weights)
            loss = results.loss(weights.total)
            total: Tensor | float = weights.total
            self._sharing.send(loss, total, logged, is_mapping=results.is_mapping)
        else:
            loss, total, logged = self._sharing.receive()
        repeat(self._module, logged)
        return loss, total

    def evaluation_step(
        self,
        step: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        ordinal: int,
        around: Around,
        returns: bool,
    ) -> Any:
        """Run a step that trains nothing. Collective over the pipeline.

        Args:
            step: ``validation_step``, ``test_step`` or ``predict_step``.
            args: Of the step: the batch on the device, and its number.
            kwargs: Also of it.
            ordinal: Of the batch in this loop.
            around: Precision.
            returns: Whether somebody on the other ranks needs what the step returns.

        Returns:
            What the step returned, put together over the microbatches; on ranks without the last
            stage only if ``returns``, else None.
        """
        parts, sizes = self._cut(args[0])
        found: dict[int, Any] = {}

        def finish(number: int, result: Any) -> tuple[Tensor, ...]:
            found[number] = result
            return ()

        run = _Run(step, parts, args[1:], kwargs, self._seeds(ordinal, len(parts)))
        logs = self._work_off(run, finish, around, trains=False)
        rows: list[Tensor | float] = [float(size) for size in sizes]
        output = None
        if self.holds_last_stage:
            output = merge([found[number] for number in range(len(sizes))], sizes, rows)
            logged = logs.collected(dict(enumerate(rows)))
            self._sharing.send(None, 1.0, logged, is_mapping=False)
        else:
            _, _, logged = self._sharing.receive()
        if step != "predict_step":
            repeat(self._module, logged)
        return self._give_all(output) if returns else output

    def _give_all(self, output: Any) -> Any:
        holder = [output]
        dist.broadcast_object_list(holder, self._last, group=self._context.group)
        return output if self.holds_last_stage else holder[0]

    def _work_off(
        self,
        run: "_Run",
        finish: Callable[[int, Any], tuple[Tensor, ...]],
        around: Around,
        *,
        trains: bool,
    ) -> StepLogs:
        """Run all chunks of this rank; return what the last stage logged."""
        assert self.placement is not None
        program = self._programs.of(len(run.parts))
        with around():
            runs = [
                self.placement.plans.stages(
                    run.step, part, *run.rest, kwargs=run.kwargs, seed=run.seeds[number]
                )
                for number, part in enumerate(run.parts)
            ]
        # Autograd knows what a mean was taken over; without it operators are watched.
        counts = None if trains else Counts()
        logs, dropped = StepLogs(self._module, counts), StepLogs(self._module)
        stages = [
            _Stage(
                index,
                [each[index] for each in runs],
                run,
                finish,
                around,
                logs if index == self._programs.num_stages - 1 else dropped,
                counts if index == self._programs.num_stages - 1 else None,
            )
            for index in program.stages
        ]
        self._executor.run(program if trains else program.forward_only, stages)
        return logs

    def _cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        wanted = self.options.num_microbatches(self._context.group.size())
        if wanted == 1:
            return [batch], [1]
        sizes = even_sizes(num_rows(batch), wanted)
        return cut(batch, sizes), sizes

    def _seeds(self, ordinal: int, count: int) -> list[int]:
        start = self._context.seed + SEED_STRIDE * (ordinal + 1)
        return [(start + number) % 2**63 for number in range(count)]

    def _record_chunk(
        self, stage: int, microbatch: int, kind: str, start_ns: int, end_ns: int
    ) -> None:
        self._context.recorder.chunk(
            stage=stage, microbatch=microbatch, kind=kind, start_ns=start_ns, end_ns=end_ns
        )

    def _name_of(self, module: torch.nn.Module) -> str | None:
        return next((name for name, each in self._module.named_modules() if each is module), None)

    # Gradients.

    def clip_by_norm(self, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Scale gradients so that their norm over all stages is at most ``max_norm``."""
        norm = self.norm(parameters)
        scale_to_norm(gradients_of(parameters), norm, max_norm)
        return norm

    def norm(self, parameters: Sequence[Parameter]) -> Tensor:
        """Return the norm of gradients over all stages. Collective over the pipeline."""
        return norm_over_stages(parameters, self._context.group, self.shared.counted_elsewhere)

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


@dataclass(frozen=True)
class _Run:
    """What a step is called with, microbatch by microbatch."""

    step: str
    parts: list[Any]
    rest: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seeds: list[int]


class _Stage:
    """One stage of a run, as the executor wants it."""

    def __init__(
        self,
        index: int,
        runs: Sequence[StageRun],
        run: _Run,
        finish: Callable[[int, Any], tuple[Tensor, ...]],
        around: Around,
        logs: StepLogs,
        counts: Counts | None,
    ) -> None:
        self.index = index
        self.is_first = index == 0
        self.is_last = runs[0].plan.is_last
        self._runs = runs
        self._run = run
        self._finish = finish
        self._around = around
        self._logs = logs
        self._counts = counts

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return self._runs[microbatch].plan.values_in

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return self._runs[microbatch].plan.values_out

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        run = self._run
        with ExitStack() as stack:
            stack.enter_context(self._around())
            stack.enter_context(self._logs.of_microbatch(microbatch))
            if self._counts is not None:
                stack.enter_context(self._counts)
            result = self._runs[microbatch].forward(
                received,
                (run.parts[microbatch], *run.rest),
                run.kwargs,
                seed=run.seeds[microbatch],
            )
            if self.is_last:
                return self._finish(microbatch, result)
        values: tuple[Tensor, ...] = result
        return values


class _Results:
    """What the last stage returned, by microbatch."""

    def __init__(self) -> None:
        self.weights: dict[int, Tensor | float] = {}
        self.is_mapping = False
        self._sum: Tensor | None = None
        self._extra: dict[int, dict[str, Any]] = {}

    def add(
        self, number: int, loss: Tensor, result: Any, weight: Tensor | float, scaled: Tensor
    ) -> None:
        self.weights[number] = weight
        value = scaled.detach()
        self._sum = value if self._sum is None else self._sum + value
        if isinstance(result, Mapping):
            self.is_mapping = True
            self._extra[number] = {
                key: _detached(each) for key, each in result.items() if key != "loss"
            }

    def loss(self, total: Tensor | float) -> Tensor | None:
        return None if self._sum is None else self._sum / total

    def merged(self, sizes: Sequence[int]) -> dict[str, Any]:
        numbers = sorted(self._extra)
        if not numbers:
            return {}
        parts = [self._extra[number] for number in numbers]
        weights = [self.weights[number] for number in numbers]
        merged: dict[str, Any] = merge(parts, [sizes[number] for number in numbers], weights)
        return merged


def _detached(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, value)

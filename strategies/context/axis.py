"""The context axis, as the engine calls it: ranks share a batch and divide its sequence.

When a model is placed, its entries (modules that first take the sequence) are found and the step is
proven. During a step the entries cut, and results are made whole. The data axis reduces gradients:
it averages over ``data x context``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import BoltMeshError, ConfigError, UnsupportedError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.context.entries import (
    EntryHooks,
    SequenceEntry,
    find_entries,
    lengths_of,
)
from boltmesh.strategies.context.exchange import ContextGroup, expected_context_traffic
from boltmesh.strategies.context.opaque_functions import flex_attention_watched, functions_watched
from boltmesh.strategies.context.options import SEQUENCES, ContextOptions, refuse_modules
from boltmesh.strategies.context.positions import Positions
from boltmesh.strategies.context.seq_shard import (
    ContextState,
    SeqShard,
    make_all_whole,
    make_cut,
    make_whole,
    moved_to,
    part_of,
    step_ended,
)
from boltmesh.strategies.context.tokenwise import (
    TokenwiseModule,
    TokenwiseModules,
    find_tokenwise,
)
from boltmesh.strategies.context.verify import ContextProof, results_whole
from boltmesh.strategies.deferred_initialization.materialize import own_modules, prepare_modules
from boltmesh.strategies.dry_run.sample import sample_batch
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.engine.axis import FakeRuns, LayerAxis, StepFunction
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.object_collectives import broadcast_from_rank0
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.cut import StageBoundaries
from boltmesh.strategies.pipeline.stage.trace import StepTrace, TensorSpec
from boltmesh.strategies.telemetry import shows_expectations
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.expected_traffic import CountingGroup, OperatorTraffic, count_step
from boltmesh.telemetry.traffic import ExpectedTraffic

_CPU = torch.device("cpu")

_PATIENCE = timedelta(seconds=120)
"""Timeout of a proof's collectives: a rank that raised leaves the others waiting."""


class ContextAxis(LayerAxis):
    """Divides the sequence of each batch over its ranks. With one rank it divides nothing.

    It leaves ``has_equal_weights`` False: parameters that a hook of a later run has changed are
    still shared.

    Args:
        options: The user's options.
        size: Number of ranks that divide a sequence; None: the strategy chooses.
    """

    name = "context"
    averages_gradients = True
    reasons = SEQUENCES
    can_compile = False
    operand_divider = "context"

    def __init__(self, options: ContextOptions, size: int | None = None) -> None:
        self.options = options
        self.wanted_size = size
        self.entries: tuple[SequenceEntry, ...] = ()
        """Modules that first take the sequence; empty before a model was placed."""
        self._tokenwise: dict[str, TokenwiseModule] = {}
        self._plain: TokenwiseModules | None = None
        """Modules that run on plain tensors; None while no model is placed."""
        self.state: ContextState | None = None
        """None before a model was placed."""
        self._module: LightningModule | None = None
        self._steps: set[str] = set()
        """Steps of the module that were proven, or that every rank runs whole."""
        self._whole_steps: set[str] = set()
        """Steps that generate text, which every rank runs whole."""
        self._is_proving = False
        self.hooks: EntryHooks | None = None
        """Cuts the sequence; None before a model was placed."""
        self._sample: tuple[Any, ...] = ()
        """A batch of the run, followed by the other arguments of the step."""
        self._counted: Mapping[str, OperatorTraffic] | None = None
        """Traffic of a training batch by operator; None if unknown."""
        self._uses_flex = False
        """Whether a step calls ``flex_attention``."""
        self._watching = ExitStack()
        """Contexts in which functions that bypass tensor subclasses accept cut tensors."""

    # Set-up.

    @override
    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        if self.size > 1:
            refuse_modules(module)

    @override
    def place(self, trainer: Trainer) -> None:
        super().place(trainer)
        strategy = self.strategy
        strategy.recorder.name_group(strategy.gradient_group, "data")
        if self.size == 1:
            return
        module, step = self.module, strategy.step_name
        self.state = self._new_state(strategy.groups[self.name])
        self.state.take_batch(self._sample)
        if step not in self._steps:
            with self._whole_where_it_generates(step):
                self._prove(module, step)
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks = EntryHooks(module, self.entries, self.state)
        self.release()
        self._plain = TokenwiseModules(
            module, self._tokenwise, self.state,
            is_training=step == "training_step", tile=self.options.tile_tokens,
        )  # fmt: skip
        self._watching.close()
        self._watching.enter_context(functions_watched())
        if self._uses_flex:
            self._watching.enter_context(flex_attention_watched())

    @override
    def stage_boundaries(self) -> StageBoundaries | None:
        return ContextBoundaries(self) if self.size > 1 else None

    @override
    def look_at_whole(self, trainer: Trainer) -> None:
        """Find the modules that first take the sequence. Collective over all ranks.

        Raises:
            ConfigError: If no sequence is found.
        """
        if self.size == 1:
            return
        module, step = self.module, self.strategy.step_name
        if module is not self._module:
            self._forget()
            self._module = module
        if step in self._steps:
            return
        if any(isinstance(each, DTensor) for each in module.parameters()):
            if self.entries:
                return  # an evaluation of what a fit has proven and left in shards
            raise ConfigError(
                f"{type(module).__name__} is in shards of an earlier run, so its {step} cannot be "
                f"proven with its sequence divided. Call Trainer.fit first, or build a new module."
            )
        if self._is_double:  # as the batch is, which no comparison in fp32 may have
            self.strategy.model = self.strategy.precision_plugin.convert_module(module)
        batch = broadcast_from_rank0(sample_batch(trainer).batch, self.world_cpu_group)
        self._sample = batch, *step_arguments(module, step)
        if self.entries and self.strategy.divides_layers:
            return  # of an earlier run, in which the tensor axis has divided the layers
        run = DryRun(module, step, self._sample, _CPU, around=self.strategy.host_step_context(step))
        with self._whole_where_it_generates(step):
            self.entries, self._tokenwise = self._found(run, find_blocks(module))
            if self.strategy.divides_layers or self.strategy.divides_modules:
                self._tokenwise = {}

    @contextmanager
    def _whole_where_it_generates(self, step: str) -> Iterator[None]:
        """Context of a proof; a step that generates text is run whole by every rank instead."""
        try:
            with patched(self, _is_proving=True):
                yield
        except ConfigError:
            if step not in self._whole_steps:
                raise
            rank_zero_info(
                f"boltmesh: {step} calls generate, and every rank of the context axis runs all "
                f"of it."
            )
            self._steps.add(step)

    @property
    def _is_double(self) -> bool:
        return isinstance(self.strategy.precision_plugin, DoublePrecision)

    def _new_state(self, group: ProcessGroup | None) -> ContextState:
        assert group is not None
        return self.options.new_state(ContextGroup(group, self.strategy.root_device))

    def _prove(self, module: LightningModule, step: str) -> None:
        """Prove that the step computes the same with its sequence divided. Collective.

        Raises:
            ConfigError: If it does not.
        """
        strategy = self.strategy
        assert self.world_cpu_group is not None
        if any(isinstance(each, DTensor) for each in module.parameters()):
            return
        if strategy.layout.size("tensor") == 1:  # else it has done so, and ranks have other parts
            # Makes what is deferred, and gives all ranks the first one's values.
            prepare_modules(own_modules([module], ""), device=_CPU, group=self.world_cpu_group)
        around = strategy.step_context(step) if self._is_double else nullcontext
        on_device = DryRun(module, step, self._sample, strategy.root_device, around=around)
        blocks = find_blocks(module)
        while True:
            group = strategy.new_group(self.name, timeout=min(strategy.timeout, _PATIENCE))
            tokenwise, tile = self._tokenwise, self.options.tile_tokens
            state = self._new_state(group)
            proof = ContextProof(
                on_device, self.entries, state, self.world_cpu_group, blocks, tokenwise, tile
            )
            try:
                proof.check()
                break
            except ConfigError:
                if not tokenwise:
                    raise
            # Modules may read their length, which is that of a rank on plain tensors.
            self._tokenwise = {}
        self._steps.add(step)

    def _found(
        self, run: DryRun, blocks: dict[str, Module]
    ) -> tuple[tuple[SequenceEntry, ...], dict[str, TokenwiseModule]]:
        """Return the modules that first take the sequence, and those that compute positions alone.

        All ranks return those that the first one finds. Collective over all ranks.
        """
        assert self.world_cpu_group is not None
        dims = self.options.dims
        lengths = None if dims is None else lengths_of(self._sample[0], dims)
        entries: tuple[SequenceEntry, ...] = ()
        tokenwise: dict[str, TokenwiseModule] = {}
        failure: Exception | None = None
        text = ""
        try:
            with flex_attention_watched() as calls:
                analysis = analyse(run.module, run.forward, blocks=blocks)
            self._uses_flex |= bool(calls)
            entries = find_entries(run.module, analysis, tuple(blocks), lengths)
            tokenwise = find_tokenwise(analysis, lengths)
        except Exception as error:  # noqa: BLE001 - the user's step may raise anything
            failure = error
            is_ours = isinstance(error, BoltMeshError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        entries, tokenwise, text = broadcast_from_rank0(
            (entries, tokenwise, text), self.world_cpu_group
        )
        kind = type(run.module).__name__
        if text:
            raise ConfigError(
                f"{kind}.{run.step} could not be run on tensors without data, to find where its "
                f"sequence begins: {text}"
            ) from failure
        if not entries and dims is not None:
            raise ConfigError(
                f"dims={dict(dims)!r} is no axis that {kind}.{run.step} brings to an "
                f"Embedding, a Linear or the first of several blocks. Name another one, or leave "
                f"dims out."
            )
        if not entries:
            raise ConfigError(
                f"{kind}.{run.step} has no sequence that could be divided over {self.size} ranks: "
                f"nothing looks along an axis of the data behind an Embedding, a Linear or the "
                f"first of several blocks. Use a strategy without a context axis, such as "
                f"bolt_zero3."
            )
        return entries, tokenwise

    # Forecasts.

    @override
    def before_wrap(self) -> None:
        """Count the traffic of a step while parameters are still plain tensors."""
        module, self._counted = self.module, None
        if self.strategy.divides_modules:
            return  # stages run the end of a step once for all microbatches
        if self.size == 1 or not shows_expectations(self.strategy):
            return
        if any(isinstance(each, DTensor) for each in module.parameters()) or not self._sample:
            return
        assert self.state is not None
        dry = self.dry_batch()
        assert dry is not None
        around = self.strategy.host_step_context("training_step")
        with self.others_without_collectives():
            self._counted = count_step(module, dry[0], self.state.group, around, _CPU)

    @override
    def dry_batch(self) -> tuple[FakeRuns, torch.device] | None:
        module, hooks, state = self._module, self.hooks, self.state
        if hooks is None or state is None or module is None or not self._sample:
            return None
        if self.strategy.divides_modules:
            return None
        run = DryRun(module, "training_step", self._sample, _CPU)

        def fake(_: object) -> object:
            with hooks.on(), results_whole(module, run.step), step_ended(state):
                return run.run()

        return [(fake, 1)], _CPU

    @override
    def without_collectives(self) -> AbstractContextManager[None]:
        if self.size == 1 or self.state is None:
            return nullcontext()
        group = self.state.group
        return group.counted_by(CountingGroup(group.rank, group.size))

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        if self._counted is None or self.size == 1:
            return []
        accumulated = self.strategy.trainer.accumulate_grad_batches
        return expected_context_traffic(self._counted, size=self.size, accumulated=accumulated)

    # Steps.

    @override
    def check_batch(self, batch: Any) -> None:
        if self.state is not None:
            self.state.end_step()  # what the backward passes of the batch before have left
            self.state.take_batch(batch)
        super().check_batch(batch)

    @override
    def run_step(self, step: str, run: StepFunction, args: Any, kwargs: Any) -> Any:
        if self.hooks is None or self.size == 1 or step in self._whole_steps:
            return run(args, kwargs)
        assert self._module is not None
        with self.hooks.on(), results_whole(self._module, step):
            return run(args, kwargs)

    @override
    def run_generation(self, run: Callable[[], Any]) -> Any:
        if self._is_proving:
            self._whole_steps.add(self.strategy.step_name)
            raise UnsupportedError("generate has a sequence that grows")
        if self.hooks is None:
            return run()
        with self.hooks.off():
            return run()

    # Ending.

    @override
    def close(self) -> None:
        self._watching.close()
        if self.state is not None:
            self.state.end_step()

    @override
    def release(self) -> None:
        if self._plain is not None:
            self._plain.remove()
            self._plain = None

    def _forget(self) -> None:
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks, self.entries, self._tokenwise = None, (), {}
        self._uses_flex = False
        self._steps, self._whole_steps = set(), set()


class ContextBoundaries(StageBoundaries):
    """Sends only this rank's positions of a value from one pipeline stage to the next.

    Whether a value is sent whole or divided changes memory and bytes, not results: it is divided
    along the first dim after the rows that is as long as a sequence of the step.

    In a plan before a run, whose axis has no groups, ``largest`` is not called.
    """

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    @property
    def state(self) -> ContextState:
        """State of the run."""
        assert self._axis.state is not None
        return self._axis.state

    @override
    @contextmanager
    def running(self) -> Iterator[None]:
        hooks = self._axis.hooks
        assert hooks is not None
        with hooks.on():
            yield

    @override
    def dividing(self, trace: StepTrace) -> Callable[[ValueSpec], ValueSpec]:
        lengths = set()
        for event in trace.unit_events():
            name, first = trace.events[event].name, trace.outputs[event].leaves[0]
            for entry in self._axis.entries:
                is_within = f"{entry.module}.".startswith(f"{name}.")
                if is_within and isinstance(first, TensorSpec) and len(first.shape) > entry.dim:
                    lengths.add(first.shape[entry.dim])
        state = self.state

        def divided(spec: ValueSpec) -> ValueSpec:
            dims = (dim for dim, size in enumerate(spec.shape) if dim and size in lengths)
            dim = next(dims, None)
            if dim is None:
                return spec
            shape, length = list(spec.shape), spec.shape[dim]
            shape[dim] = state.divide(length).count(state.rank)
            return replace(spec, shape=tuple(shape), seq_dim=dim, length=length)

        return divided

    @override
    def sent(self, value: Tensor, spec: ValueSpec) -> Tensor:
        if spec.seq_dim is None:
            whole: Tensor = make_whole(value, f"{spec.origin}, which goes to the next stage whole,")
            return whole
        positions = self._positions(spec)
        if isinstance(value, SeqShard) and value.is_simple and value.seq_dim == spec.seq_dim:
            return moved_to(value, positions).local
        whole = make_whole(value, f"{spec.origin}, which goes to the next stage,")
        return part_of(whole, spec.seq_dim, positions, self.state)

    @override
    def received(self, tensor: Tensor, spec: ValueSpec) -> Tensor:
        if spec.seq_dim is None:
            return tensor
        return make_cut(tensor, spec.seq_dim, self._positions(spec), self.state)

    def _positions(self, spec: ValueSpec) -> Positions:
        return self.state.divide(spec.length)

    @override
    def whole(self, result: Any) -> Any:
        return make_all_whole(result, "what the step returns")

    @override
    def largest(self, number: float) -> float:
        shared = torch.tensor(number if number == number else math.inf, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._axis.sharing_group)
        return float(shared)

"""Validation, test and prediction steps: through the pipeline, or layer by layer.

Microbatches go through the units of all stages as a pipeline. The values behind the last unit are
joined to those of the batch and broadcast, and every rank runs the rest of the step once on the
whole batch. So logs, results, metrics and attributes of the module are on every rank as in one
process. See [Note: The tail of a step] in ``stage/stage_run.py``. A step that cannot be cut into
stages runs layer by layer, see ``layerwise_eval.py``.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.dry_run.metrics import metrics_replaced
from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged, no_side_effects
from boltmesh.strategies.pipeline.merge import JoinedRun, join, join_run, tail_of
from boltmesh.strategies.pipeline.microbatch_runs import Around, MicrobatchRun
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.rng import host_random_kept
from boltmesh.strategies.pipeline.stage.stage_run import Tail
from boltmesh.strategies.pipeline.stage.units import AbsentError
from boltmesh.strategies.pipeline.stage_params import broadcast
from boltmesh.strategies.random_state import generators_unchanged, held_generators
from boltmesh.strategies.torch_compat.modules import (
    hooks_unchanged,
    swapped_state,
    without_nested_batches,
)

if TYPE_CHECKING:
    from boltmesh.strategies.pipeline.staged_model import StagedModel


class Evaluation:
    """Runs evaluation steps.

    Args:
        model: The model, placed on a pipeline.
    """

    def __init__(self, model: "StagedModel") -> None:
        self._model = model
        self._layerwise: set[str] = set()
        """Steps that cannot be cut into stages."""
        self._undivided: WeakSet[Tail] = WeakSet()
        """Tails of batches whose microbatches cannot be joined: these run undivided."""
        assert model.placement is not None
        self._plans = model.placement.plans
        apart = (*self._plans.units.values(), *model.metrics.values())
        inside = {id(part) for each in apart for part in each.modules()}
        self._outside = [each for each in model.module.modules() if id(each) not in inside]

    @without_nested_batches()
    def step(
        self,
        step: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        ordinal: int,
        around: Around,
    ) -> Any:
        """Run a step on a batch. Collective over the pipeline.

        Args:
            step: ``validation_step``, ``test_step`` or ``predict_step``.
            args: Positional arguments of the step; the first is the batch on the device.
            kwargs: Keyword arguments of the step.
            ordinal: Number of the batch in this loop.
            around: The precision context.

        Returns:
            The step's result for the whole batch.

        Raises:
            PipelineError: A rank failed, or ranks have different batches.
        """
        model = self._model
        whole = MicrobatchRun(step, args[0], [args[0]], args[1:], kwargs, model.seeds(ordinal, 1))
        if step in self._layerwise:
            return self._run_layerwise(whole, around)
        try:
            with around():
                run, joined = self._divided(whole, ordinal)
        except AbsentError as error:
            model.runner.refuse(error)
        except ConfigError as error:  # on all ranks, which have the same batch and plan
            self._layerwise.add(step)
            rank_zero_info(
                f"boltmesh: {step} runs layer by layer, without overlap of the pipeline's ranks: "
                f"{error}"
            )
            return self._run_layerwise(whole, around)
        except Exception as error:  # noqa: BLE001 - sent to all ranks and raised again
            model.runner.refuse(error)
        tail = joined.tail
        specs = tail.end.plan.values_in
        values = self._values(run, joined, specs, around)
        for each in values:
            broadcast(each, model.programs.rank_of_stage[-1], model.context.group)
        lent = self._lent(tail)
        with self._of_step(around), swapped_state(model.module, lent) if lent else nullcontext():
            return tail.end.forward(values, args, kwargs, seed=whole.seeds[0])

    def _run_layerwise(self, whole: MicrobatchRun, around: Around) -> Any:
        """Run a step that cannot be cut into stages, each layer on its rank."""
        with self._of_step(around):
            method = getattr(self._model.module, whole.step)
            step = partial(method, whole.batch, *whole.rest, **whole.kwargs)
            return self._model.runner.run_layerwise(whole.step, step, whole.seeds[0])

    @contextmanager
    def _of_step(self, around: Around) -> Iterator[None]:
        """Return a context for code that every rank runs as one process does, metrics included."""
        metrics = metrics_replaced(self._model.metrics, lambda call: call.do())
        with around(), host_random_kept(), metrics:
            yield

    def _divided(self, whole: MicrobatchRun, ordinal: int) -> tuple[MicrobatchRun, JoinedRun]:
        """Return the batch's microbatches, and how their values are joined."""
        tail = tail_of(self._plans, whole, 0)
        undivided = JoinedRun(whole, tail, [tail.last], (None,) * len(tail.end.plan.values_in))
        if tail in self._undivided:
            return whole, undivided
        parts, sizes = self._model.cut_if_possible(whole.parts[0])
        if len(parts) == 1:
            return whole, undivided
        run = dataclasses.replace(whole, parts=parts, seeds=self._model.seeds(ordinal, len(parts)))
        joined = join_run(self._plans, run, sizes)
        if isinstance(joined, str):
            self._undivided.add(tail)
            return whole, undivided
        return run, joined

    def _values(
        self,
        run: MicrobatchRun,
        joined: JoinedRun,
        specs: Sequence[ValueSpec],
        around: Around,
    ) -> list[Tensor]:
        """Return the values behind the last unit on its rank, empty tensors on the others."""
        model = self._model
        with ExitStack() as stack:
            # Every stage runs the beginning of the step; only its end may have side effects.
            stack.enter_context(modules_unchanged(self._outside))
            stack.enter_context(hooks_unchanged(model.module.modules()))
            stack.enter_context(no_side_effects(model.module, model.metrics))
            held = held_generators(self._outside)
            parts = model.runner.pass_through(
                run, joined.last, around, lambda _: generators_unchanged(held)
            )
        if model.holds_last_stage:
            return join(parts, joined.joints, specs)
        device = model.context.device
        return [torch.empty(each.shape, dtype=each.dtype, device=device) for each in specs]

    def _lent(self, tail: Tail) -> dict[str, Tensor]:
        """Return values of parameters that the tail uses and this rank does not have, by name.

        Collective over the pipeline.
        """
        model, group = self._model, self._model.context.group
        assert model.placement is not None
        lent = {}
        for name in sorted(tail.end.plan.parameters):
            holders = model.placement.division.ranks_of_parameter[name]
            if len(holders) == group.size():
                continue
            own = model.module.get_parameter(name)
            is_holder = group.rank() in holders
            value = own.detach() if is_holder else torch.empty_like(own).contiguous()
            broadcast(value, holders[0], group)
            if not is_holder:
                lent[name] = value
        return lent

"""Caches the plans of a step by signature of the batch.

Two batches with equal signatures are run the same way.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError
from boltmesh.lightning_import import ROOTS
from boltmesh.strategies.dry_run.unsupported import with_inner
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.stage.cut import (
    StageBoundaries,
    StagePlan,
    plan_stages,
    plan_tail,
)
from boltmesh.strategies.pipeline.stage.stage_run import ParameterWrites, StageRun, Tail
from boltmesh.strategies.pipeline.stage.trace import (
    Place,
    StepTrace,
    UnitOutput,
    attribute_signature,
    refuse_writes,
)
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.strategies.pipeline.stage.unit_outputs import from_bytes, outputs_for_rows, to_bytes
from boltmesh.strategies.pipeline.stage.units import unit_parameters
from boltmesh.strategies.pytree import hidden_members, is_constant, nesting, take_apart
from boltmesh.strategies.torch_compat.modules import ParametersInPlace
from boltmesh.strategies.torch_compat.tensors import functions_unwatched

TRAINING: Final = "training_step"
"""The step that has to be cut into stages; others run layer by layer if they cannot be cut."""

EPOCH: Final = "current_epoch"
"""Attribute by which a step may add a term or leave a layer out from some epoch on."""

_FRAMEWORKS: Final = ROOTS | {"torch"}

_PLAIN: Final = frozenset({int, float, bool, str, type(None)})


def step_signature(root: Module, parameters: Iterable[Parameter], step: str) -> Hashable:
    """Return the state that a step may depend on, equal for all microbatches of a batch.

    It is: train or eval mode, grad mode, autocast, the frozen parameters, and the epoch if the
    module's own code names it.
    """
    device_type = next((each.device.type for each in parameters), "cpu")
    kind: Any = type(root)
    with functions_unwatched():  # modes of a dry run would see each read
        are_trained = tuple([each.requires_grad for each in parameters])
    return (
        step,
        root.training,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        are_trained,
        getattr(root, EPOCH, 0) if _names_epoch(kind) else 0,
    )


@cache
def _names_epoch(kind: type) -> bool:
    """Whether the code of a class, without that of frameworks, names the epoch."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _FRAMEWORKS]
    codes = [getattr(each, "__code__", None) for one in own for each in vars(one).values()]
    written = [one for each in codes if isinstance(each, CodeType) for one in with_inner(each)]
    return any(EPOCH in each.co_names for each in written)


def batch_signature(value: Any) -> Hashable:
    """Return the nesting of a batch, shapes and dtypes of its tensors, and its constants."""
    kind = type(value)
    if kind is Tensor:  # the most frequent kinds first: this runs for each microbatch
        return value.shape, value.dtype, value.device, value.requires_grad
    if kind is tuple or kind is list:
        return kind, tuple(map(batch_signature, value))
    if kind is dict:
        return kind, tuple(value), tuple(map(batch_signature, value.values()))
    if kind in _PLAIN:
        return kind, value
    return tuple(map(_leaf, take_apart(value)[0])), nesting(value)


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype.str
    if is_constant(leaf):
        return type(leaf).__qualname__, leaf
    return type(leaf).__qualname__, tuple(map(_member, hidden_members(leaf)))


def _member(value: Any) -> Hashable:
    """Describe a member of an object, such as a batch of graphs, on which a step may branch."""
    if isinstance(value, (Tensor, int)):
        return _leaf(value)
    return type(value).__qualname__


MOST_SIGNATURES = 256
"""Limit of signatures, beyond which the least recently used is dropped: lengths may all differ."""

WEIGHTS_ONLY = (nn.Embedding, nn.Linear)
"""Layers that a later stage may call again, because only their weights are shared."""


_State = tuple[Hashable, Hashable, bool]
"""State that a step may depend on, attributes that it keeps, and whether it is tried."""


@dataclass
class _KnownSignature:
    """Traces and plans of batches of one signature."""

    traces: dict[tuple[Any, ...], StepTrace] = field(default_factory=dict)
    """Traces by the values that the step read from a batch."""
    outputs: dict[Place, UnitOutput] = field(default_factory=dict)
    """Outputs of units without other effects."""
    runs: dict[tuple[Any, ...], tuple[StageRun, ...]] = field(default_factory=dict)
    tails: dict[tuple[Any, ...], dict[frozenset[int], Tail]] = field(default_factory=dict)

    def forget_oldest(self) -> None:
        """Drop the oldest run beyond the limit: values read, such as lengths, may all differ."""
        if len(self.runs) > MOST_SIGNATURES:
            oldest = next(iter(self.runs))
            for known in (self.traces, self.runs, self.tails):
                known.pop(oldest, None)
            for place in list(self.outputs):
                if place.answers and place.answers == oldest[: len(place.answers)]:
                    del self.outputs[place]


class StagePlans:
    """Gives the stages of a step for any batch; the same on every rank, without communication."""

    def __init__(
        self,
        root: Module,
        units: Mapping[str, Module],
        stage_of_unit: Mapping[str, int],
        *,
        without_collectives: Callable[[], AbstractContextManager[None]] = nullcontext,
        boundaries: StageBoundaries | None = None,
    ) -> None:
        """Set the cut of a model.

        Args:
            root: The whole model.
            units: All of its units by name, of :func:`find_stage_units`.
            stage_of_unit: The stage of each unit that steps call.
            without_collectives: Returns the context of traces, in which units do not communicate.
            boundaries: How values are sent from one stage to the next.
        """
        self.boundaries = boundaries or StageBoundaries()
        self._without_collectives = without_collectives
        self.root = root
        self.units = dict(units)
        self.stage_of_unit = dict(stage_of_unit)
        self.parameters = ParametersInPlace(root, (name for name, _ in root.named_parameters()))
        self.parameters_of_unit = unit_parameters(root, self.units)
        self.weight_only = frozenset(
            name for name, unit in self.units.items() if type(unit) in WEIGHTS_ONLY
        )
        self.writes = ParameterWrites()
        """Executes the step's writes to parameters."""
        self.check: Callable[[tuple[StagePlan, ...]], None] | None = None
        """Called with every new cut of a step; raises if this rank cannot run it."""
        self._known: OrderedDict[Hashable, _KnownSignature] = OrderedDict()
        self._is_trial = False
        self._kept_attributes: dict[tuple[str, str], None] = {}
        """Attributes that steps set to what is no unit's value, by module and name, in order."""

    def stages(
        self,
        step: str,
        batch: Any,
        *rest: Any,
        kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> tuple[StageRun, ...]:
        """Return the stages that run ``step`` on a batch like this one, first to last.

        The step is traced if necessary: for the first batch of a signature, and otherwise up to the
        last read of the batch's data, if there is any.

        Args:
            step: The name of the method, such as ``training_step``.
            batch: Its first argument.
            rest: Its other positional arguments; it must not depend on the first one, the number
                of the batch.
            kwargs: Its keyword arguments.
            seed: Seed of its random numbers, see :meth:`StageRun.forward`.

        Raises:
            ConfigError: The step cannot be cut so.
        """
        known, answers = self._known_of(self._state(step), step, batch, rest, kwargs, seed)
        return known.runs[answers]

    def stages_of_parts(
        self,
        step: str,
        parts: Sequence[Any],
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seeds: Sequence[int],
    ) -> list[tuple[StageRun, ...]]:
        """Return the stages of all microbatches of a batch; arguments as for :meth:`stages`."""
        state = self._state(step)
        runs = []
        for part, seed in zip(parts, seeds, strict=True):
            known, answers = self._known_of(state, step, part, rest, kwargs, seed)
            runs.append(known.runs[answers])
        return runs

    def tail(
        self,
        step: str,
        batch: Any,
        *rest: Any,
        kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        recomputed: frozenset[int] = frozenset(),
    ) -> Tail:
        """Return the tail of ``step``, the code behind its last unit, for a batch like this one.

        Arguments as for :meth:`stages`; ``recomputed`` as for :func:`plan_tail`.

        Raises:
            ConfigError: The step cannot be cut so.
        """
        known, answers = self._known_of(self._state(step), step, batch, rest, kwargs, seed)
        tails = known.tails.setdefault(answers, {})
        tail = tails.get(recomputed)
        if tail is None:
            trace = known.traces[answers]
            last, end = plan_tail(
                trace,
                self.stage_of_unit,
                self.parameters_of_unit,
                self.weight_only,
                recomputed,
                self.boundaries,
            )
            tail = tails[recomputed] = Tail(
                last=self._run(step, last),
                end=self._run(step, end),
                draws_before=any(each < end.begin for each in trace.draws),
            )
        return tail

    def knows(
        self, step: str, batch: Any, *rest: Any, kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether batches like this one need no trace; arguments as for :meth:`stages`."""
        return () in self._of_signature(self._state(step), batch, rest, kwargs).traces

    def learn(
        self,
        step: str,
        args: tuple[Any, ...],
        trace: StepTrace,
    ) -> None:
        """Add a trace of a batch, so that the step is not traced again for it.

        Args:
            step: The name of the method.
            args: Its positional arguments.
            trace: The trace, made in the current modes of the model.

        Raises:
            ConfigError: The step cannot be cut so.
        """
        self._note_attributes(trace)
        known = self._of_signature(self._state(step), args[0], args[1:], None)
        self._note(known, step, trace)

    def share_outputs(
        self,
        step: str,
        batches: Iterable[Any],
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seed: int,
        group: ProcessGroup,
    ) -> None:
        """Trace a step for several batches, each kind on one rank, and share the units' outputs.

        Every rank still traces what lies between units, which may depend on its rank, when it needs
        the batch. Collective over the group.

        Args:
            step: The name of the method.
            batches: Its first arguments, the same on all ranks of the group.
            rest: As for :meth:`stages_of_parts`.
            kwargs: As for :meth:`stages`.
            seed: As for :meth:`stages`.
            group: CPU group of ranks with parameters of equal shapes.
        """
        state = self._state(step)
        kinds = {self._signature(state, each, rest, kwargs): each for each in batches}
        known = [self._of_signature(state, each, rest, kwargs) for each in kinds.values()]
        device = next((each.device for each in self.parameters), torch.device("cpu"))
        own: dict[int, list[bytes]] = {}
        for number, batch in list(enumerate(kinds.values()))[group.rank() :: group.size()]:
            with suppress(Exception):  # raised again where the trace is needed
                self._known_of(state, step, batch, rest, kwargs, seed)
            own[number] = to_bytes(known[number].outputs, device)
        for each in gather_objects(own, group):
            for number, outputs in each.items():
                if number not in own and number < len(known):
                    known[number].outputs.update(from_bytes(outputs, device))

    def derive_outputs(
        self,
        step: str,
        known: Mapping[int, Any],
        batches: Mapping[int, Any],
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Derive the units' outputs for trials from those for batches, see ``outputs_for_rows``.

        Args:
            step: The name of the method.
            known: Batches with known outputs, by number of rows.
            batches: Other rows of them, by number of rows.
            rest: As for :meth:`stages_of_parts`.
            kwargs: As for :meth:`stages`.
        """
        state = self._state(step)
        outputs = {
            rows: self._of_signature(state, each, rest, kwargs).outputs
            for rows, each in known.items()
        }
        with self.trying():
            state = self._state(step)
            for rows, each in batches.items():
                derived = outputs_for_rows(outputs, rows)
                self._of_signature(state, each, rest, kwargs).outputs.update(derived)

    def trying(self) -> AbstractContextManager[None]:
        """Return a context for trials, in which traces may use derived outputs.

        Traces of steps are used there as well; those made within are not used elsewhere.
        """
        return patched(self, _is_trial=True)

    def _state(self, step: str) -> _State:
        kept = (
            vars(self.root.get_submodule(module)).get(name)
            for module, name in self._kept_attributes
        )
        signature = step_signature(self.root, self.parameters, step)
        return signature, tuple(map(attribute_signature, kept)), self._is_trial

    def _note_attributes(self, trace: StepTrace) -> bool:
        """Note the attributes that a step has changed; return whether there are new ones."""
        before = len(self._kept_attributes)
        own = trace.changed_attributes - trace.attributes_of_units
        self._kept_attributes.update(dict.fromkeys(sorted(own)))
        return len(self._kept_attributes) > before

    def _known_of(
        self,
        state: _State,
        step: str,
        batch: Any,
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        seed: int | None,
    ) -> tuple[_KnownSignature, tuple[Any, ...]]:
        """Return the plans for batches like this one, and the values read from it."""
        known = self._of_signature(state, batch, rest, kwargs)
        if () in known.traces:
            return known, ()
        with self._without_collectives():
            trace = trace_step(
                self.root,
                self.units,
                step,
                (batch, *rest),
                kwargs,
                seed=seed,
                known=known.traces,
                remembered=known.outputs,
            )
        if self._note_attributes(trace):
            self._known[self._signature(self._state(step), batch, rest, kwargs)] = known
        return known, self._note(known, step, trace)

    @staticmethod
    def _signature(
        state: _State, batch: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> Hashable:
        parts = batch, rest[1:], dict(kwargs or {})
        return state, *map(batch_signature, parts)

    def _of_signature(
        self,
        state: _State,
        batch: Any,
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> _KnownSignature:
        of_step, attributes, is_trial = state
        if is_trial:
            as_step = of_step, attributes, False
            traced = self._known.get(self._signature(as_step, batch, rest, kwargs))
            if traced is not None and (traced.traces or traced.outputs):
                return traced
        signature = self._signature(state, batch, rest, kwargs)
        known = self._known.get(signature)
        if known is None:
            known = self._known[signature] = _KnownSignature()
            if len(self._known) > MOST_SIGNATURES:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(signature)
        return known

    def _note(self, known: _KnownSignature, step: str, trace: StepTrace) -> tuple[Any, ...]:
        """Cut a step by its trace, and return the values that it read from the batch."""
        answers = tuple(trace.answers)
        if answers not in known.runs:
            runs = self._cut(step, trace)
            known.traces[answers], known.runs[answers] = trace, runs
            known.outputs.update(trace.learned)
            known.forget_oldest()
        return answers

    def _cut(self, step: str, trace: StepTrace) -> tuple[StageRun, ...]:
        if step != TRAINING:
            refuse_writes(trace.events, f"of {step}")
        plans = plan_stages(
            trace,
            self.stage_of_unit,
            self.parameters_of_unit,
            self.weight_only,
            self.boundaries,
            trains=step == TRAINING,
        )
        if step != TRAINING and not plans[0].is_in_order:
            raise ConfigError(f"{step} calls layers of a stage again after those of a later one.")
        if self.check is not None:
            self.check(plans)
        return tuple(self._run(step, each) for each in plans)

    def _run(self, step: str, plan: StagePlan) -> StageRun:
        return StageRun(self.root, self.units, step, plan, self.boundaries, self.writes)

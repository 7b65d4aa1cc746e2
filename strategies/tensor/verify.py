"""Verifies a plan before the first step, with one batch on the whole model and on the divided one.

Wrong plans raise no error: a router may see only a part of the sequence, or a rank only a part of
a gradient. So each kind of block runs the user's own step whole and as planned, on ranks and links
that will train, and the loss and every gradient have to agree. If they do not, the next backend is
tried, and the block stays whole if none is right. In a pipeline the ranks of the first stage verify
the plan for all.

One block of each kind runs first, to find the backends; then all blocks, to check interactions
between them, such as a shared cache; at once if the step needs what a skipped block leaves on
itself. Blocks without values use the parameters of the first of their kind.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import psutil
import torch
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.dry_run.comparison import ROUGH, TOLERANCE, difference
from boltmesh.strategies.dry_run.step import (
    Around,
    DryRun,
    DryRunOutcome,
    converted,
    floats_in,
    full_float32,
    parameters_kept,
    rare_garbage_collection,
    zeros_filled,
)
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.tensor.expected_traffic import CountedGroup, OperatorTraffic
from boltmesh.strategies.tensor.plan import (
    OUTSIDE,
    Backend,
    TensorPlan,
    block_of,
    without_sequence,
)
from boltmesh.strategies.tensor.runtime.apply import apply_plan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.param_swap import division_of
from boltmesh.strategies.tensor.skip_blocks import blocks_passed, lasts_of, parameters_lent
from boltmesh.strategies.torch_compat.communication import destroy_group


def divisions_of(plan: TensorPlan, rank: int) -> dict[str, DimDivision]:
    """Return a rank's division of each divided parameter, by all of its names."""
    divisions = {}
    for entry in plan.sharded.values():
        division = division_of(entry, plan.size, rank)
        divisions.update(dict.fromkeys(entry.names, division))
    return divisions


_BACKENDS: tuple[Backend, ...] = ("local", "region")

Counted = dict[str, OperatorTraffic]


@dataclass(frozen=True)
class StepPrecision:
    """Precision of a step in the run."""

    around: Around
    dtype: torch.dtype
    """Dtype of matrix products."""
    is_mixed: bool
    """Whether parameters stay in fp32, and autocast casts them."""


@dataclass(frozen=True)
class ProofInputs:
    """Inputs of a verification.

    Args:
        rehearsal: The step.
        blocks: The repeated blocks by name.
        passed: First block of the kind, by name of each block that is skipped.
        activation_bytes: Upper bound of the activations that a backward pass of all blocks keeps.
        precision: Precision of the step in the run.
        world_cpu_group: CPU group of all ranks of the job, which agree on the result.
        new_group: Creates a group of the tensor axis's ranks for planned steps. Collective over
            all ranks of the job. A collective in which not all ranks took part leaves a group
            unusable, so the next trial gets a new one.
        verifies: Whether this rank runs the step; the others follow. All ranks of a tensor group
            or none, and those of the first rank's.
    """

    rehearsal: DryRun
    blocks: Mapping[str, Module]
    passed: Mapping[str, str]
    activation_bytes: int
    precision: StepPrecision
    world_cpu_group: ProcessGroup
    new_group: Callable[[], TensorGroup]
    verifies: bool = True


@rare_garbage_collection()
def prove(plan: TensorPlan, stage: ProofInputs) -> tuple[TensorPlan, Counted | None]:
    """Return the plan with verified backends, and a step's traffic.

    The plan's notes say why other backends are not used. The traffic is None if no run of the proof
    was like a step of the run.

    Collective over all ranks of the job, whose models are equal, whole except for skipped blocks,
    and on the device of the step. The models do not change. The traffic is the same on all ranks
    that verify.

    Raises:
        ConfigError: If the step cannot be run at all.
    """
    proof = _Proof(plan, stage)
    plan, counted = proof.settled(), proof.counted
    proof.close()
    return plan, counted


@dataclass(frozen=True, eq=False)
class _Run:
    """A way to run the step for a comparison of the plan with the whole model."""

    name: str
    passed: Mapping[str, str]
    has_backward: bool = True


_ALL_BLOCKS = _Run("all blocks", {})


class _Proof:
    def __init__(self, plan: TensorPlan, stage: ProofInputs) -> None:
        self.plan = plan
        self.stage = stage
        self.root = stage.rehearsal.module
        self.kinds = _kinds(plan)
        self.group: TensorGroup | None = None
        self.notes: list[str] = []
        self.wholes: dict[_Run, DryRunOutcome] = {}
        """Outcomes of the whole model, the cheapest run first."""
        self.nudged: dict[_Run, DryRunOutcome] = {}
        """Outcomes with nudged parameters, if they were needed."""
        self.compared: list[tuple[TensorPlan, _Run, str | None, Counted]] = []
        """Plans, each with the fault, the same on all ranks, and the traffic in a run."""
        self.rehearsal = stage.rehearsal
        self.tolerance = TOLERANCE
        self.counted: Counted | None = None
        """Traffic of the last plan without a fault; None if a step of the run may differ."""

    def settled(self) -> TensorPlan:
        if not self.kinds:
            return self.plan
        device, precision = self.rehearsal.device, self.stage.precision
        wide = torch.promote_types(precision.dtype, torch.float32)
        lent = parameters_lent(self.stage.blocks, self.stage.passed)
        with lent, zeros_filled(self.root), full_float32():
            try:
                with converted(self.root, device, partial(torch.promote_types, wide)):
                    args = floats_in(wide, self.rehearsal.args)
                    self.rehearsal = replace(self.rehearsal, args=args)
                    if wide == torch.float64:  # the default dtype of the step's new tensors
                        self.rehearsal = replace(self.rehearsal, around=precision.around)
                    self._run_first()
                    return self._searched()
            except _NotRunError as error:
                if precision.dtype.itemsize >= torch.float32.itemsize:
                    raise
                reason = str(error)
            # Some kernels are for 16 bits only, such as those of FlashAttention.
            self.rehearsal = replace(self.stage.rehearsal, around=precision.around)
            self.tolerance = ROUGH
            with converted(
                self.root, device, lambda before: before if precision.is_mixed else precision.dtype
            ):
                self._run_first()
                plan = self._searched()
        note = f"verified in the precision of the run and within {ROUGH:.0%}, as in fp32 {reason}"
        return replace(plan, notes=(*plan.notes, note))

    def _searched(self) -> TensorPlan:
        """Return the plan with the first backends that agree in all runs."""
        plan = self._search()
        unproven: list[str] = []
        for run in self._runs_of_several():
            try:
                self._run_whole(run)
            except _NotRunError as error:
                unproven.append(f"not proven by {run.name}: {error}")
                continue
            if self._fault(plan, plan.backends) is not None:
                plan = self._search()
        return replace(plan, notes=(*plan.notes, *unproven))

    def _runs_of_several(self) -> list[_Run]:
        """Return the runs that show interactions between blocks. Collective over all ranks.

        The whole model if its activations fit; otherwise without a backward pass, which keeps
        nothing, and with the first and the last of each kind.
        """
        if not self.stage.passed or _ALL_BLOCKS in self.wholes:
            return []
        if self._fits():
            return [_ALL_BLOCKS]
        lasts = set(lasts_of(self.plan.kinds).values())
        others = {name: first for name, first in self.stage.passed.items() if name not in lasts}
        return [
            _Run("the first and the last of each kind", others),
            _Run("all blocks", {}, has_backward=False),
        ]

    def _fits(self) -> bool:
        """Whether the activations of all blocks fit on every rank. Collective over all ranks."""
        fits = self.stage.activation_bytes <= _free_bytes(self.stage) / 2
        return self._first(None if fits else "too large") is None

    def _search(self) -> TensorPlan:
        plan = self.plan
        self.notes = []
        everywhere: dict[str, Backend] = dict.fromkeys(self.kinds, "local")
        if self._fault(plan, everywhere) is None:
            return self._with(plan, everywhere)
        # One thing at a time: first which blocks run at all, then with a part of the sequence.
        chosen, plan = self._backends(without_sequence(plan))
        if self.plan.sequence is not None:
            with_sequence = replace(self.plan, attributes=plan.attributes)
            fault = self._fault(with_sequence, chosen)
            if fault is None:
                return self._with(with_sequence, chosen)
            self.notes.append(f"the sequence is not divided: {fault}")
        while (fault := self._fault(plan, chosen)) is not None:
            kept = [kind for kind, backend in chosen.items() if backend != "replicated"]
            if not kept:
                raise ConfigError(
                    f"A model that is divided nowhere computes something else than itself: "
                    f"{fault}. Take care that {self.stage.rehearsal.step} gives the same when it "
                    f"is called twice with one batch and one state of all random generators."
                )
            chosen[kept[-1]] = "replicated"
            self.notes.append(f"{_named(kept[-1])} stays whole, as with others it {fault}")
        return self._with(plan, chosen)

    def _backends(self, plan: TensorPlan) -> tuple[dict[str, Backend], TensorPlan]:
        """Return a backend of each kind, and the plan with the sizes that they take.

        Tried first is whether the fault is in the division of the sequence, in sizes outside of
        blocks, or in what lies outside: a model may have dozens of kinds, and each trial is a step.
        """
        everywhere: dict[str, Backend] = dict.fromkeys(self.kinds, "local")
        if len(self.kinds) > 1:
            for tried in islice(_with_sizes(plan, OUTSIDE), 2):
                if tried != self.plan and self._fault(tried, everywhere) is None:
                    return everywhere, tried
            inside: dict[str, Backend] = {**everywhere, OUTSIDE: "replicated"}
            if OUTSIDE in everywhere and self._fault(plan, inside) is None:
                return self._with_outside(plan, inside)
        chosen: dict[str, Backend] = {}
        for kind in self.kinds:
            chosen[kind], plan = self._backend_of(plan, kind)
        return chosen, plan

    def _with_outside(
        self, plan: TensorPlan, inside: dict[str, Backend]
    ) -> tuple[dict[str, Backend], TensorPlan]:
        """Add the backend of what lies outside of blocks, if it has one beside theirs."""
        backend, tried = self._backend_of(plan, OUTSIDE)
        if backend == "replicated":
            return inside, plan
        chosen = {**inside, OUTSIDE: backend}
        fault = self._fault(tried, chosen)
        if fault is None:
            return chosen, tried
        self.notes.append(f"{_named(OUTSIDE)} stays whole, as with others it {fault}")
        return inside, plan

    def _backend_of(self, plan: TensorPlan, kind: str) -> tuple[Backend, TensorPlan]:
        """Return the first backend that verifies for a kind while all others stay whole."""
        others: dict[str, Backend] = dict.fromkeys(self.kinds, "replicated")
        for backend in _BACKENDS:
            if backend == "region" and not _has_region(plan, kind):
                continue
            faults = []
            for tried in _with_sizes(plan, kind) if backend == "local" else [plan]:
                fault = self._fault(tried, {**others, kind: backend})
                if fault is None:
                    return backend, tried
                faults.append(fault)
            self.notes.append(f"{_named(kind)} is not run as {backend}: {faults[0]}")
        return "replicated", plan

    def _with(self, plan: TensorPlan, chosen: Mapping[str, Backend]) -> TensorPlan:
        return replace(plan, backends=dict(chosen), notes=(*plan.notes, *self.notes))

    # Runs.

    def _run_first(self) -> None:
        """Run one block of each kind; all blocks if that is few more, or if the step needs them.

        FTTransformer of pytorch-tabular reads the attention weights that each block keeps.
        """
        first = _Run("one block of each kind", self.stage.passed)
        if 0 < 2 * len(first.passed) < len(self.stage.blocks) and self._fits():
            with suppress(_NotRunError):
                self._run_whole(_ALL_BLOCKS)
                return
        failure: _NotRunError | None = None
        try:
            self._run_whole(first)
        except _NotRunError as error:
            if not self.stage.passed:
                raise
            failure = error.with_traceback(None)
            failure.__cause__ = None  # its frames hold what the failed run has computed
        if failure is None:
            return
        if not self._fits():
            raise failure
        self._run_whole(_ALL_BLOCKS)

    def _run_whole(self, run: _Run) -> None:
        """Run the whole model; raise its error on all ranks with the first rank's reason."""
        outcome, text = DryRunOutcome(), None
        cause: BaseException | None = None
        if self.stage.verifies:
            try:
                with self._passed(run):
                    outcome = self.rehearsal.run(has_backward=run.has_backward)
            except Exception as error:  # noqa: BLE001 - the user's step may raise anything
                text, cause = f"{type(error).__name__}: {error}", error
        text = self._first(text)
        try:
            if text is not None:
                raise _NotRunError(
                    f"{type(self.root).__name__}.{self.stage.rehearsal.step} could not be run "
                    f"before the first step, to prove the tensor plan by it: {text}"
                ) from cause
        finally:
            del cause  # in a cycle with this frame it would keep a graph, and shapes in it
        self.wholes[run] = outcome

    def _fault(self, plan: TensorPlan, backends: Mapping[str, Backend]) -> str | None:
        """Return how the plan with these backends differs from the whole model."""
        planned = replace(plan, backends=dict(backends), notes=())
        self.counted = None
        for run in self.wholes:
            fault, counted = self._outcome_of(planned, run)
            if fault is not None:
                return fault
            if run.has_backward and not run.passed and self._has_own_precision:
                self.counted = counted
        return None

    def _outcome_of(self, planned: TensorPlan, run: _Run) -> tuple[str | None, Counted]:
        """Return how a run by the plan differs, and its traffic; each plan runs once."""
        for plan, done, fault, counted in self.compared:
            if done is run and plan == planned:
                return fault, counted
        if self.group is None:
            self.group = self.stage.new_group()
        has_raised = False
        counter = CountedGroup(self.group.process_group)
        try:
            fault = self._compare(planned, run, self.group, counter)
        except Exception as error:  # noqa: BLE001 - code that needs full sizes raises anything
            fault, has_raised = f"raises {type(error).__name__}: {_one_line(error)}", True
        fault = self._first(fault)
        if fault is not None:
            # A group on which a rank has raised may have messages under way.
            self.close(is_idle=not self._first("raised" if has_raised else None))
        self.compared.append((planned, run, fault, counter.counted))
        return fault, counter.counted

    def close(self, *, is_idle: bool = True) -> None:
        """Destroy the communicator of the last trial."""
        if self.group is not None:
            destroy_group(self.group.process_group, is_idle=is_idle)
            self.group = None

    @property
    def _has_own_precision(self) -> bool:
        """Whether steps are run in the precision of the run."""
        precision = self.stage.precision
        return precision.dtype.itemsize >= torch.float32.itemsize and not precision.is_mixed

    def _compare(
        self, plan: TensorPlan, run: _Run, group: TensorGroup, counter: CountedGroup
    ) -> str | None:
        if not self.stage.verifies:
            return None
        with self._passed(run), parameters_kept(self.root):
            applied = apply_plan(self.root, plan, group)
            try:
                with group.counted_by(counter):
                    outcome = self.rehearsal.run(has_backward=run.has_backward)
            finally:
                applied.remove()
        divided = divisions_of(applied.plan, group.rank)
        fault = difference(self.wholes[run], outcome, divided, tolerance=self.tolerance)
        if fault is None:
            return None
        nudged = self._nudged(run)
        return difference(self.wholes[run], outcome, divided, nudged, tolerance=self.tolerance)

    def _nudged(self, run: _Run) -> DryRunOutcome:
        """Return the outcome of the whole model with nudged parameters."""
        if run not in self.nudged:
            with self._passed(run):
                self.nudged[run] = self.rehearsal.run_nudged(has_backward=run.has_backward)
        return self.nudged[run]

    def _passed(self, run: _Run) -> AbstractContextManager[None]:
        return blocks_passed(self.stage.blocks, run.passed)

    def _first(self, text: str | None) -> str | None:
        """Return the text of the first rank that has one. Collective over all ranks."""
        of_ranks = gather_objects(text, self.stage.world_cpu_group)
        said = [f"{each} (rank {rank})" for rank, each in enumerate(of_ranks) if each is not None]
        if not said:
            return None
        return said[0] if len(said) < len(of_ranks) else of_ranks[0]


class _NotRunError(ConfigError):
    """The step has raised an error before the first step of training."""


def _free_bytes(stage: ProofInputs) -> int:
    """Return the bytes that this rank may use: on its device, or its share of the host's memory."""
    device = stage.rehearsal.device
    if device.type == "cpu":
        return int(psutil.virtual_memory().available / stage.world_cpu_group.size())
    free, _ = torch.accelerator.get_memory_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return free + cached


def _kinds(plan: TensorPlan) -> list[str]:
    """Return the kinds of blocks with divided parameters, in the order of the plan."""
    found = [plan.kinds.get(block, block) for axis in plan.axes for block in axis.blocks_or_outside]
    return list(dict.fromkeys(found))


def _with_sizes(plan: TensorPlan, kind: str) -> Iterator[TensorPlan]:
    """Yield the plan with all integers of a kind that may be sizes, with none, and without each.

    Some equal a divided size by chance: with as many query heads per key head as there are key
    heads, code that repeats keys needs that number unchanged.
    """
    yield plan
    own = [
        each
        for each in plan.attributes
        if plan.kinds.get(block := block_of(plan, each.module), block) == kind
    ]
    names = dict.fromkeys(each.name for each in own)
    dropped = [set(names), *({name} for name in names if len(names) > 1)]
    for some in dropped if names else ():
        kept = [each for each in plan.attributes if each not in own or each.name not in some]
        yield replace(plan, attributes=tuple(kept))


def _has_region(plan: TensorPlan, kind: str) -> bool:
    return any(
        kind in {plan.kinds.get(block, block) for block in plan.axes[at].blocks_or_outside}
        for at in plan.region_axes
    )


def _named(kind: str) -> str:
    return repr(kind) if kind else "what lies outside of blocks"


def _one_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]

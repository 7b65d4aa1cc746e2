"""Phases of FSDP2's gathers and reductions, and callbacks for them.

[Note: Phases of a unit]
FSDP2 has no hooks around the gather, the reduction and the reshard of a unit (a module of
``fully_shard``). ``InstrumentedParamGroup`` replaces the class of the unit's parameter groups and
runs callbacks, those of one phase in the order in which they were added:

    gather     [skip_prefetch?] before_gather, all-gather, copy out, after_gather
    reduction  [keep_gathered?] [is_early?] before_reduction, reshard, reduce-scatter,
               after_reduction
    reshard    before_reshard, the gathered parameters are freed, after_reshard
    drop       the end of a gather whose parameters nothing used, gather_dropped

If a callback of a phase in brackets returns true, the rest of the line is skipped.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather as DefaultAllGather,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.torch_compat.autograd import (
    after_gradient,
    backward_number,
    goes_to_the_end,
    has_accumulation_hooks,
    is_given_gradient,
    share_gradient_hooks,
)
from boltmesh.strategies.torch_compat.fsdp import parameter_groups, unsharded_parameter
from boltmesh.strategies.torch_compat.tensors import local_tensor


class FilledGradients(Protocol):
    """Parameters without a gradient on this rank that a reduction includes."""

    names: Collection[str]

    @property
    def without_any(self) -> set[str]:
        """Those for which no rank has a gradient. Read once the reduction has ended."""


BeforeReduction = Callable[[list[str], list[str]], FilledGradients | None]
"""Called with the names of the parameters whose gradients are reduced, and of those that require a
gradient and have none. Returns those of the latter that are reduced too."""


@dataclass
class Phases:
    """The callbacks of one parameter group; see [Note: Phases of a unit]."""

    skip_prefetch: list[Callable[[], bool]] = field(default_factory=list)
    before_gather: list[Callable[[], None]] = field(default_factory=list)
    """Called in the gathering thread, also for prefetches; not if parameters are gathered."""
    after_gather: list[Callable[[], None]] = field(default_factory=list)
    keep_gathered: list[Callable[[], bool]] = field(default_factory=list)
    is_early: list[Callable[[], bool]] = field(default_factory=list)
    """FSDP2 then returns to the unit, at the latest at the end of the backward pass."""
    before_reduction: list[BeforeReduction] = field(default_factory=list)
    after_reduction: list[Callable[[], None]] = field(default_factory=list)
    """Called after a reduction that failed, too."""
    before_reshard: list[Callable[[], None]] = field(default_factory=list)
    after_reshard: list[Callable[[], None]] = field(default_factory=list)
    gather_dropped: list[Callable[[Tensor], None]] = field(default_factory=list)
    """Called with the local tensor of each parameter of the gather, for which the shards'
    ``fsdp_post_all_gather`` is not called."""
    wait: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context for waits of the computation's stream: for a gather, and at the end of the backward
    pass for the reduction."""


class InstrumentedParamGroup(FSDPParamGroup):
    """A parameter group with phases and callbacks."""

    phases: Phases
    has_gathered = False
    """Whether the unsharded parameters exist, perhaps without memory."""
    is_reducing = False
    """Whether gradients of the unsharded parameters are being reduced."""
    _filled: dict[Any, list[FilledGradients]]
    """Parameters that had no gradient on this rank since their shards had none, and where."""
    _is_reached = False
    """Whether the backward pass has reached the unit, so that a gather is no prefetch."""
    _is_needed_again = False
    """Whether a derivative was taken whose own derivative needs the gathered parameters."""

    @override
    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is not None or self.is_unsharded:
            return
        is_prefetch = self._training_state is TrainingState.PRE_BACKWARD and not self._is_reached
        if is_prefetch and any(skips() for skips in self.phases.skip_prefetch):
            return
        _run(self.phases.before_gather)
        super().unshard(async_op)

    @override
    def wait_for_unshard(self) -> None:
        is_pending = self._all_gather_result is not None
        # FSDP2 makes unsharded parameters once, perhaps in an evaluation. Those made within
        # ``torch.inference_mode`` could not be used by a backward pass.
        with torch.inference_mode(mode=False):
            with self.phases.wait() if is_pending else nullcontext():
                super().wait_for_unshard()
            if is_pending:
                _run(self.phases.after_gather)

    @override
    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        self._is_reached = True
        try:
            super().pre_backward(default_prefetch, *unused)
        finally:
            self._is_reached = False

    @override
    def post_backward(self, *unused: Any) -> None:
        self.is_reducing = True
        try:
            self._post_backward(*unused)
        finally:
            self.is_reducing = False

    def _post_backward(self, *unused: Any) -> None:
        if any(keeps() for keeps in self.phases.keep_gathered):
            self._training_state = TrainingState.POST_BACKWARD
            self._is_needed_again = torch.is_grad_enabled()
            return
        if any(is_early() for is_early in self.phases.is_early):
            self._training_state = TrainingState.PRE_BACKWARD
            return
        self._is_needed_again = False
        if self.reduce_grads:
            reduced, missing = self._split_by_gradient()
            for before_reduction in self.phases.before_reduction if reduced else ():
                self._fill(before_reduction(reduced, missing))
        try:
            super().post_backward(*unused)
        finally:
            _run(self.phases.after_reduction)

    @override
    def reshard(self) -> None:
        if not (self._is_needed_again and self._training_state is TrainingState.FORWARD):
            super().reshard()

    @override
    def _to_unsharded(self) -> None:
        if not self.is_unsharded:
            self._refuse_others("sharded_param")
        super()._to_unsharded()  # type: ignore[no-untyped-call]

    def _refuse_others(self, own: str) -> None:
        """Refuse parameters that replaced those of the unit, and would be lost.

        Raises:
            UnsupportedError: Naming one.
        """
        for param in self.fsdp_params:
            place = param._module_info
            if place.module._parameters.get(place.param_name) is not getattr(param, own):
                name = (param._param_fqn or place.param_name).removeprefix("module.")
                raise UnsupportedError(
                    f"{name!r} was replaced by another tensor in a step, by an assignment or by "
                    f"torch.func.functional_call, and ZeRO gathers and frees the parameter that it "
                    f"has sharded. Write to it in place, or use bolt_ddp or bolt_tensor."
                )

    @override
    def _to_sharded(self) -> None:
        if self.is_sharded:
            return
        if self.is_unsharded:
            self._refuse_others("_unsharded_param")
        _run(self.phases.before_reshard)
        super()._to_sharded()  # type: ignore[no-untyped-call]
        _run(self.phases.after_reshard)

    @override
    def finalize_backward(self) -> None:
        if self.reduce_grads and self._split_by_gradient()[0]:
            # A block that reentrant checkpoints ran again more than once: FSDP2 reduces the first.
            state = self._training_state
            self.post_backward()
            self._training_state = state
        with self.phases.wait():
            self._drop(super().finalize_backward)
        self.take_away_filled(self._filled)

    @override
    def _reset_iter_state(self) -> None:  # new in torch 2.13
        self._drop(super()._reset_iter_state)

    def _drop(self, drop: Callable[[], None]) -> None:
        is_pending = self._all_gather_result is not None
        drop()
        for param in self.fsdp_params if is_pending else ():
            for gather_dropped in self.phases.gather_dropped:
                gather_dropped(local_tensor(param.sharded_param))

    def _fill(self, filled: FilledGradients | None) -> None:
        """Give parameters that other ranks may have a gradient of a gradient of zeros."""
        for param in self.fsdp_params:
            unsharded = unsharded_parameter(param)
            if unsharded is None or not unsharded.requires_grad:
                continue
            if param.unsharded_accumulated_grad is not None or unsharded.grad is not None:
                self._filled.pop(param, None)
            elif filled is not None and (param._param_fqn or "") in filled.names:
                unsharded.grad = torch.zeros_like(unsharded)
                if param in self._filled or param.sharded_param.grad is None:
                    self._filled.setdefault(param, []).append(filled)
        if any(each.unsharded_accumulated_grad is not None for each in self.fsdp_params):
            for param in self.fsdp_params:  # gradients of one reduction have one dtype
                if param.unsharded_accumulated_grad is None and hasattr(param, "_unsharded_param"):
                    param.to_accumulated_grad_if_needed()

    def take_away_filled(self, params: Iterable[Any]) -> None:
        """Take away gradients of those of the ``FSDPParam`` for which no rank had one."""
        # With replicas, shards have a gradient from the last micro-batch on.
        filled = [param for param in params if param in self._filled]
        ended = [param for param in filled if param.sharded_param.grad is not None]
        if ended and self.device.type != "cpu":
            self.device_handle.current_stream().synchronize()  # other ranks have begun the same
        for param in ended:
            if all(
                (param._param_fqn or "") in each.without_any for each in self._filled.pop(param)
            ):
                param.sharded_param.grad = None

    def forget_filled(self) -> None:
        """Forget a step that was cut short."""
        self._filled.clear()

    def _split_by_gradient(self) -> tuple[list[str], list[str]]:
        reduced: list[str] = []
        missing: list[str] = []
        fills_up = getattr(self, "reduce_scatter_unused_params", False)
        for param in self.fsdp_params:
            unsharded = unsharded_parameter(param)
            if unsharded is None:
                continue
            has_one = param.unsharded_accumulated_grad is not None or unsharded.grad is not None
            if has_one or (fills_up and unsharded.requires_grad):
                reduced.append(param._param_fqn or "")
            elif unsharded.requires_grad:
                missing.append(param._param_fqn or "")
        return reduced, missing


def _run(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def instrument(unit: FSDPModule) -> list[InstrumentedParamGroup]:
    """Return the parameter groups of a unit, instrumented from the first call on.

    From then on hooks on the gradients of the unit's parameters run, and the unsharded parameters
    have the attributes of the shards. Views that the unit returns may be written to in place.
    """
    groups = parameter_groups(unit)
    if groups and not isinstance(groups[0], InstrumentedParamGroup):
        assert isinstance(unit, Module)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        unit.register_forward_hook(_hook_bases, with_kwargs=True)
    for group in groups:
        if not isinstance(group, InstrumentedParamGroup):
            group.__class__ = InstrumentedParamGroup
            group.phases = Phases(after_gather=[partial(_share_hooks, group)])
            group._filled = {}
    return groups


def _share_hooks(group: InstrumentedParamGroup) -> None:
    """Give unsharded parameters, which are differentiated, the attributes and hooks of the shards.

    As under ``DistributedDataParallel``, a hook gets the full gradient of this rank alone.
    """
    for param in group.fsdp_params:
        unsharded, shard = param._unsharded_param, param.sharded_param
        if not group.has_gathered:
            vars(unsharded).update(vars(shard))
        share_gradient_hooks(shard, unsharded)
    group.has_gathered = True


def _hook_bases(unit: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Gather a unit also when the backward pass reaches the bases of its outputs.

    FSDP2 hooks the outputs. A view, such as the output of ``Linear`` with a bias, has another node
    in the graph after a write in place, and the backward pass bypasses the hooked one.
    """
    outer = {id(base) for base in _bases((args, kwargs))}
    for base in {id(each): each for each in _bases(output)}.values():
        if base.grad_fn is not None and id(base) not in outer:
            base.register_hook(unit._get_fsdp_state()._pre_backward)


def _bases(value: Any) -> list[Any]:
    return [
        leaf._base
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf._base is not None
    ]


def end_every_backward(root: FSDPModule) -> None:
    """Reduce the root's gradients of a backward pass that runs through no other unit.

    FSDP2 notices a backward pass when it reaches an output of a unit. Under manual optimisation the
    root has none yet, and a loss may depend only on its own parameters, such as a temperature.
    """
    for group in instrument(root):
        group.phases.after_gather.append(partial(_watch_gradients, root, group))


def _watch_gradients(root: FSDPModule, group: InstrumentedParamGroup) -> None:
    state: Any = root._get_fsdp_state()

    def end(_: Parameter) -> None:
        state._register_root_post_backward_final_callback()

    for param in group.fsdp_params:
        unsharded: Any = param._unsharded_param
        if not has_accumulation_hooks(unsharded):
            is_trained = unsharded.requires_grad
            after_gradient(unsharded.requires_grad_(), end)
            unsharded.requires_grad_(is_trained)


def intercept_collectives(
    unit: FSDPModule,
    *,
    before_gather: Callable[[], None],
    before_reduction: BeforeReduction,
) -> None:
    """Add callbacks for each gather and each reduction of a unit; see Phases."""
    for group in instrument(unit):
        group.phases.before_gather.append(before_gather)
        group.phases.before_reduction.append(before_reduction)


def observe_waits(
    units: Iterable[FSDPModule], wait: Callable[[], AbstractContextManager[None]]
) -> None:
    """Set the context around waits of the computation for gathers and reductions."""
    for unit in units:
        for group in instrument(unit):
            group.phases.wait = wait


class EndedReduceScatter(ReduceScatter):
    """A ``ReduceScatter`` that is notified when a reduction has ended."""

    @abstractmethod
    def finish(self) -> None:
        """Called after each reduction, also after one that failed."""


def reduce_with(unit: FSDPModule, build: Callable[[int], EndedReduceScatter]) -> None:
    """Set the ``ReduceScatter`` of a unit, built for the number of ranks that share it."""
    for group in instrument(unit):
        comm = build(group._reduce_scatter_process_group.size())
        group._reduce_scatter_comm = comm
        group.phases.after_reduction.append(comm.finish)


def watch_dropped_gathers(unit: FSDPModule, dropped: Callable[[Tensor], None]) -> None:
    """Call a function with the local tensors of gathers that were not used.

    FSDP2 gathers in the reverse order of the last forward pass, and drops gathers that the backward
    pass did not reach.
    """
    for group in instrument(unit):
        if dropped not in group.phases.gather_dropped:
            group.phases.gather_dropped.append(dropped)


def skip_gathers_ahead(unit: FSDPModule, is_needless: Callable[[], bool]) -> Callable[[], None]:
    """Skip prefetches of a unit in a backward pass that will not reach it.

    FSDP2 prefetches in the reverse order of all forward passes since the last backward pass,
    including those without gradients: it cannot distinguish them from checkpointed ones.

    Args:
        unit: Module of ``fully_shard``.
        is_needless: Equal on all ranks of the unit. A unit that the backward pass reaches
            nevertheless is gathered then.

    Returns:
        A function that undoes this.
    """
    groups = instrument(unit)
    for group in groups:
        group.phases.skip_prefetch.append(is_needless)

    def undo() -> None:
        for group in groups:
            group.phases.skip_prefetch.remove(is_needless)

    return undo


def keep_for_derivatives(
    units: Sequence[FSDPModule], others: Callable[[], Iterable[Tensor]]
) -> None:
    """Keep units gathered while a backward pass is not done with them.

    A step may call ``torch.autograd.grad`` and continue: with its forward pass, or with derivatives
    of derivatives, which read the parameters again. FSDP2 takes every backward pass for the step's
    own and reshards all units at its end, also those whose forward pass is not over. It also takes
    a unit for done when one of its calls is, while gradients of another call, which autograd adds
    to the same leaves, are still to come.

    Args:
        units: Modules of ``fully_shard``, all of a model. Its own backward pass reshards them.
        others: Returns the leaves outside of units that a step may train.
    """
    groups = [group for unit in units for group in instrument(unit)]
    derivatives = _Derivatives(groups, others)
    for group in groups:
        gradients = _NewGradients(group)
        group.phases.keep_gathered.append(partial(_is_kept, derivatives, gradients))
        group.phases.is_early.append(gradients.are_to_come)
        group.phases.after_reduction.append(gradients.note)


def _is_kept(derivatives: "_Derivatives", gradients: "_NewGradients") -> bool:
    return bool(derivatives) and not gradients


class _Derivatives:
    """True in a backward pass that makes no gradients of parameters; determined once per pass."""

    def __init__(
        self, groups: Sequence[InstrumentedParamGroup], others: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._groups = groups
        self._others = others
        self._number: int | None = None
        self._is_any = False

    def __bool__(self) -> bool:
        number = backward_number()
        if number is None:
            return False
        if number != self._number:
            is_own = any(map(is_given_gradient, self._leaves())) or goes_to_the_end()
            self._number, self._is_any = number, not is_own
        return self._is_any

    def _leaves(self) -> Iterator[Tensor]:
        for group in self._groups:
            for param in group.fsdp_params:
                unsharded = unsharded_parameter(param)
                if unsharded is not None and unsharded.requires_grad:
                    yield unsharded
        yield from (leaf for leaf in self._others() if leaf.requires_grad)


class _NewGradients:
    """True if unsharded parameters of a group have gradients that were not seen by a reduction.

    Reentrant checkpoints have backward passes of their own within the step's, which itself makes no
    gradients of their parameters.
    """

    def __init__(self, group: InstrumentedParamGroup) -> None:
        self._group = group
        self._known: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return not self._present().items() <= self._known.items()

    def are_to_come(self) -> bool:
        """Whether the running backward pass will still add to the gradient of a parameter."""
        present = self._present()
        return any(
            present.get(number) == self._known.get(number) and is_given_gradient(unsharded)
            for number, unsharded in self._unsharded()
            if unsharded.requires_grad
        )

    def note(self) -> None:
        """Remember gradients that stay: all, until the last batch of an accumulation window."""
        self._known = {} if self._group.reduce_grads else self._present()

    def _present(self) -> dict[int, tuple[int, int]]:
        return {
            number: (unsharded.grad.data_ptr(), unsharded.grad._version)
            for number, unsharded in self._unsharded()
            if unsharded.grad is not None
        }

    def _unsharded(self) -> Iterator[tuple[int, Tensor]]:
        for number, param in enumerate(self._group.fsdp_params):
            unsharded = unsharded_parameter(param)
            if unsharded is not None:
                yield number, unsharded

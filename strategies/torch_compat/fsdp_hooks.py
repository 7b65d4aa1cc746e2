"""What FSDP2 is made to do at the gathers and reductions of its units."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather as DefaultAllGather,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from boltmesh.strategies.torch_compat.autograd import (
    backward_number,
    goes_to_the_end,
    is_given_gradient,
)
from boltmesh.strategies.torch_compat.fsdp import parameter_groups
from boltmesh.strategies.torch_compat.tensors import local_tensor


def intercept_collectives(
    unit: FSDPModule,
    *,
    before_gather: Callable[[], None],
    before_reduction: Callable[[list[str], list[str]], None],
) -> None:
    """Be called before each gather of a unit, early ones included, and before each reduction.

    Not once a module runs: FSDP2 gathers ahead of that, and not what is gathered already.

    Args:
        unit: Of ``fully_shard``.
        before_gather: Called in the thread that gathers.
        before_reduction: Given the names of the parameters whose gradients are reduced, and of
            those that should have one and have none.
    """
    for group in parameter_groups(unit):
        _intercept_group(group, before_gather, before_reduction)


def _intercept_group(
    group: Any,
    before_gather: Callable[[], None],
    before_reduction: Callable[[list[str], list[str]], None],
) -> None:
    unshard, post_backward = group.unshard, group.post_backward

    def gather(*args: Any, **kwargs: Any) -> Any:
        if group._all_gather_result is None and not group.is_unsharded:
            before_gather()
        return unshard(*args, **kwargs)

    def reduce(*args: Any) -> Any:
        if group.reduce_grads:
            reduced, missing = _split_by_gradient(group)
            if reduced:
                before_reduction(reduced, missing)
        return post_backward(*args)

    group.unshard, group.post_backward = gather, reduce


def reduce_with(unit: FSDPModule, build: Callable[[int], "EndedReduceScatter"]) -> None:
    """Reduce a unit's gradients by another ``ReduceScatter``, which is told of the end of each.

    Args:
        unit: Of ``fully_shard``.
        build: Given the number of ranks that share the unit, returns what reduces.
    """
    for group in parameter_groups(unit):
        comm = build(group._reduce_scatter_process_group.size())
        group._reduce_scatter_comm = comm
        group.post_backward = _ending(group.post_backward, comm.finish)


class EndedReduceScatter(ReduceScatter):
    """One that is told when a reduction has ended."""

    @abstractmethod
    def finish(self) -> None:
        """Called after each reduction, also after one that failed."""


def _ending(post_backward: Callable[..., Any], finish: Callable[[], None]) -> Callable[..., Any]:
    def reduce(*args: Any) -> Any:
        try:
            return post_backward(*args)
        finally:
            finish()

    return reduce


def keep_for_derivatives(
    units: Sequence[FSDPModule], others: Callable[[], Iterable[Tensor]]
) -> None:
    """Leave units gathered in backward passes that make no gradients of parameters.

    A step may differentiate by itself (``torch.autograd.grad``) and go on: with its forward pass,
    or to derivatives of derivatives, which read the parameters once more. FSDP2 takes every
    backward pass for the step's own, and frees all units at its end, those that run among them.

    Args:
        units: Of ``fully_shard``, all of a model. The step's own backward pass frees them.
        others: Gives the leaves that a step may train beside those of units.
    """
    groups = [group for unit in units for group in parameter_groups(unit)]
    derivatives = _Derivatives(groups, others)
    for group in groups:
        group.post_backward = _keeping(
            group, derivatives, group.post_backward, _ArrivedGradients(group)
        )


class _Derivatives:
    """Tells whether a backward pass is one of those; looked up once for each."""

    def __init__(self, groups: Sequence[Any], others: Callable[[], Iterable[Tensor]]) -> None:
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
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                if whole is not None and whole.requires_grad:
                    yield whole
        yield from (each for each in self._others() if each.requires_grad)


class _ArrivedGradients:
    """Tells whether whole parameters of a group have been given gradients that nobody took.

    Reentrant checkpoints have backward passes of their own within the step's, which then gives
    none itself to what they hold.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._known: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return not self._present().items() <= self._known.items()

    def note(self) -> None:
        """Know those that stay, as all do until the last batch of an accumulation window."""
        self._known = {} if self._group.reduce_grads else self._present()

    def _present(self) -> dict[int, tuple[int, int]]:
        wholes = [getattr(each, "_unsharded_param", None) for each in self._group.fsdp_params]
        return {
            number: (whole.grad.data_ptr(), whole.grad._version)
            for number, whole in enumerate(wholes)
            if whole is not None and whole.grad is not None
        }


def _keeping(
    group: Any,
    derivatives: _Derivatives,
    post_backward: Callable[..., Any],
    arrivals: _ArrivedGradients,
) -> Callable[..., Any]:
    def reduce(*args: Any) -> Any:
        if derivatives and not arrivals:
            group._training_state = TrainingState.POST_BACKWARD
            return None
        result = post_backward(*args)
        arrivals.note()
        return result

    return reduce


def gather_for_training(unit: FSDPModule) -> None:
    """Make whole parameters that training can use, wherever they are gathered first.

    What is made within ``torch.inference_mode`` is no good for a backward pass ever after, and
    FSDP2 makes whole parameters once.
    """
    for group in parameter_groups(unit):
        group.wait_for_unshard = torch.inference_mode(mode=False)(group.wait_for_unshard)


def watch_dropped_gathers(unit: FSDPModule, dropped: Callable[[Tensor], None]) -> None:
    """Be told of shards that were gathered early for nothing, once nobody reads them any more.

    FSDP2 gathers in the order of the last forward pass, and drops what the backward pass did not
    come to without a word to the shards' ``fsdp_post_all_gather``.

    Args:
        unit: Of ``fully_shard``.
        dropped: Given the local tensor of each parameter of the gather.
    """
    for group in parameter_groups(unit):
        for name in ("finalize_backward", "_reset_iter_state"):
            if hasattr(group, name):  # the second is new in torch 2.13
                setattr(group, name, _telling_of_drops(group, getattr(group, name), dropped))


def _telling_of_drops(
    group: Any, drop: Callable[..., Any], dropped: Callable[[Tensor], None]
) -> Callable[..., Any]:
    def drop_and_tell(*args: Any, **kwargs: Any) -> Any:
        is_pending = group._all_gather_result is not None
        result = drop(*args, **kwargs)
        if is_pending:
            for each in group.fsdp_params:
                dropped(local_tensor(each.sharded_param))
        return result

    return drop_and_tell


def skip_gathers_ahead(unit: FSDPModule, is_needless: Callable[[], bool]) -> Callable[[], None]:
    """Leave out gathers of a unit ahead of a backward pass that is not going to reach it.

    FSDP2 gathers ahead in the reverse order of all forward passes since the last backward pass,
    those without gradients among them, for it cannot tell them from checkpointed ones.

    Args:
        unit: Of ``fully_shard``.
        is_needless: The same on all ranks of the unit. A unit that is reached nevertheless is
            gathered when it is.

    Returns:
        A function that gathers ahead again.
    """
    restores = [_skip_group_ahead(group, is_needless) for group in parameter_groups(unit)]

    def restore() -> None:
        for each in restores:
            each()

    return restore


def _skip_group_ahead(group: Any, is_needless: Callable[[], bool]) -> Callable[[], None]:
    unshard, pre_backward = group.unshard, group.pre_backward
    is_reached = False

    def gather(*args: Any, **kwargs: Any) -> Any:
        is_ahead = group._training_state is TrainingState.PRE_BACKWARD and not is_reached
        return None if is_ahead and is_needless() else unshard(*args, **kwargs)

    def reach(*args: Any) -> Any:
        nonlocal is_reached
        is_reached = True
        try:
            return pre_backward(*args)
        finally:
            is_reached = False

    def restore() -> None:
        for name, ours, theirs in (
            ("unshard", gather, unshard),
            ("pre_backward", reach, pre_backward),
        ):
            if getattr(group, name) is ours:  # else somebody has wrapped it
                setattr(group, name, theirs)

    group.unshard, group.pre_backward = gather, reach
    return restore


def _split_by_gradient(group: Any) -> tuple[list[str], list[str]]:
    reduced: list[str] = []
    missing: list[str] = []
    fills_up = getattr(group, "reduce_scatter_unused_params", False)
    for each in group.fsdp_params:
        whole = getattr(each, "_unsharded_param", None)
        if whole is None:
            continue
        has_one = each.unsharded_accumulated_grad is not None or whole.grad is not None
        if has_one or (fills_up and whole.requires_grad):
            reduced.append(each._param_fqn)
        elif whole.requires_grad:
            missing.append(each._param_fqn)
    return reduced, missing

"""The private names of torch that the strategies need, each with why, in one place."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter as DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn import Module, MultiheadAttention, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from torch.utils.hooks import RemovableHandle
from typing_extensions import override


def skip_indices(iterator: Any, count: int) -> bool:
    """Move a single-process iterator over a map-style dataset forward without loading anything.

    Returns:
        False when this iterator cannot be moved that way and its batches have to be loaded.
    """
    if not isinstance(iterator, _SingleProcessDataLoaderIter):
        return False
    if isinstance(iterator._dataset, IterableDataset):
        return False
    for _ in range(count):
        iterator._next_index()  # type: ignore[no-untyped-call]
    iterator._num_yielded += count
    return True


class Replica(DistributedDataParallel):
    """DDP on a group of its own that can be copied all the same.

    DDP refuses to be pickled or deep-copied with any but the default group, because a copy gets
    the default group. Where the group holds all ranks, that is the same.
    """

    @override
    def _check_default_group(self) -> None:
        if dist.get_world_size(self.process_group) != dist.get_world_size():
            super()._check_default_group()  # type: ignore[no-untyped-call]


def flush_static_graph(module: DistributedDataParallel) -> None:
    """Launch the all-reduces that DDP postpones in the first iteration of a static graph.

    DDP queues this flush on the autograd engine in its forward pass. Under manual optimisation
    gradients are prepared outside of that forward pass, so nobody would launch them.
    """
    module.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def device_index(device: torch.device) -> list[int] | None:
    """What DDP and ``barrier`` call ``device_ids``: an accelerator's index, None on the CPU."""
    return None if device.type == "cpu" or device.index is None else [device.index]


disabled_torch_function = torch._C._disabled_torch_function_impl
"""For a tensor subclass that wants to be asked at dispatch only, below autograd."""


def make_subclass(kind: type[Tensor], tensor: Tensor) -> Any:
    """``tensor`` under another class: a new object over the same storage.

    FSDP2 compares the addresses of storages, which wrapper subclasses do not have.
    """
    return Tensor._make_subclass(kind, tensor)


def make_wrapper(kind: type[Tensor], local: Tensor, shape: Sequence[int]) -> Any:
    """A tensor of a class and shape, of the type and on the device of another, without storage."""
    return Tensor._make_wrapper_subclass(
        kind, torch.Size(shape), dtype=local.dtype, device=local.device
    )


def subclasses_unasked() -> AbstractContextManager[None]:
    """Within it, calls on a tensor subclass go on to autograd, not to its rules for functions."""
    return torch._C.DisableTorchFunctionSubclass()


def written_or_viewed(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """Give the arguments that an operator writes to, with True, or returns views of, with False."""
    schema = func._schema.arguments
    given = [(schema[i], value) for i, value in enumerate(args)]
    given += [(each, kwargs[each.name]) for each in schema if each.name in kwargs]
    for argument, value in given:
        if argument.alias_info is not None:
            yield value, argument.alias_info.is_write


def fused_adam(*, is_decoupled: bool) -> Any:
    """Torch's fused Adam kernel; public is only the optimizer around it."""
    return torch._fused_adamw_ if is_decoupled else torch._fused_adam_


def storage_info(file_name: str, offset: int, length: int) -> Any:
    """Where a piece of a sharded checkpoint lies, as torch's own reader wants to be told."""
    return _StorageInfo(file_name, offset, length)


BROADCAST_BUCKET_BYTES = 250 << 20
"""How much is flattened for one broadcast, as ``DistributedDataParallel`` does."""


def broadcast_coalesced(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank of a group the values of its first one, in few messages. Collective."""
    dist._broadcast_coalesced(group, tensors, BROADCAST_BUCKET_BYTES, 0)  # type: ignore[attr-defined]


def times_written(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody waits for the gradient of a leaf."""
    return bool(tensor._backward_hooks) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and type in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    return _groups_of_state(unit._get_fsdp_state())


def _groups_of_state(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # a list from torch 2.13 on
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def is_gathered(unit: FSDPModule) -> bool:
    """Whether a unit's whole parameters are there, so that its next forward gathers nothing."""
    return all(group.is_unsharded for group in _parameter_groups(unit))


def unit_parameters(unit: FSDPModule) -> list[tuple[Parameter, Parameter | None]]:
    """Return a unit's sharded parameters, each with its whole one where that exists."""
    return [
        (each.sharded_param, getattr(each, "_unsharded_param", None))
        for group in _parameter_groups(unit)
        for each in group.fsdp_params
    ]


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
    for group in _parameter_groups(unit):
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


def reduce_with(
    unit: FSDPModule, build: Callable[[int], tuple[Any, Callable[[], None]]]
) -> Callable[[], None]:
    """Reduce a unit's gradients by another ``ReduceScatter`` where FSDP2's default does it.

    Args:
        unit: Of ``fully_shard``.
        build: Given the number of ranks that share the unit, returns what reduces, and a function
            that is called after each reduction, also after one that failed.

    Returns:
        A function that puts the default back.
    """
    restores = [
        _reduce_group_with(group, build)
        for group in _parameter_groups(unit)
        if type(getattr(group, "_reduce_scatter_comm", None)) is DefaultReduceScatter
    ]

    def restore() -> None:
        for each in restores:
            each()

    return restore


def _reduce_group_with(
    group: Any, build: Callable[[int], tuple[Any, Callable[[], None]]]
) -> Callable[[], None]:
    default, post_backward = group._reduce_scatter_comm, group.post_backward
    comm, finish = build(group._reduce_scatter_process_group.size())

    def reduce(*args: Any) -> Any:
        try:
            return post_backward(*args)
        finally:
            finish()

    def restore() -> None:
        group._reduce_scatter_comm = default
        if group.post_backward is reduce:  # else somebody has wrapped it, and it does no harm
            group.post_backward = post_backward

    group._reduce_scatter_comm, group.post_backward = comm, reduce
    return restore


def watch_dropped_gathers(unit: FSDPModule, dropped: Callable[[Tensor], None]) -> None:
    """Be told of shards that were gathered early for nothing, once nobody reads them any more.

    FSDP2 gathers in the order of the last forward pass, and drops what the backward pass did not
    come to without a word to the shards' ``fsdp_post_all_gather``.

    Args:
        unit: Of ``fully_shard``.
        dropped: Given the local tensor of each parameter of the gather.
    """
    for group in _parameter_groups(unit):
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
    restores = [_skip_group_ahead(group, is_needless) for group in _parameter_groups(unit)]

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


def shared_store(prefix: str) -> Store | None:
    """Return the store by which all ranks have met; None where there is no process group.

    To be asked for each time: a store that is kept keeps its server's port.
    """
    if not dist.is_initialized():
        return None
    return PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def whole_gradients(unit: FSDPModule) -> list[Tensor]:
    """Return the gradients of a unit that no rank has reduced yet."""
    parameters = [each for group in _parameter_groups(unit) for each in group.fsdp_params]
    found = [getattr(each, "unsharded_accumulated_grad", None) for each in parameters]
    found += [getattr(getattr(each, "_unsharded_param", None), "grad", None) for each in parameters]
    return [each for each in found if each is not None]


def forget_step(root: FSDPModule) -> None:
    """Let the next step begin as the first did, whatever an error has left of one.

    FSDP2 otherwise takes the end of its next backward pass for announced, and a unit whose inputs
    need no gradients, as the first, is not reduced ever after. Its own remedy leaves gradients that
    were whole, and is new in torch 2.13.

    Args:
        root: The unit that holds the others.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:
        return  # no step has begun
    has_remedy = hasattr(root, "reset_iter_state")
    if has_remedy:
        root.reset_iter_state()
    else:
        state._comm_ctx.post_forward_order.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
    for each in state._state_ctx.all_states:
        for group in _groups_of_state(each):
            if not has_remedy:
                group.finalize_backward()
                group._training_state = TrainingState.IDLE
                group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
        if not has_remedy:
            each._training_state = TrainingState.IDLE


class StepUnits:
    """Units as every step wants something of them: what FSDP2 keeps of them is looked up once.

    Args:
        units: Of ``fully_shard``.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._groups = [(unit, group) for unit in units for group in _parameter_groups(unit)]

    def reshard(self) -> None:
        """Free what is gathered."""
        for unit, group in self._groups:
            if not group.is_sharded:
                unit.reshard()

    def follow_shards(self) -> None:
        """Make what is gathered require gradients where its shards do.

        FSDP2 looks once, before the first forward pass, which parameters get gradients. A unit that
        is wholly frozen then has no types to reduce in, and would not cast its gradients if it was
        trained later: it is made to look again.
        """
        for _, group in self._groups:
            if getattr(group, "_orig_dtype", torch.float32) is None:  # unset until it has looked
                group._init_mp_dtypes()
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                is_trained = each.sharded_param.requires_grad
                if whole is not None and whole.requires_grad != is_trained:
                    whole.requires_grad_(is_trained)


def buffers_of(module: Module) -> list[Tensor]:
    """Return ``module.buffers()`` in an order of its own, the same for models that are alike.

    In half the time, for it is asked in every step: 0.14 ms a step for a model of 360 modules.
    """
    modules = {module: None}
    buffers: dict[Tensor, None] = {}
    pending = [module]
    while pending:
        each = pending.pop()
        if each._buffers:
            buffers.update((one, None) for one in each._buffers.values() if one is not None)
        for child in each._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                pending.append(child)
    return list(buffers)


def step_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's ``step`` beneath the wrapper that runs step hooks."""
    step: Any = type(optimizer).step
    beneath: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
    return beneath if getattr(step, "hooked", False) else step


DispatchMode = TorchDispatchMode
"""What sees every operator that runs while it is entered."""


def storage_key(tensor: Tensor) -> int:
    """Return what tell storages apart that have no address, as those of fake tensors."""
    return int(tensor.untyped_storage()._cdata)


CAST = torch.ops.aten._to_copy.default
"""The operator behind ``Tensor.to``, and so behind autocast."""

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The CPU's fused attention, which torch's own ``FlopCounterMode`` does not count."""

GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""Rows of several experts, each times the matrix of its own."""


COSTLY_OPERATORS: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
    )
    if hasattr(torch.ops.aten, name)
)  # fmt: skip
"""Operators that are worth their outputs' memory: everything else is quickly done again."""


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which tensors have shape and type and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor with shape and type and no data."""
    return isinstance(value, FakeTensor)


def make_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a tensor without data of the same shape, type, device and class."""
    return mode.from_tensor(tensor)


def functions_unwatched() -> AbstractContextManager[None]:
    """Within it, no mode sees calls of torch's functions."""
    return torch._C.DisableTorchFunction()


def swapped_state(module: Module, tensors: dict[str, Tensor]) -> AbstractContextManager[Any]:
    """Within it, a module has other parameters and buffers, by dotted name; ties are kept."""
    return _reparametrize_module(module, tensors, tie_weights=True)


NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""What a tensor without data raises when it is asked for some."""


def open_one_level(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return the children of a value that pytree can open, and what closes it; None for a leaf."""
    children, spec = tree_flatten(value, is_leaf=lambda each: each is not value)
    if len(children) == 1 and children[0] is value:
        return None
    return children, lambda parts: tree_unflatten(list(parts), spec)


@dataclass(frozen=True)
class UnitShard:
    """One parameter of a unit, as FSDP2 keeps this rank's shard of it."""

    parameter: Parameter
    compute_dtype: torch.dtype
    """What it is gathered in."""
    padded_shape: tuple[int, ...]
    """The shape of the largest shard: what every rank puts into an all-gather."""
    _fsdp_parameter: Any

    def replace(self, local: Tensor, flat: Tensor) -> None:
        """Give FSDP2 another shard, and free its own.

        Args:
            local: The new local tensor of the parameter.
            flat: A plain flat tensor over the same storage. FSDP2 takes equal addresses of both
                storages to mean that the shard is padded as it is.
        """
        each = self._fsdp_parameter
        each.sharded_param._local_tensor = local
        each._sharded_param_data = flat
        each._init_extensions()


def unit_shards(unit: FSDPModule) -> list[UnitShard]:
    """Return the shards of a unit, in the order in which FSDP2 reduces their gradients."""
    return [
        UnitShard(
            parameter=each.sharded_param,
            compute_dtype=group.mp_policy.param_dtype or each.sharded_param.dtype,
            padded_shape=tuple(each.padded_sharded_param_size),
            _fsdp_parameter=each,
        )
        for group in _parameter_groups(unit)
        for each in group.fsdp_params
    ]


def set_local_tensor(parameter: Tensor, local: Tensor) -> None:
    """Put another local tensor of the same shape under a DTensor."""
    parameter._local_tensor = local  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor itself, where ``to_local`` makes a view; others as they are.

    Autograd does not see it.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def set_parameter(module: Module, name: str, value: Tensor) -> None:
    """Put a tensor where a module's parameter is, also one that autograd has made."""
    module._parameters[name] = value  # type: ignore[assignment]


def dtensor_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a DTensor with the layout of ``parameter`` and another local tensor."""
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def schema_of(operator: OpOverload) -> Any:
    """What an operator takes and gives, and what of that it changes."""
    return operator._schema


def unit_parameter_names(unit: FSDPModule) -> list[str]:
    """Return the names of a unit's parameters within the whole model, once that has run."""
    parameters = [each for group in _parameter_groups(unit) for each in group.fsdp_params]
    return [each._param_fqn or "" for each in parameters]


def stop_scaling_in_step(optimizer: Optimizer) -> Callable[[], None]:
    """Make a gradient scaler unscale the gradients of a fused optimizer before its step.

    Returns:
        A function that puts things back.
    """
    marked = vars(optimizer).pop("_step_supports_amp_scaling", None)

    def restore() -> None:
        if marked is not None:
            optimizer._step_supports_amp_scaling = marked  # type: ignore[attr-defined]

    return restore


def agree_on_overflow(
    scaler: torch.amp.GradScaler, group: dist.ProcessGroup, device: torch.device | None = None
) -> Callable[[], None]:
    """Make a gradient scaler skip a step on all ranks of a group when one of them has to.

    DTensor decides by the first gradient alone whether ranks have to agree; where that is of a
    replicated parameter, they would not.

    Args:
        scaler: Of this rank.
        group: The ranks that step together.
        device: Of the gradients; with it a rank takes part that has none, which a scaler would
            otherwise refuse to step.

    Returns:
        A function that puts things back.
    """
    unscale: Any = scaler._unscale_grads_

    def unscale_and_agree(*args: Any, **kwargs: Any) -> Any:
        found: dict[torch.device, Tensor] = unscale(*args, **kwargs)
        if device is not None:
            found.setdefault(device, torch.zeros((), device=device))
        for each in found.values():
            dist.all_reduce(each, dist.ReduceOp.MAX, group=group)
        return found

    vars(scaler)["_unscale_grads_"] = unscale_and_agree

    def restore() -> None:
        vars(scaler).pop("_unscale_grads_", None)

    return restore


TOTAL_NORM: Callable[..., Tensor] = torch.nn.utils.clip_grad._get_total_norm
"""What ``torch.nn.utils.clip_grad_norm_`` clips by, of the gradients that it is given."""


@contextmanager
def total_norm_replaced(total_norm: Callable[..., Tensor]) -> Iterator[None]:
    """Within, ``torch.nn.utils.clip_grad_norm_`` clips by another norm, whoever has imported it."""
    clip_grad: Any = torch.nn.utils.clip_grad
    before = clip_grad._get_total_norm
    clip_grad._get_total_norm = total_norm
    try:
        yield
    finally:
        clip_grad._get_total_norm = before


def after_gradient(parameter: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Call ``hook`` when the gradient of a parameter is complete; torch has no types for it."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def is_in_backward() -> bool:
    """Whether this thread is within a backward pass, as layers are that are computed again."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Keep ``torch.compile`` out of a function, without loading the compiler to say so."""
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return cast("_Function", wrapped)


@dataclass
class _ScheduledStage:
    """What torch's schedules ask of a stage to work an order out; it holds no module."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] | None = None


def torch_schedule_order(
    class_name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> tuple[tuple[str | None, ...], ...]:
    """The order of one of torch's schedules of several stages a rank, in torch's own words.

    torch works it out when a schedule is built, on stages that exist. Communication is added there
    too, which is left out here: :func:`torch_send_recv` does that when it is asked for.
    """
    from torch.distributed.pipelining import schedules

    made: Any = type(
        class_name,
        (getattr(schedules, class_name),),
        {"_prepare_schedule_with_comms": lambda *_, **__: None},
    )
    num_stages = num_ranks * stages_per_rank
    stages = [_ScheduledStage(num_stages, num_ranks) for _ in range(stages_per_rank)]
    rows = made(stages, num_microbatches).pipeline_order
    return tuple(
        tuple(None if action is None else str(action) for action in rows[rank])
        for rank in range(num_ranks)
    )


def torch_send_recv(
    order: Sequence[Sequence[str | None]], rank_of_stage: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """``order`` with sends and receives where torch places them.

    The parts of an overlapped pair are placed one after the other, which is how torch runs them
    too unless a function for pairs is registered; so a forward is sent on before its pair's
    backward runs.
    """
    from torch.distributed.pipelining import schedules

    rows: dict[int, list[Any]] = {rank: [] for rank in range(len(order))}
    for rank, row in enumerate(order):
        for text in row:
            if text is not None:
                action: Any = schedules._Action.from_str(text)
                rows[rank] += action.sub_actions or (action,)
    placed = schedules._add_send_recv(
        rows,
        stage_to_rank=lambda stage: rank_of_stage[stage],
        num_stages=len(rank_of_stage),
    )
    return tuple(tuple(map(str, placed[rank])) for rank in sorted(placed))


def refuse_fused_attention(
    module: MultiheadAttention, set_attribute: Callable[[Module, str, object], None]
) -> None:
    """Keep ``TransformerEncoder`` from reading a ``MultiheadAttention``'s weights itself.

    In evaluation it hands them to one kernel, or makes nested tensors for it, unless the projection
    is one of three inputs of different widths. Attention's own forward reads that flag too.
    """
    set_attribute(module, "_qkv_same_embed_dim", False)

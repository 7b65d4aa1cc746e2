"""Private parts of tensors: DTensors, fake tensors, subclasses, pytrees, operators.

``FakePackedSequences`` packs and pads sequences by operators that also run on fake tensors. Torch's
own two operators write into memory, and have no version for them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,
)
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from boltmesh.errors import ConfigError

tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only


def fake_tensors() -> FakeTensorMode:
    """Return a mode whose tensors have shape and dtype, but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_ref(tensor: Tensor) -> Any:
    """Return a weak reference to a tensor's storage; equal for equal storages."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor: with shape and dtype, but without data."""
    return isinstance(value, FakeTensor)


_PLAIN = frozenset({Tensor, Parameter})


def make_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor of the same shape, dtype, device and class."""
    if type(tensor) not in _PLAIN:
        return mode.from_tensor(tensor)
    with functions_unwatched():  # torch reads some twenty attributes
        return mode.from_tensor(tensor)


def contiguous_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a contiguous fake tensor or parameter of the same shape, dtype and device."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    made = FakeTensor(mode, values, tensor.device)
    if isinstance(tensor, Parameter):
        made._is_param = True
        made.requires_grad_(tensor.requires_grad)
    return made


NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by operators that need the data of a fake tensor."""


disabled_torch_function = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a tensor subclass that only handles dispatch, below autograd."""


def make_subclass(kind: type[Tensor], tensor: Tensor) -> Any:
    """Return ``tensor`` as another class: a new object over the same storage.

    FSDP2 compares the addresses of storages, which wrapper subclasses do not have.
    """
    return Tensor._make_subclass(kind, tensor)


def make_wrapper(kind: type[Tensor], local: Tensor, shape: Sequence[int]) -> Any:
    """Return a storage-less tensor of a class and shape, with ``local``'s dtype and device."""
    return Tensor._make_wrapper_subclass(
        kind, torch.Size(shape), dtype=local.dtype, device=local.device
    )


def subclasses_unasked() -> AbstractContextManager[None]:
    """Context in which calls on tensor subclasses bypass their ``__torch_function__``."""
    return torch._C.DisableTorchFunctionSubclass()


def subclasses_asked() -> AbstractContextManager[None]:
    """Context in which they reach it again, also inside ``subclasses_unasked``."""
    return torch._C._EnableTorchFunction()


def times_written(tensor: Tensor) -> int:
    """Return how often a tensor was modified in place; 0 for one of ``torch.inference_mode``."""
    if is_compiling():
        counted: int = _of_traced(tensor).shape[0]
        return counted
    return 0 if tensor.is_inference() else tensor._version


@torch.library.custom_op("boltmesh::times_written", mutates_args=())
def _of_traced(tensor: Tensor) -> Tensor:
    """Return an empty tensor whose size is the number of writes.

    A size is known when code is traced, and ``_version`` is not, which would break the graph.
    """
    return tensor.new_empty(tensor._version)


@_of_traced.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor._version)


def count_write(tensor: Tensor) -> None:
    """Increment a tensor's version."""
    torch.autograd.graph.increment_version(tensor)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, also of one of ``torch.func``."""
    return under_transforms(tensor).untyped_storage()


def storage_key(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, also if it has no address, as those of fake tensors."""
    return int(storage_of(tensor)._cdata)


def is_composite(tensor: Tensor) -> bool:
    """Whether a tensor of this rank consists of others, as torchao's quantized weights do."""
    return hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, DTensor)


def components_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of which a tensor consists: itself, if it is plain."""
    if not is_composite(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [plain for name in names for plain in components_of(getattr(tensor, name))]


def as_no_view(view: Tensor) -> Tensor:
    """Return the memory of a view without other users as a tensor that is not a view."""
    made: Tensor = torch.ops.aten._unsafe_view(view, view.shape)
    return made


def under_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor below the wrappers of ``torch.vmap`` and other torch.func transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def set_local_tensor(parameter: Tensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor by one of the same shape."""
    parameter._local_tensor = local  # type: ignore[attr-defined]


def check_number_reads(check: Callable[[DTensor], None]) -> None:
    """Call a check before a DTensor is read as a Python number, by ``item()`` or ``float()``.

    torch itself returns the number of this rank's local tensor, whatever the placements are.
    """

    def read(op_call: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        (tensor,) = args
        assert isinstance(tensor, DTensor)
        check(tensor)
        return op_call(tensor._local_tensor)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = read


def check_writes_to_copies(names: Iterable[str], check: Callable[[], None]) -> None:
    """Call a check before a write to a view of a DTensor with other memory than its base.

    torch gathers such a view along a divided dim, and what is written to it is lost.
    """
    for name in names:
        setattr(DTensor, name, _checked(getattr(Tensor, name), check))


def _checked(write: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    sets_item = write.__name__ == "__setitem__"

    @wraps(write)
    def checked(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        view = tensor[args[0]] if sets_item else tensor
        base = view._base
        if isinstance(base, DTensor):
            memory, base_memory = (storage_key(local_tensor(each)) for each in (view, base))
            if memory != base_memory:
                check()
        return write(tensor, *args, **kwargs)

    return checked


def compare_over_meshes() -> None:
    """Let ``torch.equal`` compare DTensors of different meshes, such as experts and others.

    torch itself refuses to. Callbacks that unfreeze layers compare parameters with an optimizer's.
    """

    def equal(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        one, other = args
        if one.shape != other.shape:
            return False
        if _spec_of(one) != _spec_of(other):
            return op_call(*(each.full_tensor() if _spec_of(each) else each for each in args))
        is_same = op_call(one._local_tensor, other._local_tensor)
        agreement = torch.tensor(int(is_same), device=one.device_mesh.device_type)
        dist.all_reduce(agreement, dist.ReduceOp.MIN)  # over all ranks, as torch does
        return bool(agreement)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = equal


def _spec_of(tensor: Tensor) -> tuple[object, ...] | None:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def is_equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor equals another one rounded to its dtype; NaN equals NaN. Same shapes."""
    return torch.allclose(tensor, other.to(tensor.dtype), rtol=0.0, atol=0.0, equal_nan=True)


_data_uses = 0
_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By DTensor, a weak method that returns the tensor whose ``.data`` is the DTensor's."""


def offer_whole(parameter: Tensor, whole: Callable[[Tensor], Tensor | None]) -> None:
    """Let ``.data`` of a DTensor be that of the tensor that a method returns, unless it is None."""
    _whole[parameter] = WeakMethod(whole)


def _whole_of(tensor: DTensor) -> Tensor | None:
    find = _whole[tensor]() if tensor in _whole else None
    return None if find is None else find(tensor)


def times_data_was_used() -> int:
    """Return how often ``.data`` of a DTensor was read or set since ``write_through_data``."""
    return _data_uses


def write_through_data() -> None:
    """Make ``parameter.data = tensor`` write to the shard if the parameter is a DTensor.

    torch replaces the storage of the DTensor's outer tensor, which has none, and leaves the local
    tensor unchanged, without an error.
    """
    DTensor.data = property(_get_data, _set_data)  # type: ignore[assignment]


def _get_data(tensor: DTensor) -> Tensor:
    global _data_uses  # noqa: PLW0603
    _data_uses += 1
    whole = _whole_of(tensor)
    if whole is not None:
        return whole.data
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]


@torch.no_grad()
def _set_data(tensor: DTensor, value: Tensor) -> None:
    global _data_uses  # noqa: PLW0603
    _data_uses += 1
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ConfigError(
            f".data of a sharded parameter of the shape {tuple(tensor.shape)} in {tensor.dtype} "
            f"was set to a tensor of the shape {tuple(value.shape)} in {value.dtype}. Set it to "
            f"one of the same shape and type."
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    if not isinstance(value, DTensor):
        whole = _whole_of(tensor)
        if whole is not None:
            whole.data = value
            return
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    elif value.placements != placements:
        value = value.redistribute(mesh, placements)
    local_tensor(tensor).copy_(local_tensor(value))
    torch.autograd.graph.increment_version(tensor)


def event_on_stream(device: torch.device) -> torch.Event | None:
    """Return an event that passes when the work submitted so far to the current stream is done.

    None on the CPU, where it is done already.
    """
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def scalar_on(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a 0-dim fp64 tensor on a device without waiting for the device.

    A kernel fills in a number: a copy of it would wait for all queued work.
    """
    if isinstance(value, Tensor) and (device.type == "cpu" or value.device.type != "cpu"):
        return value.to(device, torch.float64).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor itself, where ``to_local`` makes a view; others unchanged.

    Without autograd.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def dtensor_like(local: Tensor, parameter: Tensor) -> DTensor:
    """Return a DTensor with the shape and layout of ``parameter``, and local tensor ``local``."""
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def open_one_level(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return the children of a value that pytree can open, and its inverse; None for a leaf."""
    # torch's function refers to itself, and what it is given lives until Python collects garbage.
    outer = [value]
    children, spec = tree_flatten(value, is_leaf=lambda node: node is not outer[0])
    outer.clear()
    if len(children) == 1 and children[0] is value:
        return None
    return children, partial(tree_unflatten, treespec=spec)


def written_or_viewed(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """Yield the arguments that an operator writes to, with True, or views, with False."""
    schema = func._schema.arguments
    given = [(schema[i], value) for i, value in enumerate(args)]
    given += [(arg, kwargs[arg.name]) for arg in schema if arg.name in kwargs]
    for argument, value in given:
        if argument.alias_info is not None:
            yield value, argument.alias_info.is_write


DispatchMode = TorchDispatchMode
"""A mode that handles every operator that runs while it is entered."""


class OperatorsSeen(DispatchMode):  # type: ignore[no-untyped-call]
    """Records whether one of some operators ran."""

    def __init__(self, is_one: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_one = is_one
        self.is_any = False

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.is_any = self.is_any or self._is_one(func)
        result: Tensor = func(*args, **(kwargs or {}))
        return result


CAST = torch.ops.aten._to_copy.default
"""The operator behind ``Tensor.to``, and so behind autocast."""


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The CPU's fused attention, which torch's own ``FlopCounterMode`` does not count."""

CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""Multiplies each row by the matrix of its expert."""


COSTLY_OPERATORS: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
    )
    if hasattr(torch.ops.aten, name)
)  # fmt: skip
"""Operators whose outputs are worth storing: all others are cheap to recompute."""


def is_watched() -> bool:
    """Whether a mode intercepts the functions or operators that this thread calls."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def functions_unwatched() -> AbstractContextManager[None]:
    """Context in which no mode intercepts torch functions."""
    return torch._C.DisableTorchFunction()


def schema_of(operator: OpOverload) -> Any:
    """Return an operator's arguments and results, and which of them it modifies."""
    return operator._schema


class FakePackedSequences(TorchFunctionMode):
    """Mode in which fake tensors can be packed and padded, given lengths with data."""

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        run = _BY_NAME.get(getattr(func, "__name__", ""))
        if run is None or kwargs or not is_fake(args[0]) or is_fake(args[1]):
            return func(*args, **(kwargs or {}))
        return run(*args)


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the rows of all steps, step by step, and the number of rows of each step.

    Args:
        padded: ``(steps, rows, ...)``, or ``(rows, steps, ...)`` with ``batch_first``.
        lengths: Lengths of the rows, ``(rows,)``, in decreasing order.
        batch_first: See ``padded``.
    """
    steps = padded.transpose(0, 1) if batch_first else padded
    longest = lengths.tolist()
    sizes = [sum(length > step for length in longest) for step in range(longest[0])]
    return torch.cat([steps[step, :size] for step, size in enumerate(sizes)]), torch.tensor(sizes)


def _pad(
    packed: Tensor, sizes: Tensor, batch_first: bool, value: float, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Return the padded sequences and their lengths: the inverse of ``_pack``."""
    of_steps = sizes.tolist()
    rows = of_steps[0]
    parts = [
        functional.pad(part, (*[0, 0] * (packed.dim() - 1), 0, rows - len(part)), value=value)
        for part in torch.split(packed, of_steps)
    ]
    missing = num_steps - len(parts)
    parts += [torch.full_like(parts[0], value)] * max(missing, 0)
    padded = torch.stack(parts)
    lengths = torch.tensor([sum(size > row for size in of_steps) for row in range(rows)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


_BY_NAME: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
}


def with_fitting_sizes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a split of a tensor without data, with sizes that add up.

    Experts of JetMoe split rows by how many each of them gets. That is read from a tensor without
    data, so the sizes are guesses; as many equal ones take their place.

    Args:
        name: Name of the function; only of splits the arguments change.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    given = dict(zip(("tensor", "sizes", "dim"), args, strict=False)) | kwargs
    sizes = next((given[key] for key in _SIZES if isinstance(given.get(key), list | tuple)), None)
    tensor = given.get("tensor")
    if name not in _SPLITS or sizes is None or not isinstance(tensor, Tensor):
        return args, kwargs
    total = tensor.shape[given.get("dim", 0)]
    if not is_fake(tensor) or sum(sizes) == total:
        return args, kwargs
    count = len(sizes)
    even = [total // count + (number < total % count) for number in range(count)]
    return (tensor, even), {"dim": given.get("dim", 0)}


_SPLITS = frozenset({"split", "split_with_sizes"})
_SIZES = "sizes", "split_size_or_sections", "split_sizes", "split_size"

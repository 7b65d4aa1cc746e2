"""A tensor of one element that represents a shard stored elsewhere.

It has the shape, dtype and device of the shard, so DTensor, FSDP2 and optimizers accept it, and no
storage of its own. FSDP2 gathers it through its all-gather extension. Other operators read the
actual value and write to it in place; operators that return a view of it are refused.

A ``ShardSource`` provides the value. Those of the engine, ``StateSource`` and ``ParameterSource``,
are a range of a bucket in its chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.store_api import ParameterStore
from boltmesh.strategies.torch_compat.tensors import (
    disabled_torch_function,
    make_subclass,
    tree_map,
    written_or_viewed,
)

aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default}
"""Views of the whole shard: they represent the same value."""

_RESHAPES = {aten.view.default, aten.reshape.default}

_LIKE_STRIDED = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}
_LIKE = {
    *_LIKE_STRIDED,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
}
"""Operators that use only the shape."""


class ShardSource(ABC):
    """Provides the value of one shard."""

    name: str
    """Name in messages: the parameter's, or ``"exp_avg of <parameter>"`` for optimizer state."""
    position: int = 0
    """Sort key: shards of one position are stored together, those of adjacent ones nearby."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the value on the CPU in the shard's shape, after all pending steps.

        The result may be the stored value itself, which the next step changes.
        """

    @abstractmethod
    def write(self, value: Tensor) -> None:
        """Replace the value. ``value`` has the shard's shape, any device and float dtype."""


class GatheredSource(ShardSource):
    """Provides a parameter's shard, also in the dtype that it is computed in."""

    @abstractmethod
    def fetch(self) -> Tensor:
        """Return the shard for an all-gather: on the compute device, in the padded shape."""

    @abstractmethod
    def release(self) -> None:
        """End the use of a ``fetch``: the work that reads it has been submitted."""

    def fetch_part(self, start: int, stop: int) -> Tensor:
        """Return a copy ``(stop - start,)`` of elements of the flat padded shard, on the device."""
        part = self.fetch().view(-1)[start:stop].clone()
        self.release()
        return part


class OffloadedShard(Tensor):
    """The shard of a parameter, or of its optimizer state, stored by a ``ShardSource``."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    source: ShardSource
    """Provides the value."""
    element: Tensor
    """The underlying tensor of one element: FSDP2 sees the same storage in each alias."""

    @staticmethod
    def of(
        source: ShardSource, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> "OffloadedShard":
        """Build a shard of this shape, without storage, that reads from ``source``."""
        element = torch.zeros((), dtype=dtype, device=device)
        return _stand_for(source, element.expand(tuple(shape)))

    def shell(self, numel: int) -> Tensor:
        """Return a plain tensor over the same storage, shape ``(numel,)``."""
        return self.element.as_strided((numel,), (0,), 0)

    @property
    def position(self) -> int:
        """Storage order: reading shards sorted by it reads each chunk once."""
        return self.source.position

    def read(self) -> Tensor:
        """Return the value on the CPU in the shard's shape, after all pending steps.

        The result may be the stored value itself: do not write to it, and copy it to keep it.
        """
        return self.source.read()

    def write(self, value: Tensor) -> None:
        """Replace the value. ``value`` has the shard's shape, any device and float dtype."""
        if tuple(value.shape) != tuple(self.shape):
            raise OffloadError(
                f"The shard of {self.source.name} has the shape {tuple(self.shape)}; "
                f"a value of the shape {tuple(value.shape)} was written to it."
            )
        self.source.write(value)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], None]:
        """FSDP2's all-gather extension: return the shard to gather, equally padded on all ranks."""
        assert isinstance(self.source, GatheredSource)
        return (self.source.fetch(),), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's all-gather extension: return the gathered tensor as the parameter."""
        assert isinstance(self.source, GatheredSource)
        self.source.release()
        # ``out``, of every gather but the first, is a view of ``outputs`` already.
        return None if out is not None else (outputs[0], (outputs[0],))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, explicit-override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, OffloadedShard):
            if func in _ALIASES or (func in _RESHAPES and list(args[1]) == list(first.shape)):
                return _stand_for(first.source, first.element)
            if func in _LIKE:
                return func(first.element, *args[1:], **_contiguous(func, kwargs))
        written = _written_shards(func, args, kwargs)
        if func is aten.copy_.default and written and args[1].shape == args[0].shape:
            args[0].write(_value(args[1]))  # without a read
            return args[0]
        values = {id(shard): _value(shard).clone() for shard in written}

        def value(argument: Any) -> Any:
            return values[id(argument)] if id(argument) in values else _value(argument)

        result = func(*tree_map(value, args), **tree_map(value, kwargs))
        for shard in written:
            shard.write(values[id(shard)])
        return written[0] if written and result is values[id(written[0])] else result

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle the value: the storage is one element and would be wrong.
        return self.read().detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = _value(self).clone()
        memo[id(self)] = copy
        return copy

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OffloadedShard({self.source.name}, shape={tuple(self.shape)}, {self.dtype})"


def _stand_for(source: ShardSource, shell: Tensor) -> OffloadedShard:
    shard: OffloadedShard = make_subclass(OffloadedShard, shell)
    shard.source = source
    shard.element = shell
    return shard


def _contiguous(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add a memory format: the strides of the one element, all zero, must not be imitated."""
    return {**kwargs, "memory_format": torch.contiguous_format} if func in _LIKE_STRIDED else kwargs


def _value(argument: Any) -> Any:
    if not isinstance(argument, OffloadedShard):
        return argument
    return argument.read().to(argument.device)


def _written_shards(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[OffloadedShard]:
    """Return the shards that an operator writes to.

    Raises:
        OffloadError: When the operator returns a view of one.
    """
    written = []
    for argument, is_written in written_or_viewed(func, args, kwargs):
        values = argument if isinstance(argument, (list, tuple)) else [argument]
        for value in values:
            if not isinstance(value, OffloadedShard):
                continue
            if not is_written:
                raise OffloadError(
                    f"{value.source.name} is offloaded and cannot be viewed by {func}. Read or "
                    f"write it inside of boltmesh.strategies.gathered_parameters(module, "
                    f"writes=True), or read a copy of this rank's shard with .clone()."
                )
            written.append(value)
    return written


class StepBarrier(Protocol):
    """The part of the engine that shard sources need."""

    is_lost: bool
    """Whether stored values are invalid, after a step that failed."""

    def wait_for_bucket(self, bucket: Bucket) -> None:
        """Return when no step of the bucket is pending or speculative."""

    def wait_for_all(self, bucket: Bucket) -> None:
        """Return when no step at all is pending: state stores serve one thread at a time."""

    def begin_gathering(self) -> None:
        """Announce that parameters are about to be gathered."""


class StateSource(ShardSource):
    """One tensor of the state of one parameter: a range of tensor ``number`` of its chunks."""

    def __init__(
        self, engine: StepBarrier, bucket: Bucket, slot: Slot, number: int, name: str
    ) -> None:
        self.engine = engine
        self.bucket = bucket
        self.slot = slot
        self._number = number
        self.name = name
        self.position = slot.index

    @override
    def read(self) -> Tensor:
        self.engine.wait_for_all(self.bucket)
        slot = self.slot
        if self.engine.is_lost:
            return torch.full(slot.shape, torch.nan, dtype=torch.float32)
        value = torch.empty(slot.numel, dtype=torch.float32)
        self._visit(lambda stored, here: value[here].copy_(stored), is_dirty=False)
        return value.view(slot.shape)

    @override
    def write(self, value: Tensor) -> None:
        self.engine.wait_for_all(self.bucket)
        flat = value.detach().reshape(-1).to("cpu")
        self._visit(lambda stored, here: stored.copy_(flat[here]), is_dirty=True)

    def _visit(self, do: Callable[[Tensor, slice], object], *, is_dirty: bool) -> None:
        slot = self.slot
        for chunk in self.bucket.chunks_of(slot):
            assert chunk.store is not None
            stored = chunk.store.acquire(chunk.number)[self._number]
            try:
                start = max(slot.offset, chunk.start)
                stop = min(slot.offset + slot.numel, chunk.stop)
                do(
                    stored[start - chunk.start : stop - chunk.start],
                    slice(start - slot.offset, stop - slot.offset),
                )
            finally:
                # Loaders write tensor by tensor, and a chunk holds parts of many parameters.
                chunk.store.release(chunk.number, is_dirty=is_dirty, defers_write=True)


class ParameterSource(StateSource, GatheredSource):
    """The master parameter and the copy that is gathered."""

    def __init__(
        self, engine: StepBarrier, bucket: Bucket, slot: Slot, store: ParameterStore
    ) -> None:
        super().__init__(engine, bucket, slot, 0, slot.name)
        self._store = store
        self._num_fetched = 0

    @override
    def write(self, value: Tensor) -> None:
        super().write(value)
        padded = torch.zeros(self.slot.padded_numel, dtype=torch.float32)
        padded[: self.slot.numel].copy_(value.detach().reshape(-1))
        self._store.put(self.slot.index, padded)

    @override
    def fetch(self) -> Tensor:
        self.engine.begin_gathering()
        self.engine.wait_for_bucket(self.bucket)
        shard = self._store.get(self.slot.index)
        self._num_fetched += 1
        return shard.view(self.slot.padded_shape)

    @override
    def release(self) -> None:
        self._num_fetched -= 1
        self._store.release(self.slot.index)

    def abandon(self) -> None:
        """Release the shards fetched for a gather whose result was never waited for."""
        while self._num_fetched:
            self.release()

    @override
    def fetch_part(self, start: int, stop: int) -> Tensor:
        self.engine.begin_gathering()
        self.engine.wait_for_bucket(self.bucket)
        return self._store.get_part(self.slot.index, start, stop)

"""The state that the engine keeps: made from parameters and optimizers, shown as DTensors.

A model that is built unit by unit is never in memory as a whole: each unit's shards are moved away
before the next unit is made. ``Staging`` stores them on the disk, or those of a GPU in host memory,
until the optimizers are known, which decide how they are stored. ``OffloadedState`` then reads them
back bucket by bucket.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.bucket_layout import ShardedParam, build_buckets
from boltmesh.strategies.offload.buckets import Bucket, BucketChunk, Slot
from boltmesh.strategies.offload.disk.swap_file import Extent, Swap
from boltmesh.strategies.offload.host_memory import allocate_host, copy_to_host
from boltmesh.strategies.offload.memory_stores import ParameterCopies
from boltmesh.strategies.offload.shard_tensor import (
    GatheredSource,
    OffloadedShard,
    ParameterSource,
    StateSource,
    StepBarrier,
)
from boltmesh.strategies.offload.stores import OffloadPlan, OpenStores, open_stores, place_chunks
from boltmesh.strategies.offload.update_rule import AdamRule, ElementwiseRule, UpdateRule
from boltmesh.strategies.torch_compat.tensors import dtensor_like, local_tensor
from boltmesh.telemetry.snapshot import MemoryPlace
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

if TYPE_CHECKING:
    from torch.nn import Parameter

CPU = torch.device("cpu")

NUM_THREADS = 2
"""Per direction, beside the threads of the final swap file. Each thread takes a stack."""


LOCKED_BYTES = 32 << 20
"""Page-locked memory through which shards of a GPU are copied to the host."""


class Staging:
    """Stores shards before any step needs them, in host memory or a file in ``folder``.

    The file grows with each shard; it and the memory are freed with the last one.
    """

    def __init__(
        self,
        folder: Path | str | None,
        *,
        device: torch.device,
        rank: int = 0,
        recorder: Recorder | NullRecorder | None = None,
    ) -> None:
        self._device = device
        self._swap: Swap | None = None
        if folder is not None:
            self._swap = Swap(folder, rank=rank, recorder=recorder, num_threads=NUM_THREADS)
        locked_bytes = 0 if device.type == "cpu" else LOCKED_BYTES
        self._page_locked = allocate_host(locked_bytes, device=device)

    def add(self, held: Sequence[ShardedParam]) -> None:
        """Move shards away and replace each by an ``OffloadedShard``, which takes no memory.

        Small ones stay where they are.

        Raises:
            OffloadError: When the disk is full or fails.
        """
        for each in held:
            if each.padded_numel < max(1, stores.SMALL_NUMEL):
                continue
            value = each.value()
            source = _StagedSource(self._swap, each, value.dtype, self._device, self._page_locked)
            source.write(value)
            local = local_tensor(each.parameter)
            shard = OffloadedShard.of(source, tuple(local.shape), value.dtype, self._device)
            each.replace(shard, shard.shell(each.padded_numel))


class _StagedSource(GatheredSource):
    """One staged shard."""

    def __init__(
        self,
        swap: Swap | None,
        held: ShardedParam,
        dtype: torch.dtype,
        device: torch.device,
        page_locked: Tensor,
    ) -> None:
        self.name = held.name
        self._swap = swap
        self._page_locked = page_locked
        self._shape = tuple(local_tensor(held.parameter).shape)
        self._padded_shape = held.padded_shape
        self._dtype = dtype
        self._compute_dtype = held.compute_dtype
        self._device = device
        num_bytes = self._numel * dtype.itemsize
        self._extent: Extent | None = None
        self._memory: Tensor | None = None
        if swap is None:
            self._memory = allocate_host(num_bytes, device=CPU)
        else:
            self._extent = swap.allocate(f"the parked {held.name}", num_bytes)

    @property
    def _numel(self) -> int:
        return torch.Size(self._shape).numel()

    @override
    def read(self) -> Tensor:
        if self._memory is not None:
            return self._cut(self._memory).view(self._shape)
        assert self._swap is not None
        assert self._extent is not None
        buffer = allocate_host(self._extent.num_bytes, device=CPU)
        self._swap.read(self._extent, buffer).wait()
        return self._cut(buffer).view(self._shape)

    @override
    def write(self, value: Tensor) -> None:
        buffer = self._memory
        if buffer is None:
            assert self._extent is not None
            buffer = allocate_host(self._extent.num_bytes, device=CPU)
        value = value.detach().reshape(-1)
        if value.device.type == "cpu":
            self._cut(buffer).copy_(value)
        else:
            copy_to_host(value.to(self._dtype), self._cut(buffer), self._page_locked)
        if self._swap is not None and self._extent is not None:
            self._swap.write(self._extent, buffer).wait()

    @override
    def fetch(self) -> Tensor:
        padded = torch.zeros(self._padded_shape, dtype=self._compute_dtype, device=self._device)
        padded.view(-1)[: self._numel].copy_(self.read().view(-1))
        return padded

    @override
    def release(self) -> None:
        """Nothing to do: the result of ``fetch`` belongs to the caller."""

    def _cut(self, buffer: Tensor) -> Tensor:
        return buffer[: self._numel * self._dtype.itemsize].view(self._dtype)


class OffloadedState:
    """Buckets, their stores, and the shards that represent them.

    ``engine`` ends pending steps before something is read. The other arguments are those of
    ``OffloadEngine``.
    """

    def __init__(
        self,
        engine: StepBarrier,
        *,
        device: torch.device,
        rank: int,
        recorder: Recorder | NullRecorder,
        plan: OffloadPlan,
        shares: Sequence[NormShare] = (),
    ) -> None:
        self.shares = tuple(shares)
        self.buckets: list[Bucket] = []
        """In the order of the forward pass."""
        self.rules: dict[Optimizer, UpdateRule] = {}
        self.owner: dict[Bucket, Optimizer | None] = {}
        self.place: dict[Parameter, tuple[Bucket, Slot]] = {}
        self.copies = ParameterCopies()
        self.stores: list[OpenStores] = []
        self.bucket_of: dict[int, Bucket] = {}
        """By the index of a slot."""
        self._engine = engine
        self._device = device
        self._rank = rank
        self._recorder = recorder
        self._plan = plan
        self._held: dict[Slot, ShardedParam] = {}
        self._num_chunks = 0

    def take(
        self,
        units: Mapping[str, Sequence[ShardedParam]],
        optimizers: Sequence[Optimizer],
        *,
        is_current: Callable[[int], bool],
    ) -> list[Bucket]:
        """Move parameters and their existing state into stores.

        Parameters that are stored already are skipped, so that a parameter group that is added
        later can be taken, too.

        Returns:
            The new buckets.
        """
        for optimizer in optimizers:
            if optimizer not in self.rules:
                is_adam = AdamRule.fits(optimizer)
                self.rules[optimizer] = (
                    AdamRule(optimizer) if is_adam else ElementwiseRule(optimizer)
                )
        new = {
            name: [each for each in held if each.parameter not in self.place]
            for name, held in units.items()
        }
        made = build_buckets(
            new,
            optimizers,
            first_index=len(self.bucket_of),
            takes_frozen=self._plan.parameters is not None,
            shares=self.shares,
        )
        if not made:
            return []
        counts = {bucket: self._num_tensors(owner) for bucket, owner, _ in made}
        buckets = [bucket for bucket, _, _ in made]
        place_chunks(buckets, counts, self._plan, self._num_chunks)
        self._num_chunks += sum(len(bucket.chunks) for bucket in buckets)
        opened = open_stores(
            buckets,
            counts,
            self._plan,
            device=self._device,
            rank=self._rank,
            recorder=self._recorder,
            is_current=is_current,
        )
        self.stores.append(opened)
        self.copies.stores.update(opened.of_slot)
        for bucket, owner, held in made:
            self.owner[bucket] = owner
            opened.reserve(bucket, counts[bucket])
            self._fill(bucket, owner, held)
        for each in opened.states.values():
            each.flush()
        self.buckets.extend(buckets)
        return buckets

    def buckets_of(self, optimizer: Optimizer) -> list[Bucket]:
        """Return the buckets that one optimizer updates."""
        return [each for each in self.buckets if self.owner[each] is optimizer]

    def show_state(self, optimizer: Optimizer, slot: Slot) -> dict[str, Any]:
        """Return ``optimizer.state`` of a parameter, created as the first step creates it."""
        state: dict[str, Any] = optimizer.state[slot.parameter]
        rule = self.rules[optimizer]
        bucket, _ = self.place[slot.parameter]
        if isinstance(rule, AdamRule):
            state.setdefault("step", torch.tensor(0.0))
        for number, name in enumerate(rule.state_names, start=1):
            if name not in state or not _is_shown(state[name]):
                source = StateSource(self._engine, bucket, slot, number, f"{name} of {slot.name}")
                shard = OffloadedShard.of(source, slot.shape, torch.float32, self._device)
                state[name] = dtensor_like(shard, slot.parameter)
        return state

    def show_scalars(self, optimizer: Optimizer) -> None:
        """Update the scalars in ``optimizer.state``, such as step counts."""
        rule = self.rules[optimizer]
        for bucket in self.buckets_of(optimizer):
            for slot in bucket.slots:
                if scalars := rule.scalars(slot):
                    self.show_state(optimizer, slot).update(scalars)

    def absorb(self, optimizer: Optimizer) -> None:
        """Import ``optimizer.state`` after ``load_state_dict``.

        A parameter that has no state there has none afterwards: its next step is its first.

        Raises:
            ConfigError: When a tensor does not have the shape of this rank's shard.
        """
        rule = self.rules[optimizer]
        for bucket in self.buckets_of(optimizer):
            for slot in bucket.slots:
                starts = [p.start for c in bucket.chunks for p in c.pieces() if p.slot is slot]
                state = optimizer.state.get(slot.parameter)
                if not state:
                    for name, value in self.show_state(optimizer, slot).items():
                        if name in rule.state_names:
                            _shown(value).write(torch.zeros(slot.shape))
                    rule.load_scalars(slot, None, starts)
                    del optimizer.state[slot.parameter]
                    continue
                loaded = {name: state[name] for name in rule.state_names if name in state}
                self.show_state(optimizer, slot)
                for name, value in loaded.items():
                    if isinstance(value, Tensor) and not _is_shown(value):
                        _shown(state[name]).write(_local(value, slot, name))
                scalars = {k: v for k, v in state.items() if k not in rule.state_names}
                rule.load_scalars(slot, scalars, starts)

    def give_back(self, bucket: Bucket) -> None:
        """Move a bucket's parameters back to the device, as fp32 shards."""
        for slot in bucket.slots:
            held = self._held[slot]
            del self._held[slot]
            del self.place[slot.parameter]
            if isinstance(_shown(held.parameter).source, ParameterSource):  # it is not staged
                self._to_device(held)
        self.buckets.remove(bucket)

    def unstage(self, held: Sequence[ShardedParam]) -> None:
        """Move staged parameters that no optimizer steps back to the device."""
        for each in held:
            local = local_tensor(each.parameter)
            if isinstance(local, OffloadedShard) and isinstance(local.source, _StagedSource):
                self._to_device(each)

    def _to_device(self, held: ShardedParam) -> None:
        value = held.value()
        shape = tuple(local_tensor(held.parameter).shape)
        padded = torch.zeros(held.padded_numel, dtype=value.dtype, device=self._device)
        padded[: value.numel()].copy_(value)
        held.replace(padded[: value.numel()].view(shape), padded)

    def restore(self, staging: Staging | None = None) -> None:
        """Move all parameters to the device, or large ones to ``staging``; close the stores."""
        if staging is not None:
            staging.add(list(self._held.values()))
        for bucket in list(self.buckets):
            self.give_back(bucket)
        for opened in self.stores:
            opened.close()
        self.stores.clear()

    def bytes_by_place(self) -> dict[str, dict[MemoryPlace, int]]:
        """Bytes of all stores by kind and place; master parameters count as ``"optimizer"``."""
        total: dict[str, dict[MemoryPlace, int]] = {"optimizer": {}, "parameters": {}}
        for opened in self.stores:
            for kind, of_kind in (
                ("optimizer", opened.states.values()),
                ("parameters", opened.parameters),
            ):
                for store in of_kind:
                    for place, num_bytes in store.bytes_by_place().items():
                        # The device of a model that is computed on the CPU is the host.
                        is_host = place == "device" and self._device.type == "cpu"
                        key = cast("MemoryPlace", "host" if is_host else place)
                        total[kind][key] = total[kind].get(key, 0) + num_bytes
        return total

    def _num_tensors(self, owner: Optimizer | None) -> int:
        return 1 if owner is None else 1 + len(self.rules[owner].state_names)

    def _fill(self, bucket: Bucket, owner: Optimizer | None, held: Sequence[ShardedParam]) -> None:
        names = self.rules[owner].state_names if owner is not None else ()
        existing: dict[Slot, dict[str, Any]] = {}
        if owner is not None:
            states = ((slot, owner.state.get(slot.parameter)) for slot in bucket.slots)
            existing = {slot: dict(state) for slot, state in states if state}
        values = _LastValue(dict(zip(bucket.slots, held, strict=True)))
        for chunk in bucket.chunks:
            tensors = [torch.zeros(chunk.numel) for _ in range(1 + len(names))]
            for slot, start, stop, into in _stretches(chunk):
                tensors[0][into].copy_(values.of(slot)[start:stop])
                for name, tensor in zip(names, tensors[1:], strict=True):
                    value = existing.get(slot, {}).get(name)
                    if isinstance(value, Tensor):
                        tensor[into].copy_(_local(value, slot, name).reshape(-1)[start:stop])
            assert chunk.store is not None
            chunk.store.create(chunk.number, tensors)
        for slot, each in zip(bucket.slots, held, strict=True):
            store = self.copies.stores[slot]
            value = values.of(slot)
            padded = torch.zeros(slot.padded_numel, dtype=slot.dtype, device=value.device)
            padded[: slot.numel].copy_(value)
            store.create(slot.index, padded)
            source = ParameterSource(self._engine, bucket, slot, store)
            shard = OffloadedShard.of(source, slot.shape, torch.float32, self._device)
            each.replace(shard, shard.shell(slot.padded_numel))
            self._held[slot] = each
            self.bucket_of[slot.index] = bucket
            self.place[slot.parameter] = bucket, slot
        if owner is not None and existing:
            self.absorb_existing(owner, bucket, existing)

    def absorb_existing(
        self, owner: Optimizer, bucket: Bucket, existing: Mapping[Slot, Mapping[str, Any]]
    ) -> None:
        """Show the state that a parameter had before the stores were made."""
        rule = self.rules[owner]
        for slot, state in existing.items():
            for name in rule.state_names:
                owner.state[slot.parameter].pop(name, None)
            self.show_state(owner, slot)
            scalars = {k: v for k, v in state.items() if k not in rule.state_names}
            starts = [p.start for c in bucket.chunks for p in c.pieces() if p.slot is slot]
            rule.load_scalars(slot, scalars, starts)


class _LastValue:
    """Reads shards and keeps the last one, since several chunks may need parts of it."""

    def __init__(self, held: Mapping[Slot, ShardedParam]) -> None:
        self._held = held
        self._last: tuple[Slot, Tensor] | None = None

    def of(self, slot: Slot) -> Tensor:
        """Return the shard of a parameter, ``(numel,)``."""
        if self._last is None or self._last[0] is not slot:
            self._last = None  # so that two are never in memory
            self._last = slot, self._held[slot].value()
        return self._last[1]


def _stretches(chunk: BucketChunk) -> Iterator[tuple[Slot, int, int, slice]]:
    for piece in chunk.pieces():
        slot = piece.slot
        into = slice(piece.start - chunk.start, piece.stop - chunk.start)
        yield slot, piece.start - slot.offset, piece.stop - slot.offset, into


def _is_shown(value: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(local_tensor(value), OffloadedShard)


def _shown(value: Tensor) -> OffloadedShard:
    local = local_tensor(value)
    assert isinstance(local, OffloadedShard)
    return local


def _local(value: Tensor, slot: Slot, name: str) -> Tensor:
    local = local_tensor(value) if isinstance(value, DTensor) else value
    if tuple(local.shape) != slot.shape:
        raise ConfigError(
            f"{name} of {slot.name} was given with the shape {tuple(local.shape)}; this rank's "
            f"shard has {slot.shape}. Load optimizer state through the strategy, "
            f"Trainer.fit(ckpt_path=...), which shards it."
        )
    return local

"""``StepTrace``: the calls of units in one run of a step, and the values it makes, uses and keeps.

``SavedTensorWatch`` records the tensors that autograd would keep for the backward pass.
``StateWatch`` finds the buffers and attributes of modules that a step changes. ``place_of`` gives
the line of the user's code that is running, for messages.
"""

import math
import os
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.dry_run.no_side_effects import CONTAINERS, holds
from boltmesh.strategies.pytree import Build, tensors_in
from boltmesh.strategies.source_line import OF_TORCH, line_outside
from boltmesh.strategies.torch_compat.tensors import (
    FakeTensorMode,
    functions_unwatched,
    is_equal,
    is_fake,
    make_fake,
    storage_key,
    storage_of,
    times_written,
)

_HERE = Path(__file__).absolute().parent
MACHINERY = (*OF_TORCH, *(f"{each}{os.sep}" for each in (_HERE, _HERE.parents[1] / "torch_compat")))
"""Folders of files without lines of a user's step."""


def line_of_step() -> str:
    """Return the file and line outside of torch and of this package that is running now."""
    return line_outside(MACHINERY)


def place_of(error: BaseException) -> str:
    """Return the file, line and function outside of torch that an error came from."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [each for each in frames if not each.filename.startswith(MACHINERY)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}"


def holder_of(value: object, root: Module) -> str | None:
    """Return the dotted name of an attribute of a module that is ``value``, or None."""
    for name, module in root.named_modules():
        for attribute, each in vars(module).items():
            if each is value:
                return f"{name}.{attribute}".lstrip(".")
    return None


def write_refused(parameter: str, place: str, how: str) -> ConfigError:
    """Return the error for a write to a parameter that stages cannot do once for a batch."""
    return ConfigError(
        f"{parameter!r} is written to in the step ({place}) {how}, and each stage of the pipeline "
        f"runs the step for each microbatch. Write to it from itself alone, before all of its uses "
        f"or behind them, or in a hook, such as on_train_batch_end, on all ranks inside of "
        f"boltmesh.strategies.gathered_parameters(module, writes=True)."
    )


NO_EVENT = -1


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's layout in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the layout of a tensor of any shape."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Return a tensor of this layout with undefined values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Argument:
    """A leaf of a unit's output that is the same object as a leaf of its arguments."""

    index: int


class Place(NamedTuple):
    """A call of a unit, with what its output depends on beside the kind of the unit."""

    unit: str
    settings: tuple[Hashable, ...]
    """Numbers, flags and strings of the unit, which hooks and the step may set."""
    given: tuple[Hashable, ...]
    """Arguments, torch's modes, and the number of the call: the step may set attributes of the unit
    between its calls."""
    answers: tuple[Hashable, ...]
    """Values that the step has read from its batch before, by which it may set them."""


@dataclass(frozen=True)
class UnitOutput:
    """Output of a unit for arguments of one signature."""

    leaves: tuple[object, ...]
    """A :class:`TensorSpec` for a tensor, an :class:`Argument`, or the value of any other leaf."""
    build: Build
    needs_grad: tuple[bool, ...]
    """Whether each leaf is a tensor that needs a gradient."""
    written_buffers: tuple[str, ...] = ()
    """Buffers of the unit that its forward writes to or replaces."""
    sees_one_value: bool = False
    """Whether a batch norm in it has one value per channel."""


@dataclass
class Value:
    """A tensor that depends on outputs of units."""

    made_at: int
    """The event that made the tensor object; NO_EVENT if it existed before the step."""
    leaf: int
    """Index among the tensors of that event's result."""
    origin: str
    spec: TensorSpec
    storage: int
    """Equal for values that share memory."""
    is_side_effect: bool = False
    """Whether it came from a unit other than in its result."""
    is_of_metric: bool = False
    """Whether a metric returned it, before the event :attr:`made_at`; the last stage has it."""
    needs_grad: list[tuple[int, bool]] = field(default_factory=list)
    """Whether it needs a gradient from an event on, oldest first."""
    uses: list[int] = field(default_factory=list)
    """The events that use it, oldest first."""
    follows_batch: bool = False
    """Whether it is, or may be, computed from the batch's data."""

    def needs_grad_before(self, event: int) -> bool:
        """Whether it needs a gradient when ``event`` begins."""
        return [needs for since, needs in self.needs_grad if since < event][-1]


@dataclass(frozen=True)
class TraceEvent:
    """A call of a unit, or of a function of torch between units."""

    name: str
    is_unit: bool
    parameters: frozenset[str] = frozenset()
    """Parameters that a function with a value of a unit used, directly or through tensors computed
    from them. For a call of a unit: parameters that its arguments were computed from, and
    parameters of other modules that it used."""
    place: str = ""
    """The line of the step, for messages."""
    writes: str = ""
    """The parameter that it writes to, using only that parameter's own values."""


def refuse_writes(events: Iterable[TraceEvent], how: str) -> None:
    """Refuse a step that writes to a parameter.

    Raises:
        ConfigError: Naming the parameter.
    """
    for event in events:
        if event.writes:
            raise write_refused(event.writes, event.place, how)


@dataclass
class ValueRead:
    """A read of a unit's value by Python."""

    event: int
    """The number of events before it."""
    name: str
    place: str
    origin: str
    values: list[Value] = field(default_factory=list)
    """The values read."""


@dataclass(frozen=True)
class MetricTrace:
    """A call of a metric by the step."""

    name: str
    method: str
    shapes: tuple[tuple[int, ...] | None, ...]
    """Shapes of the leaves of its arguments; None for a leaf that is no tensor."""


@dataclass
class StepTrace:
    """One run of a step on one batch, without the data of its layers' outputs."""

    events: list[TraceEvent] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: dict[int, UnitOutput] = field(default_factory=dict)
    """Outputs of units, by event."""
    writes: dict[int, list[int]] = field(default_factory=dict)
    """The events that wrote into a storage, by :attr:`Value.storage`."""
    grad_queries: set[tuple[int, int]] = field(default_factory=set)
    """Tensors whose ``requires_grad`` the step reads, by the event that made them and leaf."""
    functions: list[tuple[int, int]] = field(default_factory=list)
    """Differentiated calls of a user's ``torch.autograd.Function``: the first event within, and its
    own event."""
    readings: list[ValueRead] = field(default_factory=list)
    answers: list[Hashable] = field(default_factory=list)
    """Values that Python read from the batch, in order; with others the run may differ."""
    parameter_reads: dict[int, frozenset[str]] = field(default_factory=dict)
    """Parameters that Python read, by the number of events before."""
    stale_uses: dict[str, int] = field(default_factory=dict)
    """The first event that uses a tensor computed from a parameter before the step wrote to it, by
    parameter."""
    metrics: list[MetricTrace] = field(default_factory=list)
    """The calls of metrics, in order."""
    parameters_out: frozenset[str] = frozenset()
    """Parameters that the step returns or logs, directly or through tensors computed from them."""
    draws_random: bool = False
    """Whether code between units draws random numbers after the first unit."""
    draws: list[int] = field(default_factory=list)
    """The events between units that drew random numbers; NO_EVENT for other than torch's."""
    draws_host_random: bool = False
    """Whether numpy or Python draw random numbers once the first unit has begun, anywhere."""
    sees_one_value: bool = False
    """Whether a batch norm has one value per channel, and needs more rows."""
    changed_buffers: dict[str, int] = field(default_factory=dict)
    """Buffers outside of units that the step writes or replaces, with the last event that put a
    unit's value into them; NO_EVENT if none did."""
    written_arguments: frozenset[int] = frozenset()
    """Leaves of the step's arguments that it writes to."""
    changed_attributes: frozenset[tuple[str, str]] = frozenset()
    """Attributes that the step sets or fills on modules outside of units: module and name."""
    turned_attributes: frozenset[tuple[str, str]] = frozenset()
    """Those of them, without values of units, on which the step may branch next time: a filled
    cache, a flag."""
    attributes_of_units: frozenset[tuple[str, str]] = frozenset()
    """Those of them that hold values of units."""
    flops: dict[str, int] = field(default_factory=dict)
    """Floating point operations of all forward calls of a unit; empty unless counted."""
    kept: dict[str, dict[int, int]] = field(default_factory=dict)
    """Bytes that autograd keeps of a unit and of the code behind it up to the next one, by unit and
    storage (see :attr:`Value.storage`). Empty unless recorded."""
    learned: dict[Place, UnitOutput] = field(default_factory=dict)
    """Outputs of units without other effects, by place."""

    def unit_events(self) -> list[int]:
        """Return the events that are calls of units."""
        return [index for index, event in enumerate(self.events) if event.is_unit]


class SavedTensorWatch:
    """Fills ``StepTrace.kept``: storages that operators save during or after each unit.

    Tensors with data (the batch, and tensors computed from it alone) and parameters exist anyway
    and are left out. Inputs of a unit count as kept by it: its first operators save them, and a
    layer that runs again in the backward pass keeps nothing else.
    """

    def __init__(self, root: Module, trace: StepTrace, mode: FakeTensorMode) -> None:
        self._trace = trace
        self._unit = ""
        self._num_repeated = 0
        state = [*root.parameters(), *root.buffers()]
        fakes = [make_fake(each, mode) for each in state]
        self._left_out = set(map(storage_key, fakes))
        self._alive: list[Tensor | torch.UntypedStorage] = [*fakes]
        """Holds all storages seen, so that their keys stay unique."""

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context in which saved tensors are recorded."""
        return saved_tensors_hooks(self._pack, lambda packed: packed)

    def begin_unit(self, name: str, arguments: Any) -> None:
        """Begin a unit's call; its arguments are kept for the backward pass."""
        self._unit = name
        self._trace.kept.setdefault(name, {})
        if torch.is_grad_enabled():
            for each in tensors_in(arguments):
                self._note(each)

    def _pack(self, tensor: Tensor) -> Tensor:
        with functions_unwatched():  # this is no part of the step
            if not _is_weight_cast(tensor):  # exists once for all microbatches
                self._note(tensor)
            # Detached, unless nothing can be written to it: what an operator gives, or what its
            # result is written to later, and the operator would keep each other alive.
            is_trained = tensor.is_leaf and tensor.requires_grad
            return tensor if is_trained else tensor.detach()

    def _note(self, tensor: Tensor) -> None:
        if not is_fake(tensor):
            return
        key = storage_key(tensor)
        if key not in self._left_out:
            self._alive.append(storage_of(tensor))
            kept = self._trace.kept.setdefault(self._unit, {})
            kept[key] = tensor.untyped_storage().nbytes()

    def saved(self) -> Set[int]:
        """Return the storages recorded so far for the current unit."""
        return set(self._trace.kept[self._unit])

    def saved_since(self, before: Set[int], result: Any) -> list[tuple[int | None, int]]:
        """Return the storages recorded since: index of the tensor in the unit's result, bytes."""
        kept = self._trace.kept[self._unit]
        place = {storage_key(each): at for at, each in enumerate(tensors_in(result))}
        return [(place.get(key), size) for key, size in kept.items() if key not in before]

    def repeat(self, saved: Sequence[tuple[int | None, int]], result: Any) -> None:
        """Record the same for the current unit, with its own ``result``."""
        kept, made = self._trace.kept[self._unit], tensors_in(result)
        for at, size in saved:
            if at is None:
                self._num_repeated += 1
                kept[-self._num_repeated] = size  # the tensor does not exist here
            else:
                self._alive.append(storage_of(made[at]))
                kept[storage_key(made[at])] = size


def _is_weight_cast(tensor: Tensor) -> bool:
    """Whether a tensor is autocast's copy of a trained parameter, transposed or not."""
    node = tensor.grad_fn
    while node is not None and node.name() in {"TBackward0", "TransposeBackward0"}:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


def version_of(value: Any) -> int:
    """Return the number of writes to a tensor, 0 if torch does not count them."""
    return times_written(value) if isinstance(value, Tensor) and not value.is_inference() else 0


_OWN = frozenset(vars(Module()))
"""Attributes that torch itself keeps on a module."""


class StateWatch:
    """Records the state of modules and compares it with their later state.

    Args:
        modules: Modules by name, without their children.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self._buffers = {
            (name, key): (each, version_of(each), _copy(each))
            for name, module in modules.items()
            for key, each in _buffers_of(module)
        }
        self._attributes = {name: _attributes(each) for name, each in modules.items()}

    def changed_buffers(self, is_written: Callable[[Tensor], bool]) -> dict[str, Tensor]:
        """Return the buffers that were written or replaced, with new values, by dotted name.

        They are compared by value too, since writes through ``.data`` are not counted.

        Args:
            is_written: Returns whether a value without data was written into a tensor.
        """
        changed: dict[str, Tensor] = {}
        for (name, key), (before, written, value) in self._buffers.items():
            now = dict(_buffers_of(self._modules[name])).get(key)
            if now is None:
                continue
            is_counted = version_of(now) != written
            if now is not before or is_counted or is_written(now) or not _has_value(now, value):
                changed[f"{name}.{key}" if name else key] = now
        return changed

    def shape_before(self, buffer: str) -> torch.Size:
        """Return the shape that a buffer had, by dotted name."""
        module, _, key = buffer.rpartition(".")
        return self._buffers[module, key][0].shape

    def changed_attributes(self) -> frozenset[tuple[str, str]]:
        """Return the attributes that were replaced or whose members changed, by module and name."""
        return frozenset(
            (name, key)
            for name, before in self._attributes.items()
            for key in _different(before, _attributes(self._modules[name]))
        )

    def turned_attributes(self) -> frozenset[tuple[str, str]]:
        """Return the changed attributes of which a step may see by branching that they changed."""
        return frozenset(
            (name, key)
            for name, key in self.changed_attributes()
            if attribute_signature(self._attributes[name].get(key, (None,))[0])
            != attribute_signature(vars(self._modules[name]).get(key))
        )


def attribute_signature(value: Any) -> Hashable:
    """Return what a step may branch on of a value that it keeps on a module, as a flag or a cache.

    Numbers and members of containers change with every batch, and are left out.
    """
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (bool, type(None))):
        return value
    return (type(value),)


def _buffers_of(module: Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(recurse=False, remove_duplicate=False)


def _copy(tensor: Tensor) -> Tensor | None:
    return None if tensor.is_meta or is_fake(tensor) else tensor.detach().clone()


def _has_value(tensor: Tensor, value: Tensor | None) -> bool:
    if value is None or tensor.is_meta or is_fake(tensor):
        return True
    return tensor.shape == value.shape and is_equal(tensor, value)


def _attributes(module: Module) -> dict[str, tuple[Any, Any]]:
    return {
        key: (value, value.copy() if type(value) in CONTAINERS else None)
        for key, value in vars(module).items()
        if key not in _OWN
    }


def _different(before: dict[str, tuple[Any, Any]], now: dict[str, tuple[Any, Any]]) -> set[str]:
    shared = before.keys() & now.keys()
    return {
        *(before.keys() ^ now.keys()),
        *(key for key in shared if not _is_same(before[key], now[key])),
    }


def _is_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] is other[0] and (one[1] is None or holds(other[1], one[1]))

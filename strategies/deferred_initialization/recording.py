"""Recordings of operators on tensors that do not exist yet, for a later replay.

A ``Recording`` is a list of ``Operation``. A deferred tensor is a tensor on ``meta`` whose storage
is marked with the recording and a number, so that views, ``Parameter`` objects and copies of the
tensor object all share one history; the recording lives as long as a marked storage does. A
``Space`` is such a storage, a ``View`` the part of it that a tensor covers, and ``Content`` the
storages that exist during a replay.

Functions on operators, such as which tensors one writes and whether it draws random numbers, are
at the end.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.pytree import like
from boltmesh.strategies.torch_compat.tensors import CAST, OpOverload, schema_of, times_written


class Content(dict[int, Tensor]):
    """Storages that exist during a replay: a tensor that owns the storage, by number.

    Reading a storage before anything was written to it creates it uninitialized.
    """

    def __init__(self, spaces: "list[Space]") -> None:
        super().__init__()
        self._spaces = spaces

    def __missing__(self, number: int) -> Tensor:
        space = self._spaces[number]
        made = torch.empty(space.num_bytes, dtype=torch.uint8, device=space.home)
        return self.setdefault(number, made)


@dataclass(frozen=True)
class Space:
    """A storage that does not exist yet."""

    home: torch.device
    """The device on which it would be."""
    num_bytes: int


@dataclass(frozen=True)
class Geometry:
    """The elements of a storage that a tensor covers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """Return the geometry of any tensor."""
        offset = int(tensor.storage_offset())
        return cls(tuple(tensor.size()), tuple(tensor.stride()), offset, tensor.dtype)

    def of_storage(self, owner: Tensor) -> Tensor:
        """Return the tensor that covers these elements of the storage of another one."""
        empty = torch.empty(0, dtype=self.dtype, device=owner.device)
        return empty.set_(owner.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class View:
    """A deferred tensor as an operator received it."""

    storage: int
    geometry: Geometry

    def of(self, content: Content) -> Tensor:
        """Return this view of the storage in ``content``."""
        return self.geometry.of_storage(content[self.storage])


def covers_storage(tensor: Tensor) -> bool:
    """Whether a tensor covers every element of its storage exactly once."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


_MARK = "_boltmesh_deferred"


class RecordedInput:
    """A real tensor that an operator read, with its value at that time.

    Small ones are copied; a large one is referenced, and copied before it is changed.
    """

    def __init__(self, tensor: Tensor, *, is_copied: bool) -> None:
        self.tensor = tensor  # itself: an alias made below autograd counts its changes apart
        self.is_copied = False
        self.version = 0 if is_copied else times_written(tensor)
        if is_copied:
            self.copy()

    def copy(self) -> None:
        """Keep a copy of the value."""
        self.tensor = self.tensor.detach().clone()
        self.is_copied = True

    def value(self) -> Tensor:
        """Return the tensor with its value at that time.

        Raises:
            ConfigError: If it was changed after the recording had ended.
        """
        if not self.is_copied and times_written(self.tensor) != self.version:
            raise ConfigError(
                f"A tensor of shape {tuple(self.tensor.shape)} was copied into a parameter under "
                f"deferred_init() and changed afterwards, before the parameter was made. Change a "
                f"clone of it."
            )
        return self.tensor


@dataclass(frozen=True)
class Operation:
    """One recorded operator, with everything that it depends on."""

    function: OpOverload
    args: tuple[Any, ...]
    """The arguments, with each tensor replaced by a ``View`` or a ``RecordedInput``."""
    kwargs: dict[str, Any]
    reads: frozenset[int]
    """Storages whose content it reads, including those that it changes in part."""
    writes: frozenset[int]
    overwrites: frozenset[int]
    """Those of ``writes`` that it overwrites completely."""
    makes: tuple[tuple[int, int, Geometry], ...]
    """Outputs with new storages: index of the output, storage, and the elements that it covers."""
    default_dtype: torch.dtype
    generator: torch.Generator | None
    random_state: Tensor | None
    """State of the generator before an operator that draws random numbers."""

    def run(self, content: Content) -> None:
        """Run the operator again, on the storages in ``content``."""

        def real(value: Any) -> Any:
            if isinstance(value, View):
                return value.of(content)
            return value.value() if isinstance(value, RecordedInput) else value

        args, kwargs = map_leaves(real, self.args), map_leaves(real, self.kwargs)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            if self.generator is None:
                outputs = self.function(*args, **kwargs)
            else:
                outputs = self._run_random(self.generator, args, kwargs)
        finally:
            torch.set_default_dtype(before)
        flat = tensors_of(outputs)
        for position, storage, geometry in self.makes:
            content[storage] = _with_geometry(flat[position], geometry)

    def _run_random(self, generator: torch.Generator, args: Any, kwargs: Any) -> Any:
        now = generator.get_state()
        assert self.random_state is not None
        generator.set_state(self.random_state)
        try:
            return self.function(*args, **kwargs)
        finally:
            generator.set_state(now)


def _with_geometry(tensor: Tensor, geometry: Geometry) -> Tensor:
    """Return the tensor with the strides it had on ``meta``, which later views rely on."""
    if Geometry.of(tensor) == geometry:
        return tensor
    size = geometry.offset + sum(
        (length - 1) * step for length, step in zip(geometry.size, geometry.stride, strict=True)
    )
    owner = torch.empty(size + 1, dtype=geometry.dtype, device=tensor.device)
    owner.as_strided(geometry.size, geometry.stride, geometry.offset).copy_(tensor)
    return owner


@dataclass
class Recording:
    """All operators recorded under one ``deferred_init()``.

    Operators are kept in the order in which they ran. A storage is replayed by the operators that
    wrote it since it was last overwritten, and by those that these depend on, in order.
    """

    operations: list[Operation] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)
    """Indices of the operators that wrote a storage, by its number."""
    _spaces: list[Space] = field(default_factory=list)

    def adopt(self, tensor: Tensor, home: torch.device) -> int:
        """Register a new ``meta`` storage that would be on ``home`` if it existed."""
        number = len(self._spaces)
        self._spaces.append(Space(home, tensor.untyped_storage().nbytes()))
        setattr(tensor.untyped_storage(), _MARK, (self, number))
        return number

    def home(self, tensor: Tensor) -> torch.device:
        """Return the device on which a deferred tensor would be."""
        return self._spaces[self._number(tensor)].home

    def view(self, tensor: Tensor) -> View:
        """Return the part of a storage that a deferred tensor covers."""
        return View(self._number(tensor), Geometry.of(tensor))

    def append(self, operation: Operation) -> None:
        """Record an operator."""
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(len(self.operations))
        self.operations.append(operation)

    @torch.no_grad()
    def replay(self, view: View) -> Tensor:
        """Return a deferred tensor with values, on its home device; generators do not change.

        At any time only this tensor and the tensors that one operator needs exist.
        """
        numbers = self._history(view.storage)
        last_use = {
            storage: number
            for number in numbers
            for storage in self.operations[number].reads | self.operations[number].writes
        }
        content = Content(self._spaces)
        for number in numbers:
            operation = self.operations[number]
            operation.run(content)
            for storage in operation.reads | operation.writes:
                if last_use[storage] == number and storage != view.storage:
                    content.pop(storage, None)
        return view.of(content)

    def _history(self, storage: int) -> list[int]:
        """Return the operators that determine the current content of a storage, in order."""
        chosen: set[int] = set()
        queue = [-number for number in self._writers_before(storage, len(self.operations))]
        heapq.heapify(queue)
        while queue:
            number = -heapq.heappop(queue)
            if number in chosen:
                continue
            chosen.add(number)
            for read in self.operations[number].reads:
                for each in self._writers_before(read, number):
                    heapq.heappush(queue, -each)
        return sorted(chosen)

    def _writers_before(self, storage: int, number: int) -> Iterator[int]:
        """Yield the writers of a storage since it was last overwritten, latest first."""
        for writer in reversed(self._writers.get(storage, [])):
            if writer < number:
                yield writer
                if storage in self.operations[writer].overwrites:
                    return

    def _number(self, tensor: Tensor) -> int:
        recording, number = getattr(tensor.untyped_storage(), _MARK)
        assert recording is self
        return int(number)


def recording_of(tensor: Tensor) -> Recording | None:
    """Return the recording in which a tensor is deferred; None for other tensors."""
    try:
        mark = getattr(tensor.untyped_storage(), _MARK, None)
    except NotImplementedError:  # a sparse tensor
        return None
    return None if mark is None else mark[0]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of an operator's arguments: lists, tuples, dictionaries."""
    if isinstance(value, (list, tuple)):
        made = [map_leaves(function, each) for each in value]
        return like(value, made)
    if isinstance(value, dict):
        return {key: map_leaves(function, each) for key, each in value.items()}
    return function(value)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of an operator's arguments or outputs, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


VALUE_FREE = {
    "aten::bernoulli_",
    "aten::cauchy_",
    "aten::copy_",
    "aten::exponential_",
    "aten::fill_",
    "aten::geometric_",
    "aten::log_normal_",
    "aten::normal_",
    "aten::rand_like",
    "aten::randint_like",
    "aten::randn_like",
    "aten::random_",
    "aten::uniform_",
    "aten::zero_",
}
"""Operators that depend only on the shape of their first argument."""


def is_value_free(func: OpOverload) -> bool:
    """Whether an operator depends only on the shape of its first argument."""
    return schema_of(func).name in VALUE_FREE


def is_random(func: OpOverload) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def written_by(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors whose content an operator changes."""
    written: list[Tensor] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written += tensors_of(given)
    return written


def is_factory(func: OpOverload) -> bool:
    """Whether an operator creates a tensor; its arguments determine at most the shape."""
    return func is not CAST and takes_device(func)


def takes_device(func: OpOverload) -> bool:
    """Whether an operator has a device argument for its output."""
    return any(argument.name == "device" for argument in schema_of(func).arguments)


def gives_tensors(func: OpOverload) -> bool:
    """Whether everything that an operator returns is a tensor."""
    return all("Tensor" in str(each.type) for each in schema_of(func).returns)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators on a device use by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    # Typed as a number, but None if the code requested no particular device.
    index = module.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    generator: torch.Generator = module.default_generators[index]
    return generator

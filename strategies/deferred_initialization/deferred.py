"""``deferred_init``: constructs a model without its large tensors, which are made later.

Large tensors are created on ``meta``, and operators on them are recorded. Operators that draw
random numbers also run, on a scratch tensor, so that generators advance as usual: real tensors
and later random numbers are the same as without deferring. A replay starts each operator from the
recorded state of its generator, with bitwise equal results.

``DeferredInitMode`` is the dispatch mode that decides how each operator runs. Operators that
cannot be recorded, since they return values, run on temporary values. ``Appearance`` makes
deferred tensors report the device on which they will be.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.deferred_initialization.recording import (
    Geometry,
    Operation,
    RecordedInput,
    Recording,
    View,
    covers_storage,
    default_generator,
    gives_tensors,
    is_factory,
    is_random,
    is_value_free,
    map_leaves,
    recording_of,
    takes_device,
    tensors_of,
    written_by,
)
from boltmesh.strategies.offload.host_memory import give_back_free_memory
from boltmesh.strategies.patch import patched
from boltmesh.strategies.torch_compat.tensors import (
    CAST,
    DispatchMode,
    OpOverload,
    schema_of,
    times_written,
)

META = torch.device("meta")


def _is_deferred(tensor: Tensor) -> bool:
    return recording_of(tensor) is not None


class DeferredInitMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operator that runs under ``deferred_init``."""

    def __init__(self, recording: Recording, min_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.min_bytes = max(1, min_bytes)  # torch gives empty tensors real storages
        self._is_paused = False
        self._scratch: dict[torch.device, Tensor] = {}
        self._modules: list[nn.Module] = []
        self._given: list[RecordedInput] = []
        """Large real tensors to which the recording refers."""
        self._home = torch.get_default_device()
        if self._home.type == "meta":
            self._home = torch.device("cpu")

    # Registrations of modules.

    def see_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Called by torch for each parameter registered on a module."""
        self._modules.append(module)

    def see_module(self, module: nn.Module, name: str, child: Any) -> None:
        """Called by torch for each registered child: only here are copied modules seen."""
        if child is not None:
            self._modules.append(child)

    def make_buffer(self, module: nn.Module, name: str, buffer: Any) -> Any:
        """Called by torch for each registered buffer; makes it real."""
        if not isinstance(buffer, Tensor) or not _is_deferred(buffer):
            return None
        return self.make(buffer)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the deferred parameters of all constructed modules."""
        seen: set[nn.Module] = set()
        for module in self._modules:
            for _, each in module.named_modules(memo=seen):
                yield from filter(_is_deferred, each.parameters(recurse=False))

    # Operators.

    @override
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_paused:
            return func(*args, **kwargs)
        home = self._home
        given = tensors_of([args, kwargs])
        deferred = [each for each in given if _is_deferred(each)]
        if deferred:
            home = self.recording.home(deferred[0])
        if kwargs.get("device") is not None:
            home = torch.device(kwargs["device"])
            if home.type == "meta":
                home = kwargs["device"] = self._home
        if deferred:
            return self._apply(func, args, kwargs, home)
        if is_factory(func):
            shape = self._on_meta(func, args, kwargs)
            if isinstance(shape, Tensor) and shape.nbytes >= self.min_bytes:
                return self._record(func, args, kwargs, shape, home)
        self._keep_given(written_by(func, args, kwargs))
        return func(*args, **kwargs)

    def _apply(self, func: OpOverload, args: Any, kwargs: Any, home: torch.device) -> Any:
        """Run an operator with a deferred argument."""
        if torch.Tag.inplace_view in func.tags:
            if func.overloadpacket is torch.ops.aten.resize_:
                raise ConfigError(
                    "The construction resizes a tensor in place, which deferred_init() cannot do "
                    "later. Make it in its final size."
                )
            # Replaces the tensor rather than its content, or assigns another tensor's content.
            change = self.defer if _is_deferred(args[0]) else self.make
            return func(*map_leaves(change, args), **kwargs)
        written = written_by(func, args, kwargs)
        is_moved = func is CAST and kwargs.get("device") is not None
        if is_moved or not gives_tensors(func) or not all(map(_is_deferred, written)):
            return self._run_now(func, args, kwargs)
        try:
            outputs = self._on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError):
            # The shape depends on values; or the construction has an error, which is raised now.
            outputs = self._run_now(func, args, kwargs)
            if not written:
                return outputs
            outputs = written[0]
        return self._record(func, args, kwargs, outputs, home)

    def _run_now(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator on temporary values."""
        written = written_by(func, args, kwargs)
        if any(map(_is_deferred, written)) and (
            len(written) > 1 or len(schema_of(func).returns) > 1
        ):
            raise ConfigError(
                f"The construction uses {func}, which deferred_init() cannot do later: it writes "
                f"to several tensors in a way that depends on values. Construct the module that "
                f"does so outside of the context."
            )
        self._keep_given(written)
        if is_random(func) and any(map(_is_deferred, written)):
            return None  # drawn when it is recorded
        args, kwargs = (map_leaves(self.make, each) for each in (args, kwargs))
        return func(*args, **kwargs)

    def make(self, value: Any) -> Any:
        """Return the current values of a deferred tensor; return other values unchanged."""
        if not isinstance(value, Tensor) or not _is_deferred(value):
            return value
        with patched(self, _is_paused=True):
            return self.recording.replay(self.recording.view(value))

    def defer(self, value: Any) -> Any:
        """Return a deferred copy of a real tensor; return other values unchanged."""
        if not isinstance(value, Tensor) or _is_deferred(value):
            return value
        copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
        return self._record(torch.ops.aten.clone.default, (value,), {}, copy, value.device)

    def _on_meta(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator for the shapes of its outputs, without values."""

        def shape_of(value: Any) -> Any:
            if not isinstance(value, Tensor) or _is_deferred(value):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)

        args, kwargs = map_leaves(shape_of, args), map_leaves(shape_of, kwargs)
        of_device = {"generator", "pin_memory"}
        kwargs = {key: None if key in of_device else each for key, each in kwargs.items()}
        if takes_device(func):
            kwargs["device"] = META
        return func(*args, **kwargs)

    def _record(
        self, func: OpOverload, args: Any, kwargs: Any, outputs: Any, home: torch.device
    ) -> Any:
        """Record an operator, unless its outputs are views."""
        written = written_by(func, args, kwargs)
        flat = tensors_of(outputs)
        made = [(i, each) for i, each in enumerate(flat) if not _is_deferred(each)]
        if not written and not made:
            return outputs
        generator, state = None, None
        if is_random(func):
            generator = kwargs.get("generator") or default_generator(home)
            state = generator.get_state()
            self._draw(func, args, kwargs)
        numbers = {i: self.recording.adopt(each, home) for i, each in made}
        inputs = [each for each in tensors_of([args, kwargs]) if _is_deferred(each)]
        read = {self.recording.view(each).storage for each in inputs}
        changed = {self.recording.view(each).storage for each in written}
        sources = {
            self.recording.view(each).storage
            for each in inputs
            if all(each is not other for other in written)
        }
        replaced = {
            self.recording.view(each).storage
            for each in written
            if is_value_free(func) and covers_storage(each)
        } - sources
        self.recording.append(
            Operation(
                function=func,
                args=map_leaves(self._note, args),
                kwargs=map_leaves(self._note, kwargs),
                reads=frozenset(read - replaced),
                writes=frozenset(changed | set(numbers.values())),
                overwrites=frozenset(replaced | set(numbers.values())),
                makes=tuple((i, numbers[i], Geometry.of(each)) for i, each in made),
                default_dtype=torch.get_default_dtype(),
                generator=generator,
                random_state=state,
            )
        )
        return outputs

    def _note(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if _is_deferred(value):
            return self.recording.view(value)
        given = RecordedInput(
            value, is_copied=value.nbytes < self.min_bytes or value.is_inference()
        )
        if value.nbytes >= self.min_bytes:
            self._given.append(given)
        return given

    def _draw(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """Draw the random numbers of an operator, to advance its generator."""
        first = args[0] if args and is_value_free(func) else None

        def stand_in(value: Any) -> Any:
            if not isinstance(value, Tensor) or not _is_deferred(value):
                return value.clone() if isinstance(value, Tensor) else value
            if first is None or value is not first:
                return self.make(value)
            return self._scratch_like(first)

        func(*map_leaves(stand_in, args), **map_leaves(stand_in, kwargs))
        if not written_by(func, args, kwargs):
            give_back_free_memory()  # the operator has allocated a tensor to draw into

    def _scratch_like(self, tensor: Tensor) -> Tensor:
        """Return a scratch tensor as large as a deferred one.

        Its memory is kept until the construction ends: if it were freed, later tensors would be
        allocated in it, and the next scratch tensor would need new memory.
        """
        home, needed = self.recording.home(tensor), tensor.untyped_storage().nbytes()
        scratch = self._scratch.get(home)
        if scratch is None or scratch.nbytes < needed:
            self._scratch.pop(home, None)
            scratch = None  # free it before the larger one is allocated
            scratch = self._scratch[home] = torch.empty(needed, dtype=torch.uint8, device=home)
        return Geometry.of(tensor).of_storage(scratch)

    def _keep_given(self, written: list[Tensor]) -> None:
        """Copy real tensors that the recording refers to before they are changed."""
        if not written or not self._given:
            return
        storages = {each.untyped_storage().data_ptr() for each in written}
        kept = []
        for given in self._given:
            if given.tensor.untyped_storage().data_ptr() in storages:
                given.copy()
            else:
                kept.append(given)
        self._given = kept


class Appearance(TorchFunctionMode):
    """Intercepts accesses to a tensor that bypass the dispatcher.

    torch's initializers do nothing on ``meta``, and constructors read a parameter's device.
    """

    def __init__(self, mode: DeferredInitMode) -> None:
        super().__init__()
        self.mode = mode

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return func(*args, **kwargs)
        if func == _SET_DATA:
            # Both sides of an assignment have to be deferred, or neither.
            change = self.mode.defer if recording_of(first) is not None else self.mode.make
            return func(first, change(args[1]), **kwargs)
        if recording_of(first) is not None:
            if func in _LOOKS:
                return _LOOKS[func](self.mode.recording.home(first))
            if func in _READS:
                return func(self.mode.make(first), *args[1:], **kwargs)
            if func == Tensor.__deepcopy__:
                return args[1].setdefault(id(first), first.clone())
        return func(*args, **kwargs)


def _getter(name: str) -> Any:
    """Return torch's name of the getter of a tensor attribute."""
    return getattr(Tensor, name).__get__


_LOOKS: dict[Any, Callable[[torch.device], Any]] = {
    _getter("device"): lambda home: home,
    _getter("is_cpu"): lambda home: home.type == "cpu",
    _getter("is_cuda"): lambda home: home.type == "cuda",
    _getter("is_meta"): lambda home: home.type == "meta",
    Tensor.get_device: lambda home: -1 if home.type == "cpu" else home.index or 0,
}
"""Attributes of a tensor that depend on its device."""

_READS = {Tensor.__array__, Tensor.numpy, Tensor.tolist}
"""Methods that read values and bypass the dispatcher."""

_SET_DATA: Any = getattr(Tensor, "data").__set__  # noqa: B009 - typed as what it gives


MIN_BYTES = 64 << 10
"""Tensors with fewer bytes are real: deferring them would save nothing."""

_active: ContextVar["DeferredInitMode | None"] = ContextVar("boltmesh_deferred_init", default=None)


@dataclass(frozen=True)
class _Origin:
    """State of a parameter at the end of its construction."""

    recording: Recording
    view: View
    version: int
    """Its version counter."""


_origins: MutableMapping[Tensor, _Origin] = WeakTensorKeyDictionary()
"""The ``_Origin`` of each deferred parameter: casts of a module give it another storage."""


@contextmanager
def deferred_init(*, min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Construct modules whose large parameters take no memory until a strategy makes them.

    ::

        with deferred_init():
            model = GPT(n_layer=96, n_embd=12288)
        trainer.fit(model)

    Operations of ``__init__`` on parameters are recorded and replayed later, unit by unit, with the
    same random numbers: the same seed gives the same weights, bit for bit, and leaves the
    generators in the same state. Construction may read values (they are made temporarily). Buffers
    and small tensors are real. A nested context has no effect.

    After the context, parameters are on ``meta`` until a strategy or ``materialize`` makes them. In
    between they can be cast, but not changed, copied or pickled (so not sent to ranks that are
    started with ``spawn``: build the model in ``configure_model`` there).

    Args:
        min_bytes: Tensors with at least so many bytes are deferred.

    Raises:
        ConfigError: If the construction does something that cannot be replayed.
    """
    if _active.get() is not None:
        yield
        return
    mode = DeferredInitMode(Recording(), min_bytes)
    token = _active.set(mode)
    try:
        with (
            register_module_parameter_registration_hook(mode.see_parameter),
            register_module_module_registration_hook(mode.see_module),
            register_module_buffer_registration_hook(mode.make_buffer),
            mode,
            Appearance(mode),
        ):
            yield
    finally:
        _active.reset(token)
    for parameter in mode.parameters():
        view = mode.recording.view(parameter)
        _origins[parameter] = _Origin(mode.recording, view, times_written(parameter))


def is_deferred(tensor: Tensor) -> bool:
    """Whether a tensor was created under ``deferred_init`` and is not materialized yet."""
    return recording_of(tensor) is not None or (tensor.is_meta and tensor in _origins)


def replay(tensor: Tensor, name: str) -> Tensor:
    """Return a deferred tensor with values, on the device that its construction requested.

    Args:
        tensor: A deferred tensor; it does not change.
        name: Its name, for messages.

    Raises:
        ConfigError: If it was changed after the construction, which is not recorded.
    """
    recording, origin = recording_of(tensor), _origins.get(tensor)
    if recording is None:
        assert origin is not None
        return origin.recording.replay(origin.view).to(tensor.dtype)
    if origin is not None and times_written(tensor) != origin.version:
        raise ConfigError(
            f"{name} was changed after the end of deferred_init(), where it does not exist and the "
            f"change is lost. Change it inside of the context."
        )
    return recording.replay(recording.view(tensor))

"""``deferred_init``: construct a model without its large tensors, and make them later one by one.

Large tensors are created on ``meta``, and operators on them are recorded. Operators that draw
random numbers also run, on a scratch tensor, so that generators advance as usual: tensors that are
real, and random numbers drawn later, are the same as without deferring. A replay starts each
operator from the recorded state of its generator, and gives the same bits.

``Appearance`` makes deferred tensors report the device on which they will be.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.deferred_initialization.mode import DeferredInitMode
from boltmesh.strategies.deferred_initialization.recording import Recording, View, recording_of
from boltmesh.strategies.torch_compat.tensors import times_written


class Appearance(TorchFunctionMode):
    """Handles accesses to a tensor that bypass the dispatcher.

    torch's initialisers do nothing on ``meta``, and constructors read a parameter's device.
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
"""Smaller tensors are real: deferring them would save nothing."""

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
        min_bytes: Tensors of this size and larger are deferred.

    Raises:
        ConfigError: If the construction does something that cannot be replayed.
    """
    if _active.get() is not None:
        yield
        return
    mode = DeferredInitMode(Recording(), min_bytes)
    token = _active.set(mode)
    hooks = [
        register_module_parameter_registration_hook(mode.see_parameter),
        register_module_module_registration_hook(mode.see_module),
        register_module_buffer_registration_hook(mode.make_buffer),
    ]
    try:
        with mode, Appearance(mode):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        _active.reset(token)
    for parameter in mode.parameters():
        view = mode.recording.view(parameter)
        _origins[parameter] = _Origin(mode.recording, view, times_written(parameter))


def is_deferred(tensor: Tensor) -> bool:
    """Whether a tensor was created under ``deferred_init`` and is not materialized yet."""
    return recording_of(tensor) is not None or (tensor.is_meta and tensor in _origins)


def replay(tensor: Tensor, name: str) -> Tensor:
    """Make a deferred tensor, on the device that its construction requested.

    Args:
        tensor: Deferred; it is not changed.
        name: Its name in messages.

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

"""Lets deferred tensors look as if they were where they will be."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.strategies.building.deferring import Deferring
from boltmesh.strategies.building.recording import recording_of


class Appearance(TorchFunctionMode):
    """Answers what is asked of a tensor past the dispatcher.

    torch's own initialisers do nothing on ``meta``, and authors ask for a parameter's device.
    """

    def __init__(self, mode: Deferring) -> None:
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
            # Both sides of an assignment have to be of one kind.
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
    """Return how torch names the reading of an attribute of tensors."""
    return getattr(Tensor, name).__get__


_LOOKS: dict[Any, Callable[[torch.device], Any]] = {
    _getter("device"): lambda home: home,
    _getter("is_cpu"): lambda home: home.type == "cpu",
    _getter("is_cuda"): lambda home: home.type == "cuda",
    _getter("is_meta"): lambda home: home.type == "meta",
    Tensor.get_device: lambda home: -1 if home.type == "cpu" else home.index or 0,
}
"""What a tensor says of its device."""

_READS = {Tensor.__array__, Tensor.numpy, Tensor.tolist}
"""What reads values past the dispatcher."""

_SET_DATA: Any = getattr(Tensor, "data").__set__  # noqa: B009 - typed as what it gives

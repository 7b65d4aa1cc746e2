"""Numbers that hooks make of gradients, such as a norm by hand, where a rank has part of them.

Within ``GradientReads`` each read of ``.grad`` is followed through the operations of a hook:

- A number made of a shard (a DTensor of ZeRO) is reduced over the ranks that share the parameter:
  ``item()`` would give the rank's own.
- A number made of the gradient of a parameter that a tensor axis divides is refused.
- Between stages of a pipeline a number of one parameter is right where it stays a tensor, as to
  scale that gradient. One that is read, or joined with those of others, is refused.
"""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.grad_norm import HeldShare, NormShare, PartShare
from boltmesh.strategies.pytree import tensors_in
from boltmesh.strategies.source_line import OF_TORCH, line_outside
from boltmesh.strategies.torch_compat.tensors import functions_unwatched

_GRAD: Any = Tensor.grad  # torch declares its descriptor as a plain attribute

_READERS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__format__"}
"""Methods that make something else than a tensor of values."""

_MACHINERY = (*OF_TORCH, os.path.abspath(__file__))


@dataclass(frozen=True)
class _GradientSource:
    """The gradients that a tensor was computed from."""

    parameters: frozenset[int]
    """The parameters of these gradients, by ``id``."""
    is_number: bool


class GradientReads(TorchFunctionMode):
    """Reduces or refuses numbers that are made of gradients, see above.

    Collective over the ranks that shard a parameter where a hook makes a number of its gradient.

    Args:
        shares: What the axes say of norms of gradients.
    """

    def __init__(self, shares: Iterable[NormShare]) -> None:
        super().__init__()
        divided = [each for each in shares if each.group.size() > 1]
        self._has_stages = any(isinstance(each, HeldShare) for each in divided)
        self._parts = {
            id(parameter)
            for each in divided
            if isinstance(each, PartShare)
            for parameter in each.parts()
        }
        self._origins: Any = WeakTensorKeyDictionary()

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is _GRAD:
            if isinstance(result, Tensor):
                self._origins[result] = _GradientSource(frozenset([id(args[0])]), is_number=False)
            return result
        given = [each for each in tensors_in((args, kwargs)) if each in self._origins]
        if not given:
            return result
        with functions_unwatched():
            return self._follow(func, given, result)

    def _follow(self, func: Callable[..., Any], given: Sequence[Tensor], result: Any) -> Any:
        origins = [self._origins[each] for each in given]
        parameters = frozenset().union(*(each.parameters for each in origins))
        has_number = any(each.is_number for each in origins)
        if has_number and (self._is_joint(parameters) or func.__name__ in _READERS):
            self._refuse(parameters)
        largest = max(each.numel() for each in given)
        if isinstance(result, (list, tuple)):
            made = [self._note(each, parameters, largest, has_number) for each in result]
            return type(result)(made) if type(result) in {list, tuple} else result
        return self._note(result, parameters, largest, has_number)

    def _note(self, result: Any, parameters: frozenset[int], largest: int, has_number: bool) -> Any:
        if not isinstance(result, Tensor) or result in self._origins:
            return result
        is_number = result.numel() == 1 and (has_number or largest > 1)
        if result.numel() == 1 < largest:
            if self._is_joint(parameters) or parameters & self._parts:
                self._refuse(parameters)
            result = _reduced(result)
        self._origins[result] = _GradientSource(parameters, is_number)
        return result

    def _is_joint(self, parameters: Collection[int]) -> bool:
        return self._has_stages and len(parameters) > 1

    def _refuse(self, parameters: frozenset[int]) -> None:
        if not self._has_stages and not parameters & self._parts:
            return
        has = "a part of these" if parameters & self._parts else "those of its stages alone"
        raise UnsupportedError(
            f"A hook ({line_outside(_MACHINERY)}) makes a number of gradients, and a rank has "
            f"{has}. Take trainer.strategy.gradient_norm(optimizer), the norm over all ranks of "
            f"the model, which is finite if all gradients are, and clip by self.clip_gradients or "
            f"torch.nn.utils.clip_grad_norm_."
        )


def _reduced(number: Tensor) -> Tensor:
    if not isinstance(number, DTensor) or not any(each.is_partial() for each in number.placements):
        return number
    return number.redistribute(placements=[Replicate()] * number.device_mesh.ndim)

"""What means were taken over, where no gradient is and autograd tells nothing: in evaluations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.pipeline.losses import Reduction
from boltmesh.strategies.torch_compat import DispatchMode, schema_of

_MEAN, _SUM = 1, 2
"""torch's numbers of reductions, as its operators take them."""


class Counts(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes of which reduction each 0-dim tensor is the result, while it is the active mode.

    Means keep their counts through what is done with scalars afterwards, such as adding two means
    over the same elements.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Tensor, Reduction]] = {}

    def of(self, value: Tensor) -> Reduction | None:
        """Return how a tensor became a scalar; None where that is not known."""
        known = self._known.get(id(value))
        return None if known is None else known[1]

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, Tensor) and first.ndim == 0:
            found = self._reduction(func, args, kwargs or {}, result)
            if found is not None:
                self._known[id(first)] = (first, found)
        return result

    def _reduction(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Reduction | None:
        name = schema_of(func).name.removeprefix("aten::")
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is None:
            return None
        if name in {"nll_loss_forward", "nll_loss2d_forward"}:
            kind = args[3] if len(args) > 3 else kwargs.get("reduction", _MEAN)
            if kind == _MEAN:
                return Reduction("mean", result[1], max(args[1].numel(), 1), name)
            return Reduction("sum", 1.0, 1.0, name)
        kind = _argument(func, args, kwargs, "reduction")
        if kind == _MEAN or name == "mean":
            return _mean(given.numel(), name)
        if kind == _SUM or (name == "sum" and given.ndim > 0):
            return Reduction("sum", 1.0, 1.0, name)
        return self._of_scalars(name, args)

    def _of_scalars(self, name: str, args: tuple[Any, ...]) -> Reduction | None:
        """Of a scalar that is made of scalars."""
        scalars = [each for each in args if isinstance(each, Tensor)]
        if any(each.ndim for each in scalars):
            return None
        known = [found for each in scalars if (found := self.of(each)) is not None]
        if not known:
            return None
        if name == "div" and known[0].kind == "sum" and len(scalars) == 2:
            return Reduction("mean", scalars[1], 1.0, name)
        alike = all(
            each.kind == known[0].kind and _equal(each.count, known[0].count) for each in known
        )
        return known[0] if alike else None


def _mean(count: int, name: str) -> Reduction:
    return Reduction("mean", float(count), max(float(count), 1.0), name)


def _argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    for position, each in enumerate(schema_of(func).arguments):
        if each.name == name:
            return args[position] if position < len(args) else kwargs.get(name, each.default_value)
    return None


def _equal(one: Tensor | float, other: Tensor | float) -> bool:
    return math.isclose(float(one), float(other))

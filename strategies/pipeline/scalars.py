"""Checks scalars that layers make for the loss, such as the auxiliary losses of routers.

The last stage sees of such a scalar neither how it was made nor what it was averaged over, and
weighs it by the rows of its microbatch. So the stage that makes it makes sure that it is a mean
over what grows with the rows.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.graph_alone import read_open
from boltmesh.strategies.pipeline.values import ValueSpec


class SentScalars:
    """What one stage sends in one step. Made anew for each step."""

    def __init__(self) -> None:
        self._per_row: dict[int, tuple[float, ...]] = {}

    def check(self, values: Sequence[Tensor], specs: Sequence[ValueSpec], rows: int) -> None:
        """Look at what one microbatch sends.

        Args:
            values: With their graphs.
            specs: What they are.
            rows: Of the microbatch.

        Raises:
            ConfigError: When a scalar that the loss may be made of is no mean over rows.
        """
        for number, (value, spec) in enumerate(zip(values, specs, strict=True)):
            if value.ndim == 0 and value.grad_fn is not None:
                self._check_scalar(number, value, spec, rows)

    def _check_scalar(self, number: int, value: Tensor, spec: ValueSpec, rows: int) -> None:
        try:
            terms = read_open(value.grad_fn, rows)
        except ConfigError as error:
            raise ConfigError(f"{spec.origin} is a scalar. {error}") from None
        found = tuple(float(term.count) / rows for term, kind in terms if kind == "mean")
        known = self._per_row.setdefault(number, found)
        is_alike = len(known) == len(found) and all(
            math.isclose(one, other, rel_tol=1e-5) for one, other in zip(known, found, strict=True)
        )
        if not is_alike or any(kind == "sum" for _, kind in terms):
            raise ConfigError(
                f"{spec.origin} is a scalar that is not a mean over the rows of its microbatch, so "
                f"what a later stage makes of it cannot be put together. Return a mean over all "
                f"rows, or the values of single rows, or use microbatches=1."
            )

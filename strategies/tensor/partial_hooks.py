"""Warns of hooks that receive only this rank's part of an activation.

The analysis of a step sees what a hook adds to the loss. It does not see a hook that is registered
later, nor where an activation goes that a hook stores for logging. Between divided layers such a
hook gets the channels of one rank, and with sequence parallelism its tokens.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from boltmesh.strategies.tensor.plan import block_of, region_blocks
from boltmesh.strategies.tensor.runtime.apply import AppliedPlan
from boltmesh.strategies.torch_compat.modules import hooks_of

if TYPE_CHECKING:
    from torch.nn import Module

_LIBRARIES = {"boltmesh", "lightning", "pytorch_lightning", "torch"}
"""Packages whose own hooks need no whole activations."""


class PartialActivationHooks:
    """Finds hooks on modules that take or give parts of activations.

    Args:
        applied: The plan that the model runs by.
    """

    def __init__(self, applied: AppliedPlan) -> None:
        plan, root = applied.plan, applied.module
        of_tokens = () if plan.sequence is None else plan.sequence.divided
        regions = region_blocks(plan)
        self._watched: list[tuple[str, Module, bool]] = [
            (name, root.get_submodule(name), on_outputs)
            for names, on_outputs in (
                (plan.divided_inputs, False),
                ((*plan.divided_outputs, *of_tokens), True),
            )
            for name in dict.fromkeys(names)
            if block_of(plan, name) not in regions
        ]
        self._known: set[str] = set()
        """Labels of the hooks already warned of."""

    def warn(self) -> None:
        """Warn once of each such hook. No communication: only one rank may have it."""
        by_label: dict[str, list[str]] = {}
        for name, module, on_outputs in self._watched:
            for hook in hooks_of(module, on_outputs=on_outputs):
                if label := _label(hook):
                    by_label.setdefault(label, []).append(name)
        for label in by_label.keys() - self._known:
            first, *others = dict.fromkeys(by_label[label])
            more = f" and {len(others)} more" if others else ""
            warnings.warn(
                f"Hook {label} on '{first}'{more} sees this rank's part of an activation that the "
                f"tensor axis divides: a mean or a norm of it is that of the part. To have it "
                f"whole, name a parameter of its layer in plan as 'whole'.",
                stacklevel=2,
            )
        self._known |= by_label.keys()


def _label(hook: Callable[..., Any]) -> str:
    """Return the name of a hook; empty for a library's."""
    while isinstance(hook, partial):
        hook = hook.func
    if hook.__module__.partition(".")[0] in _LIBRARIES:
        return ""
    return getattr(hook, "__qualname__", type(hook).__qualname__)

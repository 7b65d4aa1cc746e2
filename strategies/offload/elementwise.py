"""Any other optimizer that treats each element by itself, run as it is on stretches of host state.

What an optimizer does is found by trying it (``optimizer_probe``), also in two flat parts. Equal
results mean that it may be run on any stretch of a parameter: SGD, RMSprop, Adagrad and their
kind. Adafactor, Muon or LBFGS, which look at rows or at the whole, are refused.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.buckets import Slot
from boltmesh.strategies.offload.update_rule import ChunkStep, UpdateRule
from boltmesh.strategies.optimizer_probe import initial_state, mixes_elements
from boltmesh.strategies.torch_compat.optimizers import step_without_hooks

PROBE_SHAPE = (4, 6)
PROBE_SPLIT = 5
"""Not at a row's end."""
PROBE_STEPS = 3

_NOT_HYPER_PARAMETERS = {"params", "param_names"}


class _Settings(dict[str, Any]):
    """A group without its parameters."""


class ElementwiseRule(UpdateRule):
    """Runs a user's optimizer on views of a chunk. Slower than the fused kernel."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Try the optimizer.

        Raises:
            ConfigError: When it does not treat each element by itself.
        """
        self._step = step_without_hooks(optimizer)
        self._runner = copy.copy(optimizer)
        self._scalars: dict[tuple[Slot, int], dict[str, Any]] = {}
        if mixes_elements(optimizer):
            raise _refused(optimizer, "it looks at more than one element at a time")
        found = [self._probe(optimizer, group) for group in optimizer.param_groups]
        self.state_names = tuple(dict.fromkeys(name for names in found for name in names))

    @override
    def settings(self, group: Mapping[str, Any]) -> _Settings:
        kept = {key: value for key, value in group.items() if key not in _NOT_HYPER_PARAMETERS}
        return _Settings(kept)

    @override
    def apply(self, chunk: ChunkStep, coefficient: float) -> None:
        for each in chunk.pieces:
            slot, start, stop = each.piece.slot, each.piece.start, each.piece.stop
            gradient = each.gradient.mul_(coefficient) if coefficient != 1.0 else each.gradient
            own = slice(start - chunk.offset, stop - chunk.offset)
            views = [tensor[own] for tensor in chunk.state]
            key = (slot, start)
            stretches = dict(zip(self.state_names, views[1:], strict=True))
            # Unless it has been stepped, the optimizer makes the state itself, as it likes it.
            stored = self._scalars.get(key)
            given = None
            if stored is not None:
                given = stored | {k: v for k, v in stretches.items() if k not in stored}
            after = self._run(views[0], gradient, chunk.updates[slot].settings, given)
            for name, view in stretches.items():
                # Another group may have no such state, or None.
                if isinstance(after.get(name), Tensor):
                    value = after.pop(name)
                    if value.data_ptr() != view.data_ptr():
                        view.copy_(value)
                else:
                    after.setdefault(name, None)
            self._scalars[key] = after

    @override
    def scalars(self, slot: Slot) -> dict[str, Any]:
        return next((copy.copy(v) for (own, _), v in self._scalars.items() if own is slot), {})

    @override
    def load_scalars(self, slot: Slot, scalars: Mapping[str, Any], starts: Sequence[int]) -> None:
        for start in starts:
            self._scalars[slot, start] = copy.deepcopy(dict(scalars))

    def _run(
        self,
        parameter: Tensor,
        gradient: Tensor,
        settings: Mapping[str, Any],
        state: dict[str, Any] | None,
    ) -> dict[str, Any]:
        leaf = Parameter(parameter)
        leaf.grad = gradient
        runner = self._runner
        runner.param_groups = [{**settings, "params": [leaf]}]
        runner.state = defaultdict(dict)
        if state is not None:
            runner.state[leaf] = state
        self._step(runner)
        after = dict(runner.state[leaf])
        runner.param_groups, runner.state = [], defaultdict(dict)
        return after

    def _probe(self, optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
        settings = self.settings(group)
        initial: Mapping[str, Any] = next(
            (optimizer.state[p] for p in group["params"] if optimizer.state.get(p)), {}
        )
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(PROBE_SHAPE, generator=generator)
        parts = [each.clone() for each in whole.flatten().tensor_split([PROBE_SPLIT])]
        whole_state = initial_state(initial, whole)
        part_states = [initial_state(initial, each) for each in parts]
        try:
            for _ in range(PROBE_STEPS):
                gradient = torch.randn(PROBE_SHAPE, generator=generator)
                whole_state = self._run(whole, gradient.clone(), settings, whole_state)
                pieces = gradient.flatten().tensor_split([PROBE_SPLIT])
                part_states = [
                    self._run(part, piece.clone(), settings, state)
                    for part, piece, state in zip(parts, pieces, part_states, strict=True)
                ]
        except Exception as error:
            raise _refused(
                optimizer, f"its step fails on a part of a parameter ({error})"
            ) from error
        if not torch.allclose(whole.flatten(), torch.cat(parts), rtol=1e-6, atol=0):
            raise _refused(optimizer, "it looks at more than one element at a time")
        whole_state = whole_state or {}
        names = tuple(k for k, v in whole_state.items() if _is_flat(v, whole))
        for name, value in whole_state.items():
            if name not in names and isinstance(value, Tensor) and value.numel() > 1:
                raise _refused(optimizer, f"its state {name!r} has another shape than a parameter")
        return names


def _is_flat(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _refused(optimizer: Optimizer, why: str) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        f"{name} cannot be offloaded: {why}, and offloaded state is stepped in parts. Use AdamW, "
        f"Adam, SGD or another elementwise optimizer, or set strategy.offload_optimizer=null."
    )

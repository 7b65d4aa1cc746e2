"""Notes, as a step is probed, what autograd would keep of it for the backward pass."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from boltmesh.strategies.pipeline.replay.trace import Trace
from boltmesh.strategies.steps.structure import tensors_in
from boltmesh.strategies.torch_compat import FakeTensorMode, is_fake, make_fake, storage_key


class Keeping:
    """Fills :attr:`Trace.kept`: storages that operators save, by the unit during or after which.

    Tensors that exist in a probe (the batch, what is made of it alone) and parameters are there
    anyway, and left out. What a unit gets counts as kept by it: its first operators save it, and a
    layer that is run again in the backward pass keeps nothing else.
    """

    def __init__(self, root: Module, trace: Trace, mode: FakeTensorMode) -> None:
        self._trace = trace
        self._unit = ""
        state = [*root.parameters(), *root.buffers()]
        self._alive = [make_fake(each, mode) for each in state]
        """All tensors seen, so that no storage's key is used twice."""
        self._left_out = set(map(storage_key, self._alive))

    def watching(self) -> AbstractContextManager[Any]:
        """Within it, what is saved is noted."""
        return saved_tensors_hooks(self._pack, lambda packed: packed)

    def begin_unit(self, name: str, arguments: Any) -> None:
        """Say that a unit is called, with tensors that a backward pass through it will need."""
        self._unit = name
        self._trace.kept.setdefault(name, {})
        if torch.is_grad_enabled():
            for each in tensors_in(arguments):
                self._note(each)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._note(tensor)
        # Itself, an operator's output would hold the operator that holds it.
        return tensor.detach()

    def _note(self, tensor: Tensor) -> None:
        if not is_fake(tensor):
            return
        key = storage_key(tensor)
        if key not in self._left_out:
            self._alive.append(tensor.detach())
            kept = self._trace.kept.setdefault(self._unit, {})
            kept[key] = tensor.untyped_storage().nbytes()

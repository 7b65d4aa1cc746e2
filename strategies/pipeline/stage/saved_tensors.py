"""Notes, as a step is probed, what autograd would keep of it for the backward pass."""

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from boltmesh.strategies.pipeline.stage.trace import StepTrace
from boltmesh.strategies.pytree import tensors_in
from boltmesh.strategies.torch_compat.tensors import FakeTensorMode, is_fake, make_fake, storage_key


class SavedTensorWatch:
    """Fills :attr:`Trace.kept`: storages that operators save, by the unit during or after which.

    Tensors that exist in a probe (the batch, what is made of it alone) and parameters are there
    anyway, and left out. What a unit gets counts as kept by it: its first operators save it, and a
    layer that is run again in the backward pass keeps nothing else.
    """

    def __init__(self, root: Module, trace: StepTrace, mode: FakeTensorMode) -> None:
        self._trace = trace
        self._unit = ""
        self._num_repeated = 0
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
        if not _is_weight_cast(tensor):  # one for all microbatches, so none of this one
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

    def saved(self) -> Set[int]:
        """Return what was noted so far of the unit that was begun last."""
        return set(self._trace.kept[self._unit])

    def saved_since(self, before: Set[int], result: Any) -> list[tuple[int | None, int]]:
        """Return what was noted since, by size, and which tensor of the unit's result it is."""
        kept = self._trace.kept[self._unit]
        place = {storage_key(each): at for at, each in enumerate(tensors_in(result))}
        return [(place.get(key), size) for key, size in kept.items() if key not in before]

    def repeat(self, saved: Sequence[tuple[int | None, int]], result: Any) -> None:
        """Note as much for the unit that was begun last, which gives ``result``."""
        kept, made = self._trace.kept[self._unit], tensors_in(result)
        for at, size in saved:
            if at is None:
                self._num_repeated += 1
                kept[-self._num_repeated] = size  # of no tensor that exists
            else:
                self._alive.append(made[at].detach())
                kept[storage_key(made[at])] = size


def _is_weight_cast(tensor: Tensor) -> bool:
    """Whether autocast made a tensor of a trained parameter, transposed or not."""
    node = tensor.grad_fn
    while node is not None and node.name() in {"TBackward0", "TransposeBackward0"}:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"

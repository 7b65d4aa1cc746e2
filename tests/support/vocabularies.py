"""A tensor group of a test's ranks, and messages counted that they exchange."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boltmesh.strategies.tensor.plan import LossParallel
from boltmesh.strategies.tensor.runtime import vocab_modules  # noqa: F401
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.vocab_tensor import Vocabulary, wrap


def tensor_group() -> TensorGroup:
    return TensorGroup(dist.distributed_c10d._get_default_group(), torch.device("cpu"))


def vocabulary_of(size: int, loss_parallel: LossParallel = "auto") -> Vocabulary:
    return Vocabulary(tensor_group(), size, loss_parallel)


def divided_leaf(whole: Tensor, vocabulary: Vocabulary, dim: int) -> tuple[Tensor, Any]:
    """This rank's part, a leaf, and a tensor that looks whole made of it."""
    part = vocabulary.own(whole.detach(), dim).clone().requires_grad_()
    return part, wrap(part * 1, vocabulary, dim)


class _Messages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            sizes = [each.numel() * each.element_size() for each in tensors]
            self.sent.append((func.overloadpacket.__name__, max(sizes)))
        return func(*args, **(kwargs or {}))

    def by_name(self) -> dict[str, int]:
        return dict(Counter(name for name, _ in self.sent))


@contextmanager
def counted_messages() -> Iterator[_Messages]:
    """Name and bytes of every collective within, in order; of a gather, what it makes."""
    messages = _Messages()
    with messages:
        yield messages


def relative(found: Tensor, expected: Tensor, least: float = 1e-12) -> float:
    """The largest difference, as a part of the largest expected value or of ``least``."""
    scale = max(float(expected.abs().max()), least)
    return float((found.double() - expected.double()).abs().max()) / scale

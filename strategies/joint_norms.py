"""Norms of gradients of which each rank of a group has some, and clipping by them."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.clipping import gradients_of, is_replicated, scale_to_norm, tensor_norm
from boltmesh.strategies.torch_compat import local_tensor


class JointNorms:
    """Norms over the ranks of one model. Each is collective over the group.

    Of what several ranks have alike one of them counts, so that all get the same norm, to the bit.

    Args:
        group: The ranks of the model.
        elsewhere: Parameters of this rank whose gradients another one counts; looked at for each
            norm.
    """

    def __init__(self, group: ProcessGroup, elsewhere: Collection[Parameter]) -> None:
        self._group = group
        self._elsewhere = elsewhere
        self.sharers: ProcessGroup | None = None
        """The ranks that have shards of what this rank holds; None where it has the whole."""

    def counted(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return those of some gradients that this rank counts."""
        elsewhere = {id(each.grad) for each in self._elsewhere}
        own = [each for each in gradients if id(each) not in elsewhere]
        return own if self._beside is None else self._beside.counted(own)

    @property
    def groups(self) -> list[ProcessGroup]:
        """The ranks of each axis that the model is divided along, the innermost first."""
        return [*([] if self._beside is None else self._beside.groups), self._group]

    def norm(self, parameters: Iterable[Parameter]) -> Tensor:
        """Return the norm of the gradients of all ranks' parameters, fp64 and 0-dim."""
        given = gradients_of(parameters)
        return self._joint(given, 2.0)

    def clip(self, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most ``max_norm``; return it."""
        norm = self.norm(parameters)
        scale_to_norm(gradients_of(parameters), norm, max_norm)
        return norm

    def total(
        self,
        gradients: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Return a norm of gradients, called as torch calls its own function of this name.

        Raises:
            ConfigError: For a p that is not above 0.
            RuntimeError: As torch does, on all ranks.
        """
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ConfigError(f"norm_type={norm_type} is no norm over ranks. Use 2, 1 or inf.")
        given = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        norm = self._joint(given, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all ranks is not finite, "
                f"and error_if_nonfinite=True was asked for."
            )
        kind = torch.promote_types(given[0].dtype, torch.float32) if given else torch.float32
        return norm.to(kind)

    def _joint(self, given: Sequence[Tensor], norm_type: float) -> Tensor:
        device = _device_of(given, self._group)
        total = torch.zeros((), dtype=torch.float64, device=device)
        is_largest = math.isinf(norm_type)
        for each in self._own_parts(self.counted(given)):
            norm = tensor_norm(each, norm_type).to(total)
            total = torch.maximum(total, norm) if is_largest else total + norm**norm_type
        operator = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        if self.sharers is not None:
            dist.all_reduce(total, operator, group=self.sharers)
        dist.all_reduce(total, operator, group=self._group)
        return total if is_largest else total ** (1 / norm_type)

    def _own_parts(self, gradients: Iterable[Tensor]) -> Iterator[Tensor]:
        """Give what this rank counts of gradients: its shards, and the whole of what is alike."""
        is_first = self.sharers is None or self.sharers.rank() == 0
        for each in gradients:
            if is_first or not is_replicated(each):
                yield local_tensor(each)


def _device_of(gradients: Sequence[Tensor], group: ProcessGroup) -> torch.device:
    if gradients:
        return gradients[0].device
    is_cpu = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())


class PartNorms(JointNorms):
    """Norms where each rank has its part of some gradients, and all others alike.

    Args:
        group: The ranks of the model.
        parts: Parameters that this rank has a part of.
    """

    def __init__(self, group: ProcessGroup, parts: Iterable[Parameter]) -> None:
        super().__init__(group, ())
        self._parts = list(parts)

    @override
    def counted(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        if self._group.rank() == 0:
            return list(gradients)
        parts = {id(each.grad) for each in self._parts if each.grad is not None}
        return [each for each in gradients if id(each) in parts]

"""Norms of gradients over all stages, and clipping by them."""

import math
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.clipping import gradients_of, scale_to_norm, tensor_norm


class StageNorms:
    """Norms over the stages of one model. Each is collective over the pipeline.

    Args:
        group: The pipeline.
        elsewhere: Parameters of this rank that another one counts, as both hold them.
    """

    def __init__(self, group: ProcessGroup, elsewhere: Iterable[Parameter]) -> None:
        self._group = group
        self._elsewhere = list(elsewhere)

    def norm(self, parameters: Iterable[Parameter]) -> Tensor:
        """Return the norm of the gradients of all ranks' parameters, fp64 and 0-dim."""
        elsewhere = frozenset(map(id, self._elsewhere))
        return norm_over_stages(parameters, self._group, elsewhere)

    def clip(self, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Scale gradients so that their norm over all stages is at most ``max_norm``; return it."""
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
        """Return a norm of gradients, called as torch calls its own function of this name."""
        return total_norm_over_stages(
            gradients,
            float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
            group=self._group,
            counted_elsewhere={id(each.grad) for each in self._elsewhere},
        )


def norm_over_stages(
    parameters: Iterable[Parameter], group: ProcessGroup, counted_elsewhere: frozenset[int]
) -> Tensor:
    """Return the joint norm of all stages' gradients, fp64 and 0-dim.

    Collective over the pipeline.

    Args:
        parameters: Of an optimizer; the same on all ranks.
        group: The pipeline.
        counted_elsewhere: Parameters of which another rank counts the gradient.
    """
    gradients = [
        each.grad
        for each in parameters
        if each.grad is not None and id(each) not in counted_elsewhere
    ]
    device = _device_of(gradients, group)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for each in gradients:
        total += tensor_norm(each).to(device).double().square()
    dist.all_reduce(total, group=group)
    return total.sqrt()


def total_norm_over_stages(
    gradients: Tensor | Iterable[Tensor],
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    group: ProcessGroup,
    counted_elsewhere: Collection[int],
) -> Tensor:
    """Return a norm of gradients over all stages, of which each has its own; 0-dim.

    Collective over the pipeline.

    Args:
        gradients: Of parameters that are the same on all ranks.
        norm_type: The p of the norm: above 0, infinity too.
        error_if_nonfinite: Raise where the norm is not finite.
        group: The pipeline.
        counted_elsewhere: Gradients that another rank counts, by identity.

    Raises:
        ConfigError: For another p.
        RuntimeError: As torch does, on all ranks.
    """
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} is no norm over stages. Use 2, 1 or inf.")
    given = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    counted = [each for each in given if id(each) not in counted_elsewhere]
    total = torch.zeros((), dtype=torch.float64, device=_device_of(given, group))
    is_largest = math.isinf(norm_type)
    for each in counted:
        norm = tensor_norm(each, norm_type).to(total)
        total = torch.maximum(total, norm) if is_largest else total + norm**norm_type
    dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group)
    norm = total if is_largest else total ** (1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients of all stages is not finite, "
            f"and error_if_nonfinite=True was asked for."
        )
    return norm.to(torch.promote_types(given[0].dtype, torch.float32) if given else torch.float32)


def _device_of(gradients: Sequence[Tensor], group: ProcessGroup) -> torch.device:
    if gradients:
        return gradients[0].device
    is_cpu = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())

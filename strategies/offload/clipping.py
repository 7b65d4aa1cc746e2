"""The norm of offloaded gradients, and what it is clipped to in the coming step."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from boltmesh.strategies.grad_norm import joint_norm
from boltmesh.strategies.offload.gradient_handler import GradientHandler
from boltmesh.strategies.offload.state import OffloadedState
from boltmesh.strategies.torch_compat.tensors import local_tensor


class Clipper:
    """Remembers the norm and the coefficient of each optimizer until its step."""

    def __init__(
        self, kept: OffloadedState, arrivals: GradientHandler, device: torch.device
    ) -> None:
        self.norms: dict[Optimizer, float | None] = {}
        self.max_norms: dict[Optimizer, float] = {}
        self._kept = kept
        self._arrivals = arrivals
        self._device = device
        self._coefficients: dict[Optimizer, float] = {}

    def coefficient(self, optimizer: Optimizer) -> float:
        """What gradients are multiplied by in the coming step."""
        return self._coefficients.get(optimizer, 1.0)

    def forget(self, optimizer: Optimizer) -> None:
        """The gradients are gone."""
        self.norms.pop(optimizer, None)
        self._coefficients.pop(optimizer, None)

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the 2-norm of an optimizer's gradients over all ranks, before clipping.

        Collective over the ranks that share the model. None when there is no gradient.
        """
        if optimizer not in self.norms or self._arrivals.exposes_gradients:
            self.norms[optimizer] = self._norm(optimizer, 2.0)
        return self.norms[optimizer]

    def _norm(self, optimizer: Optimizer, norm_type: float) -> float | None:
        buckets = self._kept.buckets_of(optimizer)
        present = self._arrivals.present(buckets)
        if not present and len(self._kept.shares) == 1:
            return None  # which the ranks of the data axis see alike
        groups = [each.group for each in self._kept.shares if each.group.size() > 1]
        return joint_norm(present, norm_type, groups, self._device)

    def clip(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip an optimizer's gradients, in the coming step or in ``.grad`` where they are exposed.

        Collective over the ranks that share the model.

        Returns:
            Their norm over all ranks, before clipping; 0 when there is no gradient.
        """
        self._arrivals.early.check_all("its gradients are clipped")
        is_squared = norm_type == 2.0
        norm = self.gradient_norm(optimizer) if is_squared else self._norm(optimizer, norm_type)
        if is_squared:
            self.max_norms[optimizer] = max_norm
            self._arrivals.clipped.add(optimizer)
        if norm is None:
            return torch.zeros((), device=self._device)
        before = self._coefficients.get(optimizer, 1.0)
        coefficient = max_norm / (norm * before + 1e-6)
        coefficient = min(coefficient, 1.0)  # in this order NaN stays NaN, as in torch
        if self._arrivals.exposes_gradients:
            self._scale(optimizer, coefficient)
        else:
            self._coefficients[optimizer] = before * coefficient
        return torch.tensor(norm * before, device=self._device)

    def _scale(self, optimizer: Optimizer, coefficient: float) -> None:
        if coefficient == 1.0:
            return
        for bucket in self._kept.buckets_of(optimizer):
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    local_tensor(slot.parameter.grad).mul_(coefficient)

"""Optimizers that step whole matrices, and a model of matrices alone."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from typing_extensions import override

from tests.support.stack import VOCABULARY, Stack


class Shampoo(Optimizer):
    """Factors of the gradient's rows and columns; of a vector its squares. Groups count steps."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["calls"] += 1
            for each in group["params"]:
                if each.grad is not None:
                    self._step(each, each.grad, group)
        return loss

    def _step(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["count"] = 0
            state["momentum"] = torch.zeros_like(parameter)
            for name, size in zip(("left", "right"), grad.shape, strict=False):
                state[name] = 0.1 * torch.eye(size, dtype=grad.dtype)
        state["count"] += 1
        if grad.dim() > 1:
            state["left"] += grad @ grad.T
            state["right"] += grad.T @ grad
            grad = _root(state["left"]) @ grad @ _root(state["right"])
        state["momentum"].mul_(group["momentum"]).add_(grad)
        parameter.sub_(state["momentum"], alpha=group["lr"] / group["calls"] ** 0.5)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=1e-6) ** -0.25 @ vectors.T).to(matrix.dtype)


class Lamb(Optimizer):
    """Adam whose steps have a length by the norms of each parameter and of its step."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    change = self._direction(each, each.grad, group)
                    length, norm = each.norm(), change.norm()
                    ratio = torch.where((length > 0) & (norm > 0), length / norm, 1.0)
                    each.sub_(change * ratio, alpha=group["lr"])
        return loss

    def _direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        first, second = group["betas"]
        state = self.state[parameter]
        if not state:
            state["count"] = 0
            state["momentum"] = torch.zeros_like(parameter)
            state["squares"] = torch.zeros_like(parameter)
        state["count"] += 1
        state["momentum"].lerp_(grad, 1 - first)
        state["squares"].lerp_(grad * grad, 1 - second)
        root = (state["squares"] / (1 - second ** state["count"])).sqrt() + group["eps"]
        return state["momentum"] / (1 - first ** state["count"]) / root


class Lars(Optimizer):
    """SGD with momentum, at a rate by the norms of each parameter and of its gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": 1e-2, "trust": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self._step(each, each.grad, group)
        return loss

    def _step(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        decay, length, norm = group["weight_decay"], parameter.norm(), grad.norm()
        ratio = group["trust"] * length / (norm + decay * length)
        ratio = torch.where((length > 0) & (norm > 0), ratio, 1.0)
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].mul_(group["momentum"]).add_((grad + decay * parameter) * ratio)
        parameter.sub_(state["momentum"], alpha=group["lr"])


class Soap(Lamb):
    """Adam in the directions of the mean products of a matrix's gradients, which it keeps."""

    def _direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        if grad.dim() == 1:
            return super()._direction(parameter, grad, group)
        state = self.state[parameter]
        bases = []
        for name, product in (("left", grad @ grad.T), ("right", grad.T @ grad)):
            if name not in state:
                state[name] = torch.eye(product.shape[0]) * 1e-3
            state[name] = 0.9 * state[name] + 0.1 * product
            bases.append(torch.linalg.eigh(state[name].double())[1].to(grad.dtype))
        left, right = bases
        if "momentum" not in state:
            state["count"], state["momentum"] = 0, torch.zeros_like(parameter)
            state["squares"] = torch.zeros_like(parameter)
        state["count"] += 1
        state["momentum"].lerp_(grad, 0.1)
        turned = left.T @ grad @ right
        state["squares"].lerp_(turned * turned, 0.05)
        scaled = left.T @ state["momentum"] @ right / (state["squares"].sqrt() + 0.05)
        return left @ scaled @ right.T


class WideMuon(torch.optim.Muon):
    """Muon in fp32: in bf16 one rounding the other way moves a step by 1e-2 of its size."""

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with patch.object(Tensor, "bfloat16", Tensor.clone):
            return super().step(closure)


class Combined(Optimizer):
    """Steps several optimizers, each with its own of the groups."""

    def __init__(self, *inner: Optimizer) -> None:
        self.inner = list(inner)
        super().__init__([group for each in inner for group in each.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.inner:
            each.step()
        return loss


class Matrices(Stack):
    """Trained by one of them, in two groups."""

    def __init__(self, kind: str) -> None:
        super().__init__(depth=3, hidden=12 if kind == "even" else 11)  # which 2 ranks divide
        self.kind = kind
        if "muon" in kind:  # which takes nothing else
            self.embedding, self.head = nn.Embedding(VOCABULARY, 7), nn.Linear(7, VOCABULARY, False)
            for each in self.parameters():
                each.requires_grad_(each.dim() == 2)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        if "muon" in self.kind:
            groups: list[dict[str, Any]] = [
                {"params": trained[:2]},
                {"params": trained[2:], "weight_decay": 0.0},
            ]
            return (torch.optim.Muon if self.kind == "muon" else WideMuon)(groups, lr=0.02)
        if self.kind == "adafactor":
            return torch.optim.Adafactor(trained, lr=0.05)
        if self.kind == "fused_sgd":  # by element, but DTensor has no rule for its kernel
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9, fused=True)
        if self.kind == "rprop":  # nor for what it assigns by masks
            return torch.optim.Rprop(trained, lr=0.01)
        if self.kind == "combined":
            matrices, vectors = ([p for p in trained if (p.dim() > 1) == is_first]
                                 for is_first in (True, False))  # fmt: skip
            return Combined(WideMuon(matrices, lr=0.02), torch.optim.SGD(vectors, lr=0.1))
        if self.kind in {"lamb", "lars", "soap"}:
            return {"lamb": Lamb, "lars": Lars, "soap": Soap}[self.kind](trained)
        # The second group has one parameter: other ranks own nothing of it.
        return Shampoo([{"params": trained[1:]}, {"params": trained[:1], "lr": 0.02}])

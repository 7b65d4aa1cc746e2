"""The norm that gradients are clipped by is the true one."""

import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch.nn import Parameter

from boltmesh.strategies.ddp import DDPStrategy
from boltmesh.strategies.grad_norm import clip_by_norm, tensor_norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("numel", [0, 1, 1 << 16, (1 << 20) + 1, 3_000_017])
def test_the_norm_of_one_tensor_equals_double_precision(numel: int, norm_type: float) -> None:
    if numel == 0 and norm_type == float("inf"):
        pytest.skip("an empty tensor has no largest element")
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    exact = torch.linalg.vector_norm(tensor.double(), norm_type).item()
    assert tensor_norm(tensor, norm_type).item() == pytest.approx(exact, rel=2e-5)


def test_a_large_tensor_is_where_torch_goes_wrong() -> None:
    tensor = torch.randn(1 << 25, generator=torch.Generator().manual_seed(1))
    exact = tensor.double().norm().item()
    assert abs(torch.linalg.vector_norm(tensor).item() / exact - 1) > 5e-4
    assert tensor_norm(tensor).item() == pytest.approx(exact, rel=1e-5)


def test_clipping_equals_torch_on_small_tensors() -> None:
    ours = [Parameter(torch.randn(7, 3)), Parameter(torch.randn(5)), Parameter(torch.randn(2))]
    theirs = [Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = clip_by_norm(ours, 0.5)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_no_gradient_has_no_norm() -> None:
    assert clip_by_norm([Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_a_precision_plugin_with_a_norm_of_its_own_keeps_it() -> None:
    class Own(Precision):
        def clip_grad_by_norm(self, optimizer: object, clip_val: float) -> None:
            raise AssertionError

    own, plain = Own(), Precision()
    DDPStrategy(precision_plugin=own)
    DDPStrategy(precision_plugin=plain)
    assert "clip_grad_by_norm" not in vars(own)
    assert "clip_grad_by_norm" in vars(plain)

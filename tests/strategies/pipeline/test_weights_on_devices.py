"""Losses that are weighed by tensors, as on a GPU: no value is read, and nothing counts as zero."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from boltmesh.strategies.pipeline.loss.weights import _scaled
from boltmesh.strategies.torch_compat.tensors import scalar_on


class NoReads(TorchDispatchMode):
    """Raises where the value of a tensor is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "reads a value"
        return func(*args, **(kwargs or {}))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided": lambda x, mask: (x.square() * mask).sum() / mask.sum(),
    "divided and doubled": lambda x, mask: (x.square() * mask).sum() / mask.sum() * 2,
    "divided twice": lambda x, mask: ((x.square() * mask).sum() / mask.sum()) / mask.sum(),
    "cast": lambda x, mask: ((x.square() * mask).sum() / mask.sum()).double(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("counted", [0, 1, 3])
def test_a_loss_is_weighed_without_reading_it(name: str, counted: int) -> None:
    x = torch.arange(1.0, 5.0).requires_grad_()
    mask = (torch.arange(4) < counted).float()
    loss = LOSSES[name](x, mask)
    weight = mask.sum()
    with NoReads():
        scaled = _scaled(loss, weight)
        (gradient,) = torch.autograd.grad(scaled, [x])
    if not counted:
        assert loss.isnan()
        assert scaled.item() == 0.0
        assert torch.equal(gradient, torch.zeros(4))
        return
    again = LOSSES[name](x, mask)
    torch.testing.assert_close(scaled, again * weight, check_dtype=False)
    torch.testing.assert_close(gradient, torch.autograd.grad(again * weight, [x])[0])


def test_a_loss_that_is_no_number_stays_none_where_it_counts() -> None:
    x = torch.tensor([float("nan"), 1.0], requires_grad=True)
    mask = torch.ones(2)
    scaled = _scaled((x * mask).sum() / mask.sum(), mask.sum())
    assert scaled.isnan()


def test_a_number_is_put_on_a_device_by_a_kernel() -> None:
    meta = torch.device("meta")
    for value in (0.5, torch.tensor(0.5), torch.zeros((), device="meta")):
        made = scalar_on(value, meta)
        assert (made.device, made.dtype, made.shape) == (meta, torch.float64, torch.Size([]))
    assert scalar_on(1 / 3, torch.device("cpu")).item() == 1 / 3

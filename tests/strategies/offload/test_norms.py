"""The norm that decides about clipping is right where torch's is not."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from boltmesh.strategies.grad_norm import joint_norm
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.stepper import BucketGradients
from boltmesh.strategies.offload.streams import CopyStream

CPU = torch.device("cpu")


def held(gradients: list[Tensor], padded: list[tuple[int, ...]]) -> BucketGradients:
    slots = [
        Slot(i, str(i), Parameter(torch.zeros(())), tuple(g.shape), shape, torch.float32)
        for i, (g, shape) in enumerate(zip(gradients, padded, strict=True))
    ]
    made = BucketGradients(Bucket("", slots), CPU, None, CopyStream(CPU))
    for slot, gradient in zip(slots, gradients, strict=True):
        made.add(slot, gradient)
    return made


def test_the_norm_of_a_large_gradient_is_right_where_torch_loses_digits() -> None:
    gradient = torch.randn(1 << 25, generator=torch.Generator().manual_seed(0))
    true = math.sqrt(math.fsum(p.double().square().sum().item() for p in gradient.split(1 << 20)))
    found = joint_norm([held([gradient], [tuple(gradient.shape)])], [], CPU)
    assert found is not None
    assert abs(float(gradient.norm()) / true - 1) > 1e-4  # once torch is right, this can go
    assert abs(found / true - 1) < 1e-6


def test_gradients_in_one_storage_are_counted_once_and_without_strangers() -> None:
    # As FSDP2 hands them over: views of one tensor with zeros between, for padding.
    storage = torch.zeros(40)
    storage[:9] = torch.arange(1.0, 10.0)
    storage[12:22] = torch.arange(10.0) - 4
    storage[30:34] = 100.0  # somebody else's
    parts = [storage[:9].view(3, 3), storage[12:22].view(5, 2)]
    found = joint_norm([held(parts, [(4, 3), (5, 2)])], [], CPU)
    whole = torch.cat([part.flatten() for part in parts])
    assert found == pytest.approx(float(torch.linalg.vector_norm(whole)), rel=1e-6)


def test_there_is_no_norm_without_a_gradient() -> None:
    assert joint_norm([], [], CPU) is None


def test_a_shard_without_rows_has_norm_zero() -> None:
    assert joint_norm([held([torch.zeros(0, 3)], [(1, 3)])], [], CPU) == 0.0


def test_a_second_gradient_of_a_parameter_is_added() -> None:
    made = held([torch.ones(4)], [(4,)])
    assert made.square() == 4.0
    (slot,) = made.slots
    made.add(slot, torch.ones(4))
    assert made.square() == 16.0
    assert made.num_arrivals == 2

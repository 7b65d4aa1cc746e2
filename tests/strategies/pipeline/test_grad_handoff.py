"""Gradients made before ``zero_grad`` arrive with the backward pass of the loss."""

import pytest
import torch
from torch import nn

from boltmesh.strategies.pipeline.training import GradHandoff


def test_gradients_come_with_the_backward_pass_and_are_scaled() -> None:
    layer = nn.Linear(3, 1)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    inputs = torch.randn(4, 3)
    wanted = torch.autograd.grad(layer(inputs).mean(), list(layer.parameters()))
    handoff = GradHandoff([*layer.parameters(), frozen])
    with handoff.capture():
        loss = layer(inputs).mean() * 6
        loss.backward()
    assert layer.weight.grad is None
    signed = handoff.attach_to_loss(loss, 2.0)
    assert signed.item() == loss.item()
    layer.zero_grad()
    (signed / 3).backward()
    for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert frozen.grad is None


def test_parameters_that_a_step_unfreezes_have_their_gradients() -> None:
    layer = nn.Linear(3, 1).requires_grad_(False)
    inputs = torch.randn(4, 3)
    handoff = GradHandoff(layer.parameters())
    with handoff.capture():
        layer.requires_grad_(True)  # as the prototypes of SwaV do in their forward pass
        loss = layer(inputs).mean() * 2
        loss.backward()
    layer.zero_grad()
    handoff.attach_to_loss(loss, 2.0).backward()
    torch.testing.assert_close(layer.weight.grad, inputs.mean(0, keepdim=True))


def test_gradients_are_added_to_those_of_earlier_batches() -> None:
    layer = nn.Linear(3, 1)
    earlier = [torch.randn_like(each) for each in layer.parameters()]
    for parameter, gradient in zip(layer.parameters(), earlier, strict=True):
        parameter.grad = gradient.clone()
    inputs = torch.randn(4, 3)
    wanted = torch.autograd.grad(layer(inputs).mean(), list(layer.parameters()))
    handoff = GradHandoff(layer.parameters())
    with handoff.capture():
        loss = layer(inputs).mean()
        loss.backward()
    for parameter, gradient in zip(layer.parameters(), earlier, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    handoff.attach_to_loss(loss).backward()
    for parameter, before, added in zip(layer.parameters(), earlier, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, before + added)


def test_an_error_within_gives_earlier_gradients_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 5.0)
    handoff = GradHandoff([parameter])
    with pytest.raises(ZeroDivisionError), handoff.capture():
        _ = 1 / 0
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [5.0, 5.0]


def test_all_ranks_divide_alike_whatever_they_hold_the_total_in() -> None:
    made = []
    for total in (3.0, torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64)):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        handoff = GradHandoff([parameter])
        with handoff.capture():
            (parameter * torch.tensor([1.0, 3.0, 5.0, 7.0])).sum().backward()
        handoff.attach_to_loss(torch.tensor(1.0), total).backward()
        assert parameter.grad is not None
        made.append(parameter.grad)
    assert made[0].tolist() == made[1].tolist() == made[2].tolist()
    wanted = torch.tensor([1.0, 3.0, 5.0, 7.0]) / 3
    assert made[0].tolist() == wanted.bfloat16().tolist()


def test_without_any_weight_gradients_are_zeros() -> None:
    parameter = nn.Parameter(torch.ones(2))
    handoff = GradHandoff([parameter])
    with handoff.capture():
        (parameter * 0).sum().backward()
    handoff.attach_to_loss(torch.tensor(float("nan")), 0.0).backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]

"""The two halves of a backward pass give what the whole gives, for graphs of every kind."""

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from boltmesh.strategies.pipeline.runtime.backward import StageGraph, backward, backward_inputs

Made = tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[nn.Parameter]]
"""Inputs, outputs and parameters of a stage."""


def leaf(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(requires_grad)


def parameter(*shape: int, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64), requires_grad)


def chain() -> Made:
    x, w, v, bias = leaf(3, 4), parameter(4, 4), parameter(4, 4), parameter(4)
    return (x,), (torch.tanh(x @ w + bias) @ v,), [w, v, bias]


def inputs_without_gradient() -> Made:
    x, y, w = leaf(3, 4, requires_grad=False), leaf(3, 4), parameter(4, 4)
    return (x, y), (x @ w + y * 2,), [w]


def no_input_needs_a_gradient() -> Made:
    x, w = leaf(3, 4, requires_grad=False), parameter(4, 4)
    return (x,), (x @ w,), [w]


def no_inputs() -> Made:
    w = parameter(5, 4)
    return (), (embedding(torch.tensor([0, 3, 3]), w),), [w]


def unused_input() -> Made:
    x, y, w = leaf(3, 4), leaf(2), parameter(4, 4)
    return (x, y), (x @ w,), [w]


def no_input_reaches_an_output() -> Made:
    x, w = leaf(3, 4), parameter(4)
    return (x,), (w * 3, x.detach() @ w), [w]


def output_of_parameters_alone() -> Made:
    x, w, v = leaf(3, 4), parameter(4, 4), parameter(4)
    return (x,), (x @ w, v.exp()), [w, v]


def parameter_on_both_ways() -> Made:
    x, w = leaf(3, 4), parameter(4)
    return (x,), (x * w, w.exp(), (w * 2).sin()), [w]


def outputs_that_need_none() -> Made:
    x, w = leaf(3, 4), parameter(4, 4)
    return (x,), (x @ w, torch.ones(2, dtype=torch.float64), (x > 0), (x @ w).detach()), [w]


def input_handed_on() -> Made:
    x, y, w = leaf(3, 4), leaf(3, 4), parameter(4, 4)
    return (x, y), (x, x @ w + y, y), [w]


def views_and_equal_outputs() -> Made:
    x, w = leaf(3, 4), parameter(4, 4)
    z = x @ w
    return (x,), (z, z, z.T, z[0], z[:1].expand(5, 4)), [w]


def parameter_used_around_another() -> Made:
    x, w, v, bias = leaf(3, 4), parameter(4, 4), parameter(4, 4), parameter(4)
    return (x,), (torch.tanh(torch.tanh(x @ w) @ v + bias) @ w,), [w, v, bias]


def shared_transform() -> Made:
    x, w, scale, v = leaf(3, 4), parameter(4, 4), parameter(4), parameter(4, 4)
    normed = scale * w / w.norm(dim=0)
    return (x,), (torch.tanh(torch.tanh(x @ normed) @ v) @ normed,), [w, scale, v]


def norms_and_residuals() -> Made:
    x, w, gain, bias = leaf(3, 4), parameter(4, 4), parameter(4), parameter(4)
    y = x + layer_norm(x, (4,), gain, bias) @ w
    return (x,), (y + layer_norm(y, (4,), gain, bias) @ w,), [w, gain, bias]


def frozen_between() -> Made:
    x, w, frozen = leaf(3, 4), parameter(4, 4), parameter(4, 4, requires_grad=False)
    return (x,), (torch.relu(x @ frozen) @ w @ frozen,), [w, frozen]


def reentrant_checkpoint() -> Made:
    x, w, v = leaf(3, 4), parameter(4, 4), parameter(4, 4)
    return (x,), (checkpoint(lambda y: torch.tanh(y @ w), x, use_reentrant=True) @ v,), [w, v]


def checkpointed() -> Made:
    x, w, v = leaf(3, 4), parameter(4, 4), parameter(4, 4)
    y = checkpoint(lambda y: torch.tanh(y @ w) @ w, x, use_reentrant=False)
    return (x,), (y @ v,), [w, v]


def complex_values() -> Made:
    x = torch.randn(3, 4, dtype=torch.complex128).requires_grad_()
    w = nn.Parameter(torch.randn(4, dtype=torch.complex128))
    return (x,), ((x * w).conj(), (x * w).abs()), [w]


class Twofold(torch.autograd.Function):
    """A function of one's own, which is not told what it is asked for."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, first, second):
        x, w = ctx.saved_tensors
        return first * w + second, (first * x + second).sum(0)


def own_function() -> Made:
    x, w = leaf(3, 4), parameter(4)
    a, b = Twofold.apply(x, w)
    c, _ = Twofold.apply(a + b, w)
    return (x,), (c,), [w]


CASES = [
    chain, inputs_without_gradient, no_input_needs_a_gradient, no_inputs, unused_input,
    no_input_reaches_an_output, output_of_parameters_alone, parameter_on_both_ways,
    outputs_that_need_none, input_handed_on, views_and_equal_outputs,
    parameter_used_around_another, shared_transform, norms_and_residuals, frozen_between,
    reentrant_checkpoint, checkpointed, complex_values, own_function,
]  # fmt: skip


def made(case: Callable[[], Made]) -> Made:
    torch.manual_seed(3)
    return case()


def grads_of(outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """What comes back; one that needs no gradient is none."""
    torch.manual_seed(4)
    return tuple(torch.randn_like(each) if each.requires_grad else None for each in outputs)


def wanted_of(case: Callable[[], Made]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    inputs, outputs, parameters = made(case)
    grads = grads_of(outputs)
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return [each.grad for each in inputs], [each.grad for each in parameters]


def assert_same(found, wanted) -> None:
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_whole_backward_pass(case: Callable[[], Made]) -> None:
    wanted_inputs, wanted_parameters = wanted_of(case)
    inputs, outputs, parameters = made(case)
    found = backward(StageGraph.of(inputs, outputs), grads_of(outputs))
    assert_same(found, wanted_inputs)
    assert_same([each.grad for each in parameters], wanted_parameters)
    assert all(each.grad is None for each in inputs)


@pytest.mark.parametrize("case", CASES)
def test_the_halves_make_the_whole(case: Callable[[], Made]) -> None:
    wanted_inputs, wanted_parameters = wanted_of(case)
    inputs, outputs, parameters = made(case)
    graph, grads = StageGraph.of(inputs, outputs), grads_of(outputs)
    del outputs
    found, later = backward_inputs(graph, grads)
    assert_same(found, wanted_inputs)
    if case is not reentrant_checkpoint:
        assert all(each.grad is None for each in parameters if each.dim() > 1)
    later.run()
    assert_same([each.grad for each in parameters], wanted_parameters)
    later.run()  # nothing is left of it
    assert_same([each.grad for each in parameters], wanted_parameters)


def test_gradients_are_added_to_and_hooks_run_once() -> None:
    inputs, outputs, (w, v, bias) = made(chain)
    graph, grads = StageGraph.of(inputs, outputs), grads_of(outputs)
    before = torch.ones_like(w)
    w.grad = before.clone()
    heard = []
    for each in (w, v, bias):
        each.register_post_accumulate_grad_hook(lambda p: heard.append(tuple(p.shape)))
    _, later = backward_inputs(graph, grads)
    assert heard == [(4,)]
    later.run()
    assert heard[0] == (4,)
    assert sorted(heard[1:]) == [(4, 4), (4, 4)]
    wanted = wanted_of(chain)[1][0]
    assert wanted is not None
    torch.testing.assert_close(w.grad, wanted + before)


def test_the_halves_do_their_own_work_only() -> None:
    """By operations: the first half computes no gradient of a weight, the second nothing else."""
    x, w, v = leaf(8, 16), parameter(16, 16), parameter(16, 16)
    outputs = (torch.tanh(x @ w) @ v,)
    graph = StageGraph.of((x,), outputs)
    one = 2 * 8 * 16 * 16
    with FlopCounterMode(display=False) as counted:
        _, later = backward_inputs(graph, (torch.ones_like(outputs[0]),))
    assert counted.get_total_flops() == 2 * one
    with FlopCounterMode(display=False) as counted:
        later.run()
    assert counted.get_total_flops() == 2 * one


def count_calls(monkeypatch, run: Callable[[], object]) -> int:
    calls: list[None] = []
    backward = torch.autograd.backward

    def counted(*args, **kwargs):
        calls.append(None)
        backward(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd, "backward", counted)
        run()
    return len(calls)


def attention_block(x: Tensor, norm: Tensor, weights: Sequence[Tensor]) -> Tensor:
    normed = layer_norm(x, (4,), norm)
    q, k, v, o = weights
    return x + torch.softmax((normed @ q) @ (normed @ k).T, -1) @ (normed @ v) @ o


def test_matrices_beside_each_other_take_one_call_and_norms_none(monkeypatch) -> None:
    """Queries, keys and values of a block are one call, the output's matrix is another."""
    torch.manual_seed(5)
    x, norms = leaf(3, 4), [parameter(4) for _ in range(3)]
    blocks = [[parameter(4, 4) for _ in range(4)] for _ in norms]
    hidden = x
    for norm, weights in zip(norms, blocks, strict=True):
        hidden = attention_block(hidden, norm, weights)
    graph, seed = StageGraph.of((x,), (hidden,)), torch.randn_like(hidden)
    trained = [*norms, *(weight for weights in blocks for weight in weights)]
    wanted = torch.autograd.grad(hidden, [x, *trained], seed, retain_graph=True)
    halves = []
    assert count_calls(monkeypatch, lambda: halves.append(backward_inputs(graph, (seed,)))) == 1
    (of_input,), later = halves[0]
    assert all(each.grad is not None for each in norms)
    assert all(each.grad is None for weights in blocks for each in weights)
    assert count_calls(monkeypatch, later.run) == 2 * len(blocks)
    assert_same([of_input, *(each.grad for each in trained)], wanted)


@pytest.mark.parametrize("has_halves", [False, True])
def test_nothing_is_kept_once_it_is_over(has_halves: bool) -> None:
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        kept.append(weakref.ref(copy))
        return copy

    x, w, v = leaf(3, 4), parameter(4, 4), parameter(4, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        outputs = (torch.tanh(x @ w) @ v,)
    graph, grads = StageGraph.of((x,), outputs), grads_of(outputs)
    del outputs
    assert kept
    assert all(each() is not None for each in kept)
    gc.disable()  # no cycle may hold them
    try:
        if has_halves:
            _, later = backward_inputs(graph, grads)
            del graph
            later.run()
        else:
            backward(graph, grads)
            del graph
        assert all(each() is None for each in kept)
    finally:
        gc.enable()

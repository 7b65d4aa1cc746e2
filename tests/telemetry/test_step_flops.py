"""FLOPs of a batch are those of its products, forward and backward, by hand."""

from functools import partial
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from boltmesh.strategies import ContextParallelStrategy, TensorParallelStrategy
from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.writer.phases import PhaseClock
from boltmesh.telemetry.writer.throughput import FlopCounter
from boltmesh.telemetry.writer.torch_compat.flops import FunctionFlops, can_count
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data
from tests.telemetry.test_callback import Model, loader, look, trainer

ROWS, WIDTH, HIDDEN = 5, 8, 16
FORWARD = 2 * ROWS * WIDTH * HIDDEN
"""One product of (ROWS, WIDTH) with (WIDTH, HIDDEN)."""


def counted(step):
    calls = FunctionFlops(lambda: True)
    with calls:
        step()
    return calls.total


def test_a_linear_layer_takes_one_product_forward_and_two_backward():
    layer, x = nn.Linear(WIDTH, HIDDEN), torch.randn(ROWS, WIDTH, requires_grad=True)
    assert counted(lambda: layer(x).sum().backward()) == 3 * FORWARD
    with torch.no_grad():
        assert counted(lambda: layer(x)) == FORWARD
    # What nobody wants the gradient of is not computed.
    assert counted(lambda: layer(x.detach()).sum().backward()) == 2 * FORWARD


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient @ b.mT, a.mT @ gradient


def test_products_of_a_gradient_written_in_python_count():
    a = torch.randn(ROWS, WIDTH, requires_grad=True)
    b = torch.randn(WIDTH, HIDDEN, requires_grad=True)
    assert counted(lambda: _Product.apply(a, b).sum().backward()) == 3 * FORWARD


def _run_backward():
    autograd: Any = torch.autograd
    return autograd._engine_run_backward


def _keeps_products(context, operator, *args, **kwargs):
    return operator in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


@pytest.mark.parametrize("run", ["tensor", "backward", "grad"])
@pytest.mark.parametrize("is_selective", [False, True])
def test_recomputed_activations_are_hardware_flops_alone(run, is_selective):
    layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH), nn.GELU())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
    options: Any = {"context_fn": contexts} if is_selective else {}

    def step():
        loss = checkpoint(layers, x, use_reentrant=False, **options).sum()
        if run == "tensor":
            loss.backward()
        elif run == "backward":
            torch.autograd.backward([loss])
        else:
            torch.autograd.grad(loss, [x, *layers.parameters()])

    before = _run_backward()
    calls = FunctionFlops(lambda: True)
    with calls:
        step()
    assert calls.total == 6 * FORWARD
    assert calls.recomputed == (0 if is_selective else 2 * FORWARD)
    assert _run_backward() is before
    step()
    assert calls.total == 6 * FORWARD
    with calls:
        layers(x).sum().backward()  # computes nothing again
    assert (calls.total, calls.recomputed) == (12 * FORWARD, 0 if is_selective else 2 * FORWARD)


def test_an_error_in_a_backward_pass_leaves_nothing_behind():
    before = _run_backward()
    layer = nn.Linear(2, 2)
    loss = layer(torch.ones(2, 2)).sum()
    loss.backward()
    with FunctionFlops(lambda: True), pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert _run_backward() is before
    assert len(_get_current_function_mode_stack()) == 0


@pytest.mark.parametrize(("is_causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_counts_its_two_products_and_five_backward(is_causal, share):
    batch, heads, tokens, width = 2, 3, 16, 8
    q, k, v = (torch.randn(batch, heads, tokens, width, requires_grad=True) for _ in range(3))

    def step():
        attend = functional.scaled_dot_product_attention
        attend(q, k, v, is_causal=is_causal).sum().backward()

    product = 2 * batch * heads * tokens * tokens * width
    assert counted(step) == 7 * product * share


def test_a_convolution_counts():
    layer = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    x = torch.randn(2, 3, 8, 8)
    forward = 2 * 2 * 4 * 8 * 8 * 3 * 9
    assert counted(lambda: layer(x).sum().backward()) == 2 * forward


def test_products_written_in_any_way_count():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    forward = 2 * 2 * 3 * 4 * 5
    with torch.no_grad():
        for product in (
            lambda: a @ b,
            lambda: torch.matmul(a, b),
            lambda: a.matmul(b),
            lambda: torch.bmm(a, b),
            lambda: torch.einsum("bij,bjk->bik", a, b),
            lambda: torch.baddbmm(torch.zeros(2, 3, 5), a, b),
        ):
            assert counted(product) == forward


def test_attention_and_recurrent_layers_count():
    attention = nn.MultiheadAttention(8, 2, batch_first=False, bias=False)
    x = torch.randn(6, 3, 8)
    forward = 3 * (4 * 2 * 6 * 8 * 8 + 2 * 2 * 6 * 6 * 8)
    assert counted(lambda: attention(x, x, x)) == 3 * forward
    layer = nn.LSTM(8, 16, batch_first=True)
    with torch.no_grad():
        assert counted(lambda: layer(torch.randn(3, 5, 8))) == 2 * 15 * 4 * 16 * (8 + 16)


def test_numbers_of_a_counted_step_are_those_of_any_other():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    x = torch.randn(3, 7, 16)

    def gradients(is_counted):
        torch.manual_seed(1)
        layer.zero_grad()
        with FunctionFlops(lambda: True) if is_counted else torch.enable_grad():
            layer(x).square().mean().backward()
        return [each.grad.clone() for each in layer.parameters()]

    for one, other in zip(gradients(is_counted=True), gradients(is_counted=False), strict=True):
        assert torch.equal(one, other)


def test_only_forward_and_backward_phases_count():
    clock = PhaseClock()
    counter = FlopCounter(clock)
    a = torch.randn(4, 4)
    for name in ("optimizer", "forward", "backward", "data"):
        clock.enter(PHASES.index(name))
        counter.enter_phase()
        a @ a
        counter.leave_phase()
        clock.leave()
    assert counter.stop() == (2 * 2 * 4**3, 0)
    assert len(_get_current_function_mode_stack()) == 0


def test_an_error_in_a_phase_leaves_no_counter_behind():
    clock = PhaseClock()
    counter = FlopCounter(clock)
    clock.enter(PHASES.index("backward"))
    counter.enter_phase()
    counter.stop()
    assert len(_get_current_function_mode_stack()) == 0


def test_compiled_parts_cannot_be_counted():
    module = lightning.LightningModule()
    module.layer = nn.Linear(2, 2)
    assert can_count(module)
    module.layer.compile(backend="eager")
    assert not can_count(module)


def worker(rank, world_size):
    trainer(max_epochs=1, limit_val_batches=0, devices=1).fit(Model(), loader())
    return look()


@pytest.mark.ranks
def test_a_run_counts_its_second_batch_by_default():
    (seen,) = run_ranks(worker, 1)
    (rank,) = seen.ranks
    # One product of (4, 4) with (4, 4) forward, and one for the gradient of the weight.
    assert rank.flops_per_batch == 2 * 2 * 4**3
    assert rank.recomputed_flops_per_batch == 0


def pipeline_worker(rank, world_size):
    found = []
    for kind in (None, "full", "selective"):
        strategy = pipeline(telemetry=True, activation_checkpointing=kind)
        quiet_trainer(world_size, strategy, max_steps=3).fit(Stack(depth=4), token_data(32, 8))
        seen = look().ranks[rank]
        found.append((seen.flops_per_batch, seen.recomputed_flops_per_batch))
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_a_pipeline_tells_recomputation_apart():
    for (model, nothing), full, selective in run_ranks(pipeline_worker, 2):
        assert nothing == 0
        assert full[0] == model
        assert 0 < full[1] < model / 2
        assert selective == (model, 0)


def divided_worker(rank, world_size):
    found = []
    for strategy in (TensorParallelStrategy(), ContextParallelStrategy()):
        model = Stack(depth=2, width=32, hidden=64)
        quiet_trainer(world_size, strategy, max_steps=3).fit(model, token_data(32, 8))
        found.append(look().ranks[rank].flops_per_batch)
    return found


@pytest.mark.ranks
def test_ranks_that_divide_layers_or_sequences_count_their_part():
    tokens, blocks, head = 8 * 5, 2 * 2 * 32 * 64, 32 * 13
    by_layers, by_sequence = zip(*run_ranks(divided_worker, 2), strict=True)
    assert sum(by_layers) == 6 * tokens * (blocks + 2 * head)  # it is whole on both
    assert sum(by_sequence) == 6 * tokens * (blocks + head)


class Stated(Stack):
    flops_per_batch = 1000.0


def stated_worker(rank, world_size):
    model = Stated(depth=2, width=32, hidden=64)
    quiet_trainer(world_size, TensorParallelStrategy(), max_steps=3).fit(model, token_data(32, 8))
    return look().ranks[rank].flops_per_batch


@pytest.mark.ranks
def test_the_flops_that_a_module_states_are_divided_over_the_ranks_of_a_batch():
    assert run_ranks(stated_worker, 2) == [500.0, 500.0]

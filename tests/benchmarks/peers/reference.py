"""What every engine has to compute: one process, whole fp32 weights, norms added up in fp64.

Nothing here is shared with the engines, but torch's fused AdamW. There are two references in bf16,
because there are two ways to compute in it: under autocast, as ``precision="bf16-mixed"`` does,
additions of activations stay in fp32; in a network that was cast, as DeepSpeed does, they do not.
"""

import math
from collections.abc import Iterable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from tests.benchmarks.peers.network import build_batches, build_network, loss_of
from tests.benchmarks.peers.problem import Problem
from tests.benchmarks.peers.turns import Turns

PIECE_NUMEL = 1 << 20


def train(connection: Connection, is_cast: bool, problem: Problem) -> None:
    """Train in turns, see ``Turns``.

    Args:
        connection: To the parent.
        is_cast: Compute in a copy of the network that was cast, instead of under autocast.
        problem: With ``is_bf16``; without it ``is_cast`` makes no difference.
    """
    network = build_network(problem.width, problem.depth)
    computed: list[Tensor] = list(network.parameters())
    masters = computed
    dtype = torch.bfloat16 if problem.is_bf16 and is_cast else torch.float32
    if dtype != torch.float32:
        masters = [each.detach().clone() for each in computed]
        network.to(dtype)
    optimizer = torch.optim.AdamW(
        masters, lr=problem.lr, weight_decay=problem.weight_decay, fused=True
    )
    is_autocast = problem.is_bf16 and not is_cast
    batches = build_batches(problem.width, problem.rows)
    turns = Turns(connection)
    number = 0
    while turns.begin_step():
        inputs, targets = batches[number % len(batches)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            outputs = network(inputs.to(dtype))
        loss = loss_of(outputs, targets, scale=problem.loss_scale)
        loss.backward()
        turns.end_backward()
        for master, each in zip(masters, computed, strict=True):
            assert each.grad is not None
            master.grad, gradient = None, each.grad.float()
            each.grad = None
            master.grad = gradient
        norm = norm_of(each.grad for each in masters if each.grad is not None)
        clip_coefficient = problem.max_norm / (norm + 1e-6)
        if clip_coefficient < 1.0:
            for each in masters:
                assert each.grad is not None
                each.grad.mul_(clip_coefficient)
        optimizer.step()
        optimizer.zero_grad()
        if masters is not computed:
            with torch.no_grad():
                for master, each in zip(masters, computed, strict=True):
                    each.copy_(master)
        turns.end_step(loss.item(), norm)
        number += 1


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The joint 2-norm, in fp64: torch's own of a large fp32 tensor on the CPU is too small."""
    return math.sqrt(
        math.fsum(
            float(piece.double().square().sum())
            for each in tensors
            for piece in each.reshape(-1).split(PIECE_NUMEL)
        )
    )

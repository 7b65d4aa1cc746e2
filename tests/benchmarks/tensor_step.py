"""A step on a tensor plan that found itself beside hand-written ``parallelize_module``.

    python tests/benchmarks/tensor_step.py [--ranks 2] [--rounds 8] [--steps 10] [--width 512]

Both train the same transformer on the same batch in the same processes, in turn, round after round:
``ColwiseParallel`` and ``RowwiseParallel`` written by hand for this model there, the automatic plan
of the unmodified model here; embedding, head and loss are
divided over the vocabulary in both. Losses and gradients are compared
with one process first. A round's figure is its median step on the first rank; printed are the
medians and the median of the rounds' ratios.
"""

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.plan import Backend
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.tensor.runtime.apply import apply_plan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from tests.benchmarks.peers.torch_3d import parallelize
from tests.benchmarks.peers.transformer import Transformer, cross_entropy
from tests.benchmarks.peers.transformer import build as build_transformer
from tests.support.ranks import run_ranks

ROWS, TOKENS, WORDS, HEADS, LAYERS = 4, 128, 256, 8, 4


def build(width: int) -> Transformer:
    return build_transformer(width, layers=LAYERS, words=WORDS, heads=HEADS)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(WORDS, (ROWS, TOKENS)), torch.randint(WORDS, (ROWS, TOKENS))


def loss_of(model: nn.Module) -> Tensor:
    tokens, targets = batch()
    return cross_entropy(model(tokens), targets)


def ours(world_size: int, width: int, backend: Backend) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = build(width)
    blocks = find_blocks(model)
    plan = make_plan(analyse(model, loss_of, blocks=blocks), world_size)
    kinds = {plan.kinds.get(each, each) for each in blocks}
    plan = replace(plan, backends=dict.fromkeys(kinds, backend))
    assert dist.group.WORLD is not None
    apply_plan(model, plan, TensorGroup(dist.group.WORLD, torch.device("cpu")))
    return model, lambda: step(model)


def theirs(world_size: int, width: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = build(width)
    mesh = init_device_mesh("cpu", (world_size,))
    parallelize(model, mesh)

    def run() -> Tensor:
        with loss_parallel():
            return step(model)

    return model, run


def step(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach()


def measure(
    rank: int, world_size: int, rounds: int, steps: int, width: int
) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    whole = build(width)
    wanted = step(whole)
    variants = {
        "torch": theirs(world_size, width),
        "boltmesh, local": ours(world_size, width, "local"),
        "boltmesh, region": ours(world_size, width, "region"),
    }
    for name, (model, run) in variants.items():
        run()
        found = run()
        torch.testing.assert_close(_plain(found), wanted, msg=partial(said_of, name))
        for each, other in zip(whole.parameters(), model.parameters(), strict=True):
            compare(each.grad, other.grad, rank, world_size, name)
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        turn = number % len(names)  # nobody always comes first
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            ends = [time.perf_counter()]
            for _ in range(steps):
                variants[name][1]()
                ends.append(time.perf_counter())
            times[name].append(
                statistics.median(after - before for before, after in itertools.pairwise(ends))
            )
    return times


def _plain(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(
    whole: Tensor | None, found: Tensor | None, rank: int, world_size: int, name: str
) -> None:
    """Find a shard, of either kind, equal to its place in the whole gradient."""
    assert whole is not None
    assert found is not None
    found = found.to_local() if isinstance(found, DTensor) else found
    if found.shape != whole.shape:
        dim = next(n for n in range(whole.dim()) if whole.shape[n] != found.shape[n])
        whole = whole.chunk(world_size, dim)[rank]
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-6, msg=partial(said_of, name))


def said_of(name: str, text: str) -> str:
    return f"{name}: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    times = run_ranks(
        measure, options.ranks, options.rounds, options.steps, options.width, timeout_s=1800.0
    )[0]
    print(f"{options.ranks} ranks, width {options.width}, {LAYERS} blocks, {ROWS} x {TOKENS} tokens"
          f", {options.rounds} rounds of {options.steps} steps")  # fmt: skip
    peer = times.pop("torch")
    print(f"  torch            {1e3 * statistics.median(peer):7.2f} ms")
    for name, mine in times.items():
        ratios = sorted(a / b for a, b in zip(mine, peer, strict=True))
        print(f"  {name:<16} {1e3 * statistics.median(mine):7.2f} ms   ratio "
              f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")  # fmt: skip


if __name__ == "__main__":
    main()

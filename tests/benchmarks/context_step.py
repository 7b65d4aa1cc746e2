"""A step with its sequence divided, beside one that is divided by hand, and beside one process.

    OMP_NUM_THREADS=1 python tests/benchmarks/context_step.py [--ranks 2] [--length 4096]

All train the same Llama of Hugging Face on the same row in the same processes, in turn, round after
round. By hand: ids, shifted labels and position ids are cut before the model, from both ends, and
its attention gathers keys and values, as torch's context_parallel does by all-gather. One process
runs the whole sequence, and its share is that time over the ranks. Losses and gradients are
compared first. A round's figure is that of the slowest rank; printed are medians of wall and of CPU
time, which says the same on a busy machine, and the median of the rounds' ratios of CPU times.
Torch's own context_parallel is tried with both rotations; where it cannot run, its error is the
line. Accelerate's Ulysses needs DeepSpeed and CUDA, and is not tried.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn import functional

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.context.entries import EntryHooks, find_entries
from boltmesh.strategies.context.exchange import ContextGroup
from boltmesh.strategies.context.opaque_functions import functions_watched
from boltmesh.strategies.context.positions import Positions, divide
from boltmesh.strategies.context.seq_shard import ContextState
from boltmesh.strategies.context.tokenwise import TokenwiseModules, find_tokenwise
from boltmesh.strategies.tensor.analysis.analyse import analyse
from tests.support.ranks import RankFailure, run_ranks

Step = Callable[[], Tensor]


def build(width: int, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
            max_position_embeddings=length,
            use_cache=False,
        )
    )


def ids_of(length: int) -> Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))


def whole(width: int, length: int) -> tuple[nn.Module, Step]:
    model, ids = build(width, length), ids_of(length)
    return model, lambda: step(model, lambda: model(input_ids=ids, labels=ids).loss)


def ours(width: int, length: int) -> tuple[nn.Module, Step]:
    model, ids = build(width, length), ids_of(length)
    group = dist.group.WORLD
    assert group is not None
    state = ContextState(ContextGroup(group, torch.device("cpu")), balance="zigzag")
    short, blocks = ids[:, :64], find_blocks(model)
    found = analyse(model, lambda each: each(input_ids=short, labels=short).loss, blocks=blocks)
    hooks = EntryHooks(model, find_entries(model, found, tuple(blocks)), state)
    TokenwiseModules(model, find_tokenwise(found), state)

    def run() -> Tensor:
        with hooks.on(), functions_watched():
            loss = step(model, lambda: model(input_ids=ids, labels=ids).loss)
        state.end_step()
        return average(model, loss)

    return model, run


def by_hand(width: int, length: int) -> tuple[nn.Module, Step]:
    from transformers import AttentionInterface

    model, ids = build(width, length), ids_of(length)
    rank, size = dist.get_rank(), dist.get_world_size()
    positions = divide(length, size, "zigzag")
    mine = index_of(positions, rank)
    order = torch.cat([index_of(positions, each) for each in range(size)]).argsort()
    masks = [
        torch.ones(stop - start, stop, dtype=torch.bool).tril(start)
        for start, stop in positions.parts[rank]
    ]

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any,
               **__: Any) -> tuple[Tensor, None]:  # fmt: skip
        both = torch.stack([key, value])
        keys, values = torch.cat(collectives.all_gather(both), 3)[:, :, :, order]
        found, at = [], 0
        for mask in masks:
            rows, seen = mask.shape
            part = query[:, :, at : at + rows]
            found.append(
                functional.scaled_dot_product_attention(
                    part, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask
                )
            )
            at += rows
        return torch.cat(found, 2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("gathered_keys", attend)
    model.set_attn_implementation("gathered_keys")  # type: ignore[operator]
    labels = functional.pad(ids[:, 1:], (0, 1), value=-100)
    own_ids, own_labels, own_places = ids[:, mine], labels[0, mine], mine[None]

    def loss() -> Tensor:
        logits = model(input_ids=own_ids, position_ids=own_places).logits[0]
        lost = functional.cross_entropy(logits, own_labels, reduction="sum") / (length - 1)
        return size * lost  # the mean over the ranks is the loss

    def run() -> Tensor:
        lost = average(model, step(model, loss))
        dist.all_reduce(lost)
        return lost / size

    return model, run


def index_of(positions: Positions, rank: int) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in positions.parts[rank]])


def step(model: nn.Module, loss_of: Step) -> Tensor:
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return loss.detach()


def average(model: nn.Module, loss: Tensor) -> Tensor:
    """Average the gradients over the ranks, in one message."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat)
    parts = flat.div_(dist.get_world_size()).split([each.numel() for each in gradients])
    for each, part in zip(gradients, parts, strict=True):
        each.copy_(part.view_as(each))
    return loss


def measure(
    rank: int, world_size: int, rounds: int, width: int, length: int
) -> dict[str, list[tuple[float, float]]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    reference, run_whole = whole(width, length)
    wanted = run_whole()
    variants = {"boltmesh": ours(width, length), "by hand": by_hand(width, length)}
    for model, run in variants.values():
        torch.testing.assert_close(run(), wanted)
        for each, other in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(each.grad, other.grad, rtol=1e-3, atol=1e-6)
    steps: dict[str, Step] = {name: run for name, (_, run) in variants.items()}
    steps["one process"] = run_whole
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds):
        turn = number % len(steps)
        for name in [*list(steps)[turn:], *list(steps)[:turn]]:
            dist.barrier()
            is_idle = name == "one process" and rank > 0
            before = time.perf_counter(), time.process_time()
            if not is_idle:
                steps[name]()
            after = time.perf_counter(), time.process_time()
            spent = torch.tensor([b - a for a, b in zip(before, after, strict=True)])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            times[name].append((float(spent[0]), float(spent[1])))
    return times


def peer_error(rank: int, world_size: int, rotation: str) -> str | None:
    """Run a step by torch's context_parallel, cut by hand; return why it cannot."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    torch.set_num_threads(1)
    length = 64 * world_size
    model, ids = build(64, length), ids_of(length)
    labels = functional.pad(ids[:, 1:], (0, 1), value=-100)
    buffers = [ids, labels, torch.arange(length)[None]]
    set_rotate_method(rotation)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            logits = model(input_ids=buffers[0], position_ids=buffers[2]).logits
            functional.cross_entropy(logits.flatten(0, 1), buffers[1].flatten()).backward()
    except Exception as error:  # noqa: BLE001 - the line of the table
        return f"{type(error).__name__}: {error}".strip().splitlines()[0][:120]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    ranks = options.ranks
    arguments = options.rounds, options.width, options.length
    times = run_ranks(measure, ranks, *arguments, timeout_s=3000.0)[0]
    print(f"{ranks} ranks, width {options.width}, {options.length} positions, "
          f"{options.rounds} rounds", flush=True)  # fmt: skip
    for name, each in times.items():
        wall, spent = (statistics.median(row[at] for row in each) for at in (0, 1))
        print(f"  {name:<14} {1e3 * wall:9.1f} ms, CPU {1e3 * spent:9.1f} ms")
    mine = [row[1] for row in times["boltmesh"]]
    shares = [row[1] / ranks for row in times["one process"]]
    for name, other in (("by hand", [row[1] for row in times["by hand"]]), ("the share", shares)):
        ratios = sorted(a / b for a, b in zip(mine, other, strict=True))
        print(f"  boltmesh over {name}: {statistics.median(ratios):.3f} "
              f"({ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)  # fmt: skip
    for rotation in ("allgather", "alltoall"):
        try:
            error = run_ranks(peer_error, ranks, rotation, timeout_s=120.0)[0]
        except RankFailure as failure:
            error = str(failure).splitlines()[0]
        print(f"  context_parallel of torch, {rotation}: {error or 'runs'}")


if __name__ == "__main__":
    main()

"""A step with experts divided over ranks beside transformers' exchange and one by hand.

    OMP_NUM_THREADS=1 python tests/benchmarks/expert_step.py [--ranks 2] [--rounds 6] [--steps 4]
    python tests/benchmarks/expert_step.py --kernel grouped_mm  # as the model comes
    python tests/benchmarks/expert_step.py --ranks 8 --experts 128 --choices 8 --rounds 0  # rows

All train the same Qwen3-MoE of Hugging Face in the same processes, in turn, round after round, each
rank on a batch of its own; only the exchange of rows differs: this one, ``AllToAllEP`` of
transformers, and rows sent for each choice and computed as in torchtitan, by a loop over experts or
by grouped products.
Losses and gradients are compared with the whole model first. Printed are the rows sent to other
ranks for each token, the bytes of an exchange beside those of gathering the experts twice and
reducing their gradients (ZeRO-3), the median step of the first rank, and the median of the rounds'
ratios.
"""

import argparse
import statistics
import sys
import time
import warnings
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from boltmesh.strategies.expert.divided import DividedExperts
from boltmesh.strategies.expert.exchange import RoutePlan
from boltmesh.strategies.expert.expected_traffic import expected_rows
from boltmesh.strategies.expert.find import find_experts
from tests.support.ranks import run_ranks

LAYERS, WORDS = 2, 128


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch."""

    experts: int
    choices: int
    width: int
    rows: int
    """Tokens of a rank."""
    kernel: str
    """How a rank multiplies by its experts: ``eager`` (a loop) or ``grouped_mm``."""


def build(shape: Shape) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=shape.width,
        moe_intermediate_size=shape.width // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=shape.experts,
        num_experts_per_tok=shape.choices,
        use_cache=False,
        experts_implementation=shape.kernel,
    )
    model: nn.Module = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "gate.weight" in name:
                each.normal_(0, 1.0)  # so that choices are as if by chance, and far from ties
    return model


def batch(rank: int, shape: Shape) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(WORDS, (4, shape.rows // 4), generator=generator)


class Swap(torch.autograd.Function):
    """Rows to the ranks of their experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        came = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(came, rows.contiguous(), received, sent)
        return came

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        back = gradients[0].new_empty((sum(sent), *gradients[0].shape[1:]))
        dist.all_to_all_single(back, gradients[0].contiguous(), sent, received)
        return back, None, None


class ByHand:
    """A row for each choice, sorted by expert on arrival; weights are applied by the sender."""

    def __init__(self, module: Any, size: int, kernel: str) -> None:
        self.module, self.size, self.kernel = module, size, kernel

    def __call__(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        number = self.module.num_experts
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=number * self.size)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        sent = counts.view(self.size, -1).sum(1).tolist()
        received = others.view(self.size, -1).sum(1).tolist()
        came = Swap.apply(rows[order // chosen.shape[1]], sent, received)
        local = torch.arange(number).repeat(self.size).repeat_interleave(others)
        by_expert = local.argsort(stable=True)
        sizes = torch.bincount(local, minlength=number)
        run = self.loop if self.kernel == "eager" else self.grouped
        made = run(came[by_expert], sizes)
        back = Swap.apply(torch.empty_like(made).index_copy(0, by_expert, made), received, sent)
        results = torch.empty_like(back).index_copy(0, order, back)
        return (results.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    def loop(self, rows: Tensor, sizes: Tensor) -> Tensor:
        parts = enumerate(rows.split(sizes.tolist()))
        return torch.cat([self.expert(number, part) for number, part in parts])

    def expert(self, number: int, rows: Tensor) -> Tensor:
        hidden = self.gated(functional.linear(rows, self.module.gate_up_proj[number]))
        return functional.linear(hidden, self.module.down_proj[number])

    def grouped(self, rows: Tensor, sizes: Tensor) -> Tensor:
        ends = sizes.cumsum(0, dtype=torch.int32)
        up, down = self.module.gate_up_proj.mT, self.module.down_proj.mT
        hidden = self.gated(functional.grouped_mm(rows, up, offs=ends))
        return functional.grouped_mm(hidden, down, offs=ends)

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.module.act_fn(gate) * up


class Variant:
    """A model whose experts are divided in one way."""

    def __init__(self, name: str, whole: nn.Module, shape: Shape) -> None:
        self.name, self.shape, self.model = name, shape, deepcopy(whole)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ids = batch(self.rank, shape)
        self.rows_sent = 0
        group = dist.group.WORLD
        assert group is not None
        found = find_experts(self.model, self.loss)
        self.owned: set[str] = set()
        for each in found.experts:
            module: Any = self.model.get_submodule(each.name)
            self.owned.update(each.parameters)
            for key, parameter in list(module.named_parameters()):
                part = parameter.detach().tensor_split(self.size)[self.rank].clone()
                setattr(module, key, nn.Parameter(part))
            if name == "boltmesh":
                DividedExperts(module, each, found.calls[each.name], group).put_on()
                continue
            module.num_experts = each.num_experts // self.size
            if name == "transformers":
                from transformers.distributed.expert_parallel import AllToAllEP

                ranks = torch.arange(self.size)
                pair = DeviceMesh("cpu", ranks[:, None], mesh_dim_names=("expert", "tensor"))
                module.forward = AllToAllEP(module, pair["expert"], pair["tensor"])
            else:
                module.forward = ByHand(module, self.size, shape.kernel)
            module.register_forward_pre_hook(self.count)
        dense = {n: p for n, p in self.model.named_parameters() if n not in self.owned}
        self.dense = list(dense.values())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def count(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self.rows_sent += int((args[1] // module.num_experts != self.rank).sum())

    def loss(self) -> Tensor:
        loss: Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        return loss

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        flat = torch.cat([p.grad.view(-1) for p in self.dense if p.grad is not None])
        dist.all_reduce(flat)
        self.optimizer.step()
        return loss.detach()


def measure(rank: int, world_size: int, shape: Shape, rounds: int, steps: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    whole = build(shape)
    ids = batch(rank, shape)
    wanted = whole(input_ids=ids, labels=ids).loss
    wanted.backward()
    variants = [Variant(name, whole, shape) for name in ("boltmesh", "transformers", "by hand")]
    counted: dict[str, float] = {}
    plan_class: Any = RoutePlan
    swap = plan_class.swap
    sent: list[int] = []

    def noted(plan: RoutePlan, tensor: Tensor, sizes: list[int], received: list[int]) -> Tensor:
        if sizes is plan.sent_rows and tensor.ndim == 2 and not torch.is_grad_enabled():
            sent.append(sum(sizes) - sizes[rank])
        return swap(plan, tensor, sizes, received)

    for each in variants:
        plan_class.swap = noted
        sent.clear()
        loss = each.loss()
        each.rows_sent += sum(sent)
        plan_class.swap = swap
        loss.backward()
        torch.testing.assert_close(loss, wanted)
        for name, parameter in each.model.named_parameters():
            other = whole.get_parameter(name).grad
            assert other is not None
            if name in each.owned:
                other = other.clone()
                dist.all_reduce(other)
                other = other.tensor_split(world_size)[rank]
            torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=1e-5)
        counted[each.name] = each.rows_sent / LAYERS / ids.numel()
    times: dict[str, list[float]] = {each.name: [] for each in variants}
    for number in range(rounds):
        turn = number % len(variants)
        for each in variants[turn:] + variants[:turn]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                each.step()
            times[each.name].append((time.perf_counter() - begin) / steps)
    return {"rows": counted, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("ranks", 2), ("experts", 32), ("choices", 4), ("width", 128), ("rows", 512),
        ("rounds", 6), ("steps", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernel", choices=("eager", "grouped_mm"), default="eager")
    chosen = parser.parse_args()
    shape = Shape(chosen.experts, chosen.choices, chosen.width, chosen.rows, chosen.kernel)
    found = run_ranks(measure, chosen.ranks, shape, chosen.rounds, chosen.steps, timeout_s=500)
    rows = {
        name: statistics.mean(each["rows"][name] for each in found) for name in found[0]["rows"]
    }
    size = chosen.ranks
    expected = expected_rows(1, shape.experts, shape.choices, size) * (size - 1) / size
    print(
        f"{shape.experts} experts, {shape.choices} choices, {size} ranks, {shape.rows} tokens each"
    )
    for name, each in rows.items():
        print(f"rows a token, {name}: {each:.2f}, ratio {each / rows['transformers']:.3f}")
    print(f"rows a token, expected of this exchange: {expected:.2f}")
    # Forward a row, its result, the numbers and weights of its choices; backward all but numbers.
    moved = rows["boltmesh"] * shape.rows * (4 * shape.width * 4 + 3 * shape.choices * 4)
    experts = shape.experts * 3 * shape.width * (shape.width // 2) * 4
    gathered = 3 * experts * (size - 1) / size
    print(
        f"bytes of a layer: exchange {moved:,.0f}, ZeRO-3 {gathered:,.0f}, {moved / gathered:.3f}"
    )
    times = found[0]["times"]
    for name in times if chosen.rounds else ():
        ratios = [a / b for a, b in zip(times["boltmesh"], times[name], strict=True)]
        print(
            f"step, {name}: {1000 * statistics.median(times[name]):.1f} ms, "
            f"boltmesh beside it {statistics.median(ratios):.3f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()

"""Mixtures of experts on ranks equal one process that sees the batches of all of them.

Batches are of different size on each rank, gradients are clipped by their norm, and auxiliary
losses are on. 1e-6 is fp32; sums of rows and of gradients have another order.
"""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies import Parallel3DStrategy, ZeROStrategy
from boltmesh.strategies.registry import build_strategy
from tests.support.expert_models import Experts, MoeModule, tokens
from tests.support.expert_runs import (
    differences,
    loader,
    strategy_of,
    train,
    train_alone,
    trainer,
    whole_of,
)
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "mixtral, zero1": ("mixtral", 2, {"stage": 1}, {"optimizer": "adamw"}),
    "mixtral, zero3": ("mixtral", 2, {"stage": 3}, {"accumulate": 2}),
    "mixtral, grouped_mm": ("mixtral:grouped_mm", 2, {"stage": 3}, {}),
    "qwen3, zero2": ("qwen3_moe", 2, {"stage": 2}, {"optimizer": "adamw", "accumulate": 2}),
    "qwen3, batched_mm, starved": ("qwen3_moe:batched_mm", 2, {"stage": 3}, {"is_starved": True}),
    "gpt_oss": ("gpt_oss", 2, {"stage": 2}, {}),
    "stacked, starved": ("stacked", 2, {"stage": 1}, {"is_starved": True, "optimizer": "adamw"}),
    "mixtral, 2 of 4": ("mixtral", 4, {"stage": 3, "expert": 2}, {"accumulate": 2}),
    "mixtral, 8 of 8": ("mixtral", 8, {"stage": 3, "expert": 8}, {"optimizer": "adamw"}),
    "mixtral, 4 of 4": ("mixtral", 4, {"stage": 3, "expert": 4}, {}),
    "qwen3, 2 of 4, starved": (
        "qwen3_moe",
        4,
        {"stage": 1, "expert": 2},
        {"is_starved": True, "optimizer": "adamw"},
    ),
    "list": ("list", 2, {"stage": 1}, {"accumulate": 2}),
    "list, masked": ("masked", 2, {"stage": 3}, {"optimizer": "adamw"}),
    "list, masked, recomputed": (
        "masked",
        2,
        {"stage": 3, "activation_checkpointing": "full"},
        {},
    ),
    "list, repeated, starved": (
        "repeated",
        2,
        {"stage": 2},
        {"is_starved": True, "optimizer": "adamw"},
    ),
    "list, 2 of 4, starved": (
        "list",
        4,
        {"stage": 3, "expert": 2},
        {"is_starved": True, "optimizer": "adamw", "accumulate": 2},
    ),
    "capacity": ("capacity", 2, {"stage": 2}, {"optimizer": "adamw"}),
    "capacity, 2 of 4": ("capacity", 4, {"stage": 3, "expert": 2}, {"accumulate": 2}),
    "list, even on a rank": ("list, even on a rank", 2, {"stage": 1}, {}),
    "list that is called": ("called list", 2, {"stage": 1}, {"optimizer": "adamw"}),
    "list, frozen": ("list, frozen", 2, {"stage": 2}, {"optimizer": "adamw"}),
    "list, adapters": ("list, adapters", 2, {"stage": 3}, {"optimizer": "adamw"}),
    "LoRA": ("stacked, LoRA", 2, {"stage": 3}, {"optimizer": "adamw", "accumulate": 2}),
    "LoRA, 2 of 4, starved": (
        "mixtral, LoRA",
        4,
        {"stage": 1, "expert": 2},
        {"is_starved": True, "optimizer": "adamw"},
    ),
    "LoRA, grouped_mm": ("mixtral:grouped_mm, LoRA", 2, {"stage": 2}, {}),
    "LoRA, batched": ("capacity, LoRA", 2, {"stage": 3}, {"optimizer": "adamw"}),
    "LoRA, recomputed": (
        "qwen3_moe, LoRA",
        2,
        {"stage": 3, "activation_checkpointing": "full"},
        {"optimizer": "adamw"},
    ),
    "LoRA, 8 of 8": ("mixtral, LoRA", 8, {"stage": 3, "expert": 8}, {}),
    "LoRA, gpt_oss": ("gpt_oss, LoRA", 2, {"stage": 3}, {"optimizer": "adamw"}),
    "recomputed": ("mixtral", 2, {"stage": 3, "activation_checkpointing": "full"}, {}),
}


@pytest.mark.sample("mixtral, zero3", "list, masked", "LoRA")
@pytest.mark.parametrize("case", CASES)
def test_runs_equal_one_process(case: str) -> None:
    kind, world_size, strategy, options = CASES[case]
    worker = partial(train, kind=kind, strategy=strategy, **options)
    gaps = differences(run_ranks(worker, world_size), train_alone(world_size, kind, **options))
    assert max(gaps.values()) < 2e-6, gaps


BESIDE: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    "data, stage 0": ("mixtral", 2, 2, {"zero_stage": 0}, {"optimizer": "adamw"}),
    "data 4, stage 0, expert 2": (
        "list",
        4,
        4,
        {"zero_stage": 0, "expert": 2},
        {"optimizer": "adamw", "accumulate": 2},
    ),
    "data, stage 3": ("mixtral", 2, 2, {"zero_stage": 3}, {}),
    "tensor, stage 1": ("mixtral", 2, 1, {"tensor": 2, "zero_stage": 1}, {"accumulate": 2}),
    "tensor, stage 0": ("qwen3_moe", 2, 1, {"tensor": 2, "zero_stage": 0}, {"is_starved": True}),
    "tensor, list": ("list", 2, 1, {"tensor": 2, "zero_stage": 3}, {"optimizer": "adamw"}),
    "tensor, recomputed": (
        "gpt_oss",
        2,
        1,
        {"tensor": 2, "zero_stage": 2, "activation_checkpointing": "full"},
        {},
    ),
    "data x tensor, expert 4": (
        "mixtral",
        4,
        2,
        {"tensor": 2, "zero_stage": 3},
        {"optimizer": "adamw", "accumulate": 2},
    ),
    "data x tensor, expert 2": ("mixtral", 4, 2, {"tensor": 2, "zero_stage": 1, "expert": 2}, {}),
    "data x tensor, stage 0, list": (
        "masked",
        4,
        2,
        {"tensor": 2, "zero_stage": 0, "expert": 2},
        {"optimizer": "adamw"},
    ),
    "tensor 4, expert 2": ("qwen3_moe", 4, 1, {"tensor": 4, "zero_stage": 2, "expert": 2}, {}),
    "tensor, sequence": (
        "mixtral",
        2,
        1,
        {"tensor": 2, "sequence_parallel": True, "zero_stage": 1},
        {"optimizer": "adamw", "accumulate": 2},
    ),
    "tensor, sequence, shared experts, recomputed": (
        "deepseek_v3",
        4,
        2,
        {
            "tensor": 2,
            "sequence_parallel": True,
            "zero_stage": 3,
            "expert": 2,
            "activation_checkpointing": "full",
        },
        {},
    ),
    "context": (
        "mixtral",
        2,
        1,
        {"context": 2, "zero_stage": 1},
        {"optimizer": "adamw", "accumulate": 2},
    ),
    "context, recomputed": (
        "qwen3_moe",
        2,
        1,
        {"context": 2, "zero_stage": 3, "activation_checkpointing": "full"},
        {},
    ),
    "data x context, expert 4": ("mixtral", 4, 2, {"context": 2, "zero_stage": 3}, {}),
    "data x context, expert 2": (
        "deepseek_v3",
        4,
        2,
        {"context": 2, "zero_stage": 2, "expert": 2},
        {},
    ),
    "context x tensor": ("qwen3_moe", 4, 1, {"context": 2, "tensor": 2, "zero_stage": 1}, {}),
    "shards of 2": ("mixtral", 4, 4, {"stage": 3, "shard_size": 2, "expert": 4}, {}),
    "LoRA, data, stage 0": ("stacked, LoRA", 2, 2, {"zero_stage": 0}, {"optimizer": "adamw"}),
    "LoRA, data x tensor": (
        "mixtral, LoRA",
        4,
        2,
        {"tensor": 2, "zero_stage": 3},
        {"optimizer": "adamw", "accumulate": 2},
    ),
    "LoRA, context": ("qwen3_moe, LoRA", 2, 1, {"context": 2, "zero_stage": 1}, {}),
    "LoRA, shards of 2": (
        "mixtral, LoRA",
        4,
        4,
        {"stage": 3, "shard_size": 2, "expert": 4},
        {"optimizer": "adamw"},
    ),
}


@pytest.mark.sample("data, stage 0", "data x tensor, expert 4", "context")
@pytest.mark.parametrize("case", BESIDE)
def test_experts_beside_other_axes_equal_one_process(case: str) -> None:
    kind, world_size, data, strategy, options = BESIDE[case]
    worker = partial(train, kind=kind, strategy=strategy, **options)
    gaps = differences(run_ranks(worker, world_size), train_alone(data, kind, **options))
    assert max(gaps.values()) < 2e-6, gaps


OFFLOADED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "state": ("mixtral", 2, {"stage": 2, "offload_optimizer": "cpu"}, {"accumulate": 2}),
    "parameters": (
        "mixtral",
        2,
        {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"optimizer": "adamw", "reads_gradients": False},
    ),
    "parameters, 2 of 4": (
        "gpt_oss",
        4,
        {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu", "expert": 2},
        {"optimizer": "adamw", "reads_gradients": False, "steps": 4},
    ),
    "list": (
        "list",
        2,
        {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"optimizer": "adamw", "accumulate": 2, "reads_gradients": False},
    ),
    "LoRA": (
        "stacked, LoRA",
        2,
        {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"optimizer": "adamw", "accumulate": 2, "reads_gradients": False},
    ),
    "shards of 2": (
        "stacked",
        4,
        {"stage": 3, "offload_optimizer": "cpu", "shard_size": 2, "expert": 4},
        {"optimizer": "adamw", "reads_gradients": False},
    ),
    "disk": (
        "stacked",
        2,
        {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"},
        {"optimizer": "adamw", "reads_gradients": False},
    ),
}


@pytest.mark.sample("parameters")
@pytest.mark.parametrize("case", OFFLOADED)
def test_offloaded_experts_equal_one_process(case: str, tmp_path: Path) -> None:
    kind, world_size, strategy, options = OFFLOADED[case]
    if case == "disk":
        strategy = {**strategy, "offload_path": tmp_path}
    ranks = run_ranks(partial(train, kind=kind, strategy=strategy, **options), world_size)
    alone = {key: value for key, value in options.items() if key != "reads_gradients"}
    gaps = differences(ranks, train_alone(world_size, kind, **alone))
    assert max(gaps.values()) < 4e-6, gaps


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero_stage": 0, "offload_optimizer": "cpu"}, "is about shards"),
    ],
    ids=str,
)
def test_options_of_other_axes_that_do_not_fit_are_refused(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Parallel3DStrategy(expert=2, **options)


@pytest.mark.sample(
    "coupled-options0-gives another output when rows are exchanged",
    "list, read-options2-no experts can be divided: .* raises RuntimeError",
    "dense-options4-calls no experts",
)
@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("coupled", {}, "gives another output when rows are exchanged"),
        ("coupled list", {}, "gives another output when rows are exchanged"),
        ("list, read", {}, "no experts can be divided: .* raises RuntimeError"),
        ("list, hooked", {}, "its experts have hooks"),
        ("dense", {}, "calls no experts"),
        ("stacked", {"expert": 3}, "expert=3 needs a multiple of 3 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(kind: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(partial(train, kind=kind, strategy=options), 2)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["list", "masked", "repeated", "mixtral", "stacked", "mixtral, LoRA"]
)
def test_a_step_under_autocast_equals_one_process(kind: str) -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "steps": 2}
    worker = partial(train, kind=kind, strategy={"stage": 2}, **options)
    gaps = differences(run_ranks(worker, 2), train_alone(2, kind, **options))
    assert gaps["loss"] < 2e-3, gaps
    assert gaps["norm"] < 2e-2, gaps
    assert gaps["parameter"] < 2e-3, gaps


class Overflow(Callback):
    """Makes a gradient of this rank's experts infinite, in one step on one rank."""

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            for name, each in pl_module.named_parameters():
                own: Any = each.grad
                if ".experts." in name and own is not None and own.to_local().numel():
                    own.to_local().view(-1)[0] = float("inf")
                    return


def fit_in_fp16(rank: int, world_size: int, kind: str, strategy: dict[str, Any]) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    module, values = MoeModule(kind), []

    class Notes(Callback):
        @override
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            values.append(whole_of(pl_module))

    chosen = strategy_of(telemetry=False, expert=2, **strategy)
    callbacks = [Overflow(), Notes()]
    run = trainer(world_size, chosen, max_steps=4, plugins=[plugin], callbacks=callbacks)
    place = chosen.layout_of(world_size).coordinates(rank)["data"]
    run.fit(module, loader(place, 4))
    moved = [
        any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in pairwise(values)
    ]
    is_finite = all(bool(each.isfinite().all()) for each in values[-1].values())
    return moved, is_finite, scaler.get_scale()


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", [{"stage": 3}, {"zero_stage": 0}, {"tensor": 2, "zero_stage": 1}]
)
@pytest.mark.parametrize("kind", ["stacked", "list"])
def test_an_overflow_of_one_rank_s_experts_skips_the_step_on_all(
    kind: str, strategy: dict[str, Any]
) -> None:
    worker = partial(fit_in_fp16, kind=kind, strategy=strategy)
    assert run_ranks(worker, 2) == [([False, True, True], True, 64.0)] * 2


def compiled(rank: int, world_size: int) -> None:
    module = MoeModule("stacked")
    module.net.compile()
    trainer(world_size, ZeROStrategy(telemetry=False, expert=2)).fit(module, loader(rank, 1))


@pytest.mark.full
def test_compiled_layers_are_refused() -> None:
    with pytest.raises(RankFailure, match="'net' is compiled"):
        run_ranks(compiled, 2)


def validate_and_fit(rank: int, world_size: int, name: str) -> list[str]:
    module = MoeModule("stacked")
    run = trainer(world_size, build_strategy(name, telemetry=False), max_steps=1)
    run.validate(module, loader(rank, 1), verbose=False)
    run.fit(module, loader(rank, 1))
    run.test(module, loader(rank, 1), verbose=False)
    parameter = module.get_parameter("net.blocks.0.2.experts.up")
    return [str(getattr(parameter, "placements", ""))]


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_trainer_runs_several_loops(world_size: int) -> None:
    found = run_ranks(partial(validate_and_fit, name="bolt_expert"), world_size)
    assert all("Shard(dim=0)" in places or world_size == 1 for (places,) in found)


def test_tiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="tile_linear_bytes=8192 is not possible beside it"):
        ZeROStrategy(expert=2, stage=3, tile_linear_bytes=8192)


@pytest.mark.parametrize("expert", [0, "host"])
def test_sizes_that_do_not_exist_are_refused(expert: Any) -> None:
    with pytest.raises(ConfigError, match="expert="):
        ZeROStrategy(expert=expert)


class Balanced(Callback):
    """In one process: changes the bias as DeepSeek-V3 does, from what experts have got."""

    def __init__(self, module: MoeModule, rate: float) -> None:
        self.rate = rate
        self.rows: dict[str, Any] = {}
        for name, each in module.named_modules():
            if name.endswith("mlp.experts"):
                each.register_forward_pre_hook(partial(self.count, name.removesuffix("experts")))

    def count(self, name: str, _: Any, given: Any) -> None:
        rows = torch.bincount(given[1].reshape(-1), minlength=6).float()
        self.rows[name] = self.rows.get(name, 0) + rows

    def correct(self, module: MoeModule) -> None:
        for name, rows in self.rows.items():
            bias = module.get_buffer(f"{name}gate.e_score_correction_bias")
            bias += self.rate * (rows.mean() - rows).sign()
        self.rows.clear()


def fit_with_bias(rank: int, world_size: int, rate: float, strategy: dict[str, Any]) -> Any:
    module = MoeModule("deepseek_v3")
    chosen = strategy_of(telemetry=False, expert=2, expert_bias=rate, **strategy)
    place = chosen.layout_of(world_size).coordinates(rank)["data"]
    run = trainer(world_size, chosen, max_steps=3, accumulate_grad_batches=2)
    run.fit(module, loader(place, 6))
    return whole_of(module), {name: each.clone() for name, each in module.named_buffers()}


@pytest.mark.full
@pytest.mark.parametrize("strategy", [{"stage": 3}, {"tensor": 2, "zero_stage": 1}])
def test_biases_of_routers_are_corrected_by_the_rows_of_all_ranks(strategy: dict[str, Any]) -> None:
    ranks = run_ranks(partial(fit_with_bias, rate=0.02, strategy=strategy), 2)
    module = MoeModule("deepseek_v3")
    balanced, stepper = Balanced(module, 0.02), module.configure_optimizers()
    num_batches = 1 if "tensor" in strategy else 2
    for step in range(3):
        stepper.zero_grad()
        for part in range(2):
            for rank in range(num_batches):
                loss = module.training_step(tokens(2 * step + part, rank), 0)
                (loss / num_batches / 2).backward()
        stepper.step()
        balanced.correct(module)
    name = next(n for n, _ in module.named_buffers() if n.endswith("e_score_correction_bias"))
    assert module.get_buffer(name).abs().max() > 0.01
    for parameters, buffers in ranks:
        for name, each in module.named_buffers():
            torch.testing.assert_close(buffers[name], each)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), atol=2e-6, rtol=0)


def test_a_router_without_a_bias_is_named() -> None:
    with pytest.raises(RankFailure, match=r"router of 'net\.blocks\.0\.2\.experts' has no buffer"):
        run_ranks(partial(train, kind="stacked", strategy={"expert_bias": "update"}), 2)


class WithPlaces(Experts):
    """In one process: rows behind the first of each expert in a batch are left out."""

    places = 0
    dropped = 0

    @override
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = chosen.reshape(-1)
        before = torch.nn.functional.one_hot(flat, self.num_experts).cumsum(0)
        is_kept = before.gather(1, flat[:, None]) <= self.places
        self.dropped += int((~is_kept).sum())
        return super().forward(x, chosen, weights * is_kept.view(chosen.shape))


class Drops(Callback):
    """Counts rows without a place."""

    def __init__(self) -> None:
        self.count = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        axis: Any = trainer.strategy
        for each in next(a for a in axis.axes if a.name == "expert").divided.values():
            each.exchange.drop = self.add

    def add(self, count: Tensor) -> None:
        self.count += int(count)


def fit_with_places(rank: int, world_size: int, capacity: float) -> Any:
    module, drops = MoeModule("stacked"), Drops()
    chosen = ZeROStrategy(telemetry=False, expert=2, expert_capacity=capacity)
    run = trainer(world_size, chosen, max_steps=3, callbacks=[drops])
    run.fit(module, loader(rank, 3))
    return whole_of(module), drops.count


@pytest.mark.sample("0.75")
@pytest.mark.parametrize("capacity", [0.75, 8.0])
def test_rows_that_an_expert_has_no_place_for_are_dropped_and_counted(capacity: float) -> None:
    ranks = run_ranks(partial(fit_with_places, capacity=capacity), 2)
    module = MoeModule("stacked")
    experts: list[Any] = [each for each in module.modules() if isinstance(each, Experts)]
    rows = max(tokens(0, rank).numel() for rank in range(2))
    for each in experts:
        each.__class__ = WithPlaces
        each.places = math.ceil(capacity * rows * 2 / 8)
    stepper = module.configure_optimizers()
    for step in range(3):
        stepper.zero_grad()
        for rank in range(2):
            (module.training_step(tokens(step, rank), 0) / 2).backward()
        stepper.step()
    assert sum(count for _, count in ranks) == sum(each.dropped for each in experts)
    assert (capacity < 1) == any(each.dropped for each in experts)
    for parameters, _ in ranks:
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_capacity": 1.25}, "expert_capacity=1.25 is about experts that are divided"),
        ({"expert": 2, "expert_capacity": 0}, "expert_capacity=0 does not exist"),
        ({"expert": 2, "expert_bias": "on"}, "Use 'update'"),
    ],
    ids=str,
)
def test_capacities_and_biases_that_do_not_exist_are_refused(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        ZeROStrategy(**options)

"""Products in float8 are torchao's own, under every strategy that has them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    compiled_blocks,
)
from boltmesh.strategies.float8 import Float8Products, convertible_layers, refuse_device
from boltmesh.strategies.parameter_access import gathered_parameters
from boltmesh.telemetry.writer.torch_compat.flops import FunctionFlops
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytest.importorskip("torchao")

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)

CPU = torch.device("cpu")

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "zero1": lambda **given: ZeROStrategy(stage=1, **given),
    "zero2": lambda **given: ZeROStrategy(stage=2, **given),
    "zero3": lambda **given: ZeROStrategy(stage=3, **given),
    "zero3_cpu": lambda **given: ZeROStrategy(
        stage=3, offload_optimizer="cpu", offload_parameters="cpu", **given
    ),
    "pipeline": lambda **given: PipelineParallelStrategy(microbatches=2, **given),
    "zero_bubble": lambda **given: PipelineParallelStrategy(
        schedule="zero_bubble", microbatches=2, **given
    ),
    "3d": lambda **given: Parallel3DStrategy(pipeline=2, microbatches=2, **given),
}

STAGES = ("pipeline", "zero_bubble", "3d")
"""Names of those whose microbatches are the others' batches."""


class Whole(Callback):
    """Keeps losses, and the parameters at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.values: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with gathered_parameters(pl_module) as whole:
            self.values = {name: each.detach().clone() for name, each in whole.items()}


def stack() -> Stack:
    seed_everything(3)
    return Stack(width=16, hidden=32, optimizer="sgd")


def trained(strategy: Any, module: Stack, loader: DataLoader[Any], **arguments: Any) -> Whole:
    whole = Whole()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, max_steps=5, callbacks=[whole], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, loader)
    return whole


def by_ranks(rank: int, world_size: int, name: str, given: dict[str, Any]) -> dict[str, Tensor]:
    compiled_blocks.BACKEND = "aot_eager"
    rows, first = (8, 0) if name in STAGES else (4, 4 * rank)
    batches = [list(range(start, start + rows)) for start in range(first, 40, 8)]
    loader = DataLoader(token_data(40, 1).dataset, batch_sampler=batches)
    return trained(STRATEGIES[name](**given), stack(), loader, devices=world_size).values


def by_torchao(recipe: Any) -> dict[str, Tensor]:
    """One process, torchao's own function for converting a model, two batches for each step."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    module = stack()
    chosen = set(convertible_layers(module))
    convert_to_float8_training(module, config=config, module_filter_fn=lambda m, _: m in chosen)
    strategy, loader = SingleDeviceStrategy(CPU), token_data(40, 4)
    return trained(strategy, module, loader, devices=1, accumulate_grad_batches=2).values


def apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in others)


BESIDE: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {"compile_blocks": True}),
    ("zero3", {"compile_blocks": True}),
    ("pipeline", {"compile_blocks": True}),
    ("ddp", {"activation_checkpointing": "selective"}),
    ("zero3", {"activation_checkpointing": "full"}),
    ("pipeline", {"activation_checkpointing": "full"}),
]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(5)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_equals_torchaos_in_one_process(name: str, recipe: str) -> None:
    theirs = by_torchao(recipe)
    for ours in run_ranks(by_ranks, 2, name, {"float8": recipe}):
        assert apart(ours, theirs) <= 1e-6


def test_training_in_float8_differs_from_training_without() -> None:
    loader = token_data(40, 4)
    plain = trained(DDPStrategy(), stack(), loader, devices=1, accumulate_grad_batches=2)
    assert apart(plain.values, by_torchao("rowwise")) > 1e-3  # far over the bound above


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(10)
@pytest.mark.parametrize(("name", "given"), BESIDE, ids=[f"{n}-{next(iter(g))}" for n, g in BESIDE])
def test_blocks_are_compiled_and_recomputed_beside_it(name: str, given: dict[str, Any]) -> None:
    theirs = by_torchao("tensorwise")
    given = {"float8": "tensorwise", **given}
    for ours in run_ranks(by_ranks, 2, name, given):
        assert apart(ours, theirs) <= 1e-6


def test_layers_of_blocks_run_torchaos_forward_and_are_restored() -> None:
    module = stack()
    before = {name: {*vars(each)} for name, each in module.named_modules()}
    names = [*module.state_dict()]
    products = Float8Products("tensorwise")
    products.put_on(module, CPU)
    changed = {n for n, each in module.named_modules() if {*vars(each)} != before[n]}
    assert changed == {f"blocks.{i}.{each}" for i in range(3) for each in ("up", "down")}
    assert [*module.state_dict()] == names
    products.take_off()
    assert {name: {*vars(each)} for name, each in module.named_modules()} == before


def test_layers_that_others_read_or_that_gpus_cannot_multiply_stay() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.good, self.odd = nn.Linear(16, 16), nn.Linear(16, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.good(x)

    root = nn.Sequential(Block(), Block())
    assert convertible_layers(root) == [each.good for each in root]


def test_the_cpus_autocast_casts_inputs_as_a_gpus_does() -> None:
    module = stack()
    Float8Products("rowwise").put_on(module, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        made = module.get_submodule("blocks.0.up")(torch.randn(4, 16))
    assert made.dtype == torch.bfloat16


def test_flops_are_those_of_the_layers_as_they_are() -> None:
    module, counts = stack(), []
    for recipe in (None, "rowwise"):
        Float8Products(recipe).put_on(module, CPU)
        calls = FunctionFlops(lambda: True)
        with calls:
            module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        counts.append(calls.total)
    assert counts[0] == counts[1] > 0


REFUSED: list[tuple[Any, str]] = [
    (lambda: DDPStrategy(float8="fp8"), r"float8='fp8' is no way .* float8='rowwise'"),
    (
        lambda: Float8Products("rowwise").put_on(Stack(), CPU),
        r"multiples of 16, and Stack has none",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def refused_by_ranks(rank: int, world_size: int) -> list[str]:
    said = []
    for strategy in (
        TensorParallelStrategy(float8="rowwise"),
        ContextParallelStrategy(float8="rowwise"),
        Parallel3DStrategy(tensor=2, float8="rowwise"),
        ZeROStrategy(stage=3, expert=2, float8="rowwise"),
        ZeROStrategy(stage=3, tile_linear_bytes=4096, float8="rowwise"),
    ):
        with pytest.raises(ConfigError) as caught:
            trained(strategy, stack(), token_data(8, 4), devices=world_size)
        said.append(str(caught.value))
    return said


@pytest.mark.ranks
@pytest.mark.slow(6)
def test_ranks_that_have_parts_of_operands_are_refused_by_their_argument() -> None:
    for said in run_ranks(refused_by_ranks, 2):
        for line, name in zip(
            said, ("tensor", "context", "tensor", "expert", "tile_linear_bytes"), strict=True
        ):
            assert f"with {name} a rank has parts of operands. Leave float8 or {name} out." in line


def test_rows_that_a_gpu_does_not_multiply_are_refused_with_the_shape() -> None:
    from boltmesh.strategies.torch_compat.float8 import refuse_rows

    refuse_rows(torch.empty(2, 8, 16))
    with pytest.raises(UnsupportedError, match=r"multiples of 16, .* shape \(3, 5, 16\): 15 rows"):
        refuse_rows(torch.empty(3, 5, 16))


def test_a_gpu_without_such_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"capability 8\.9 .* cuda:0 is NVIDIA A100"):
        refuse_device("tensorwise", torch.device("cuda", 0))


def test_without_torchao_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"torchao, which is not installed\. Install it"):
        Float8Products("rowwise").refuse(CPU, [])

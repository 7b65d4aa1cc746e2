"""Compiled blocks train to the numbers of the blocks as they are, by one graph for all of a kind.

Most cases compile by ``aot_eager``, which makes the same graphs without a minute of a C++ compiler.
"""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

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
from boltmesh.strategies.compiled_blocks import CompiledBlocks, refuse_without_compiler
from boltmesh.strategies.parameter_access import gathered_parameters
from boltmesh.strategies.torch_compat.tensors import times_written
from tests.support import expert_models, expert_runs
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

STRATEGIES: dict[str, Any] = {
    "ddp": lambda **given: DDPStrategy(**given),
    "zero1": lambda **given: ZeROStrategy(stage=1, **given),
    "zero2": lambda **given: ZeROStrategy(stage=2, **given),
    "zero3": lambda **given: ZeROStrategy(stage=3, **given),
    "zero3_cpu": lambda **given: ZeROStrategy(
        stage=3, offload_optimizer="cpu", offload_parameters="cpu", **given
    ),
    "tensor": lambda **given: TensorParallelStrategy(**given),
    "pipeline": lambda **given: PipelineParallelStrategy(microbatches=2, **given),
    "zero_bubble": lambda **given: PipelineParallelStrategy(
        schedule="zero_bubble", microbatches=2, **given
    ),
    "3d": lambda **given: Parallel3DStrategy(pipeline=2, microbatches=2, **given),
    "3d of 4": lambda **given: Parallel3DStrategy(data=2, tensor=2, zero_stage=3, **given),
}
RANKS = {"3d of 4": 4}


class Watch(Callback):
    """Keeps losses, the parameters at the end, and how many graphs there were after three steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.graphs: list[int] = []
        self.whole: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with gathered_parameters(pl_module) as whole:
            self.whole = {name: each.detach().clone() for name, each in whole.items()}


def fit(world_size: int, strategy: Any, module: Any = None, **arguments: Any) -> Watch:
    seed_everything(3)
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=6, callbacks=[watch],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    # Of ten blocks each would be compiled by itself up to torch's limit of eight.
    module = Stack(depth=10, hidden=12, optimizer="sgd") if module is None else module
    trainer.fit(module, token_data(48, 8))
    return watch


def both(
    rank: int, world_size: int, name: str, backend: str, given: dict[str, Any]
) -> tuple[float, list[int]]:
    """Return the largest difference of losses and parameters, and graphs after each step."""
    compiled_blocks.BACKEND = backend
    plain = fit(world_size, STRATEGIES[name](**given))
    torch._dynamo.utils.counters.clear()
    compiled = fit(world_size, STRATEGIES[name](compile_blocks=True, **given))
    apart = [abs(a - b) for a, b in zip(plain.losses, compiled.losses, strict=True)]
    apart += [(plain.whole[each] - compiled.whole[each]).abs().max().item() for each in plain.whole]
    return max(apart), compiled.graphs


CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in STRATEGIES] + [
    (name, {"activation_checkpointing": "full"}) for name in ("ddp", "zero3", "pipeline")
]
CASES += [("tensor", {"sequence_parallel": True, **more}) for more in ({}, CASES[-1][1])]

MOST_GRAPHS = 3 if torch.__version__ >= "2.13" else 5  # earlier ones cut graphs in more places

IDS = [f"{name}-{' '.join(given) or 'plain'}" for name, given in CASES]


@pytest.mark.sample("ddp-activation_checkpointing")
@pytest.mark.ranks
@pytest.mark.slow(60)
@pytest.mark.parametrize(("name", "given"), CASES, ids=IDS)
def test_blocks_are_compiled_once_and_train_to_the_same_numbers(
    name: str, given: dict[str, Any]
) -> None:
    ranks = RANKS.get(name, 2)
    for apart, graphs in run_ranks(both, ranks, name, "aot_eager", given):
        assert apart < 1e-5
        assert graphs[2] >= 1
        assert graphs[2] == graphs[-1], "compiled again after the third step"
        assert graphs[-1] <= MOST_GRAPHS, "for all blocks, or those where the first has no gradient"


LAYERS = 10
TENSOR = {"zero_stage": 1, "tensor": 2}
EXPERTS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "stacked": ("stacked", 2, 2, {"stage": 3, "activation_checkpointing": "full"}),
    "transformers": ("mixtral:no aux", 2, 2, {"stage": 1}),
    "batched": ("capacity", 2, 2, {"stage": 1}),
    "LoRA": ("mixtral:no aux, LoRA", 2, 2, {"stage": 3}),
    "list": ("list", 2, 2, {"stage": 1}),
    "tensor": ("mixtral:no aux", 2, 1, TENSOR),
    "sequence_parallel": ("mixtral:no aux", 2, 1, {**TENSOR, "sequence_parallel": True}),
    "expert_tensor": ("mixtral:no aux", 4, 2, {**TENSOR, "expert_tensor": "tensor"}),
    "pipeline": ("stacked", 4, 2, {"zero_stage": 1, "pipeline": 2, "microbatches": 1}),
}
"""Kind of model, ranks, data ranks and options."""


class Graphs(expert_runs.Watch):
    """Notes how many graphs there are after each step."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.outcome.notes.append(str(torch._dynamo.utils.counters["stats"]["unique_graphs"]))


def beside_exchanges(
    rank: int, world_size: int, kind: str, strategy: dict[str, Any], backend: str = "aot_eager"
) -> expert_runs.Outcome:
    compiled_blocks.BACKEND = backend
    expert_models.SIZES["num_hidden_layers"] = LAYERS
    expert_runs.Watch = Graphs  # type: ignore[misc]
    strategy = {"expert": 2, "compile_blocks": True, **strategy}
    return expert_runs.train(rank, world_size, kind, steps=5, strategy=strategy)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(30)
@pytest.mark.parametrize("case", EXPERTS)
def test_blocks_are_compiled_around_the_exchanges_of_their_experts(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, world_size, data, strategy = EXPERTS[case]
    monkeypatch.setitem(expert_models.SIZES, "num_hidden_layers", LAYERS)
    ranks = run_ranks(beside_exchanges, world_size, kind, strategy)
    gaps = expert_runs.differences(ranks, expert_runs.train_alone(data, kind, steps=5))
    assert max(gaps.values()) < 2e-6, gaps
    for each in ranks:
        graphs = [int(note) for note in each.notes]
        assert graphs[2] == graphs[-1], "compiled again after the third step"
        # A Sequential that calls the list's module in its loop has nothing to compile around it.
        assert (case != "list") <= graphs[-1] < LAYERS, "blocks of a kind do not share graphs"


@pytest.mark.slow(120)
@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("case", ["transformers", "tensor"])
def test_inductor_compiles_blocks_around_the_exchanges(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, world_size, data, strategy = EXPERTS[case]
    monkeypatch.setitem(expert_models.SIZES, "num_hidden_layers", LAYERS)
    ranks = run_ranks(beside_exchanges, world_size, kind, strategy, "inductor")
    gaps = expert_runs.differences(ranks, expert_runs.train_alone(data, kind, steps=5))
    assert max(gaps.values()) < 2e-6, gaps
    assert all(1 <= int(each.notes[-1]) < LAYERS for each in ranks)


@pytest.mark.slow(120)
@pytest.mark.full
@pytest.mark.ranks
def test_inductor_gives_the_numbers_of_the_blocks_as_they_are() -> None:
    [(apart, graphs)] = run_ranks(both, 1, "ddp", "inductor", {})
    assert apart < 1e-5
    assert graphs[2] == graphs[-1] >= 1


class Branching(nn.Module):
    """Does something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.word = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * len(self.word)


def model(*blocks: nn.Module) -> nn.Module:
    root = nn.Module()
    root.blocks = nn.ModuleList(blocks)
    return root


@pytest.fixture
def by_aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")


@pytest.mark.full
@pytest.mark.usefixtures("by_aot_eager")
def test_a_block_that_is_compiled_again_and_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    root: Any = model(Branching(), Branching())
    compilation = CompiledBlocks(None, is_on=True)
    compilation.put_on(root, torch.device("cpu"))

    def call_often() -> None:
        for number in range(9):
            root.blocks[0].word = "x" * number
            root.blocks[0](torch.ones(2, 3))

    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.raises(UnsupportedError, match="compiled Branching again and again"),
    ):
        call_often()
    compilation.take_off()
    assert "forward" not in vars(root.blocks[0])
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_writes_are_counted_in_one_graph() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        before = times_written(y)
        y.mul_(3)
        return y if times_written(y) == before else -y

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == run(torch.ones(2)).tolist() == [-6, -6]


@pytest.mark.usefixtures("by_aot_eager")
def test_evaluation_and_modes_run_blocks_as_they_are() -> None:
    root: Any = model(Branching(), Branching())
    compilation = CompiledBlocks(None, is_on=True)
    compilation.put_on(root, torch.device("cpu"))
    forward = vars(root.blocks[0])["forward"]
    x = torch.ones(2, 3)
    assert forward.choose([x]) == forward._run
    with torch.no_grad():
        assert forward.choose([x]) == forward._plain
    with torch.overrides.BaseTorchFunctionMode():
        assert forward.choose([x]) == forward._plain
    assert forward.choose([x.to("meta")]) == forward._plain
    compilation.take_off()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="activation_checkpointing='full'"):
        CompiledBlocks("selective", is_on=True)
    compilation = CompiledBlocks(None, is_on=True)
    with pytest.raises(ConfigError, match="Linear repeats none"):
        compilation.put_on(nn.Linear(2, 2), cpu)
    compiled = model(Branching(), Branching())
    compiled.blocks[0].compile()  # type: ignore[index]
    with pytest.raises(UnsupportedError, match=r"'blocks\.0' is compiled by torch"):
        compilation.put_on(compiled, cpu)


@pytest.mark.parametrize(
    ("device", "missing"), [("cpu", "no C.. compiler"), ("cuda", "triton is not installed")]
)
def test_a_missing_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, device: str, missing: str
) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(ConfigError, match=missing):
        refuse_without_compiler(torch.device(device))


def test_an_axis_whose_layers_cannot_be_traced_refuses_the_option() -> None:
    with pytest.raises(ConfigError, match="Leave compile_blocks or"):
        ContextParallelStrategy(compile_blocks=True)


@pytest.mark.parametrize(
    ("door", "message"),
    [
        (partial(ZeROStrategy, stage=3), r"ZeROStrategy runs .* and set compile_blocks=True\. "),
        (PipelineParallelStrategy, r"PipelineParallelStrategy runs .* set compile_blocks=True\. "),
        (ContextParallelStrategy, r"ContextParallelStrategy .* Pass the module as it is\. "),
    ],
    ids=["zero", "pipeline", "context"],
)
def test_a_module_that_is_compiled_whole_is_refused_with_the_option(
    door: Any, message: str
) -> None:
    module: Any = torch.compile(Stack(), backend="aot_eager")
    with pytest.raises(UnsupportedError, match=f"Stack was compiled as a whole .* {message}"):
        fit(1, door(), module)

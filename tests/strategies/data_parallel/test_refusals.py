"""What would be wrong with shards is refused by name, with what to do instead."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn

from boltmesh.errors import ConfigError
from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.data_parallel.unsupported import refuse_mixed_types
from boltmesh.strategies.dry_run.unsupported import refuse_callbacks
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import RankFailure, run_ranks
from tests.support.shard_runs import trainer, whole_parameters
from tests.support.stack import Block, Stack, token_data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 0}, "without sharding use bolt_ddp"),
        ({"stage": 4}, "stage=4 is no ZeRO stage"),
        ({"shard_size": 0}, "shard_size=0 holds no rank. Use 1 or more."),
        ({"shard_size": "host"}, "Use a number, or 'node'"),
        ({"offload_optimizer": "npu"}, "offload_optimizer='npu' does not exist."),
        ({"offload_optimizer": "nvm", "offload_path": "x"}, "Did you mean 'nvme'?"),
        ({"offload_optimizer": "nvme"}, "Set offload_path to a folder"),
        ({"offload_path": Path("x")}, "offload_path='x' is used by 'nvme' alone"),
        ({"offload_parameters": "cpu"}, "Set offload_optimizer='cpu' too."),
        ({"stage": 2, "offload_parameters": "cpu", "offload_optimizer": "cpu"}, "Use stage=3"),
        ({"offload_fraction": 0.5}, "Set offload_optimizer='cpu'"),
        ({"offload_fraction": 1.5, "offload_optimizer": "cpu"}, "a number above 0 and up to 1"),
        (
            {"offload_fraction": {"disk": 0.5}, "offload_optimizer": "cpu"},
            "Set offload_optimizer='nvme' and offload_path.",
        ),
        (
            {"offload_fraction": {"ram": 0.5}, "offload_optimizer": "cpu"},
            "offload_fraction has no tier 'ram'. Use 'host' and 'disk'",
        ),
        (
            {"offload_fraction": {"host": 0.8, "disk": 0.4}, "offload_optimizer": "cpu"},
            "their sum is at most 1",
        ),
        ({"tile_linear_bytes": 1 << 20, "stage": 2}, "Use stage=3."),
        ({"tile_linear_bytes": 100}, "Use at least 4096"),
    ],
)
def test_options_that_cannot_be_right_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ZeROStrategy(**arguments)
    assert message in str(refused.value)


def test_callbacks_that_take_a_shard_for_the_whole_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ModelPruning .* with ZeROStrategy .* its part alone"):
        refuse_callbacks([Callback(), ModelPruning("l1_unstructured")], "ZeROStrategy")


def test_two_trained_types_in_one_unit_are_refused_by_name() -> None:
    block = Block(4, 8)
    block.up.to(torch.bfloat16)
    with pytest.raises(ConfigError) as refused:
        refuse_mixed_types("blocks.0", block)
    said = str(refused.value)
    assert "'blocks.0.norm.weight' is torch.float32" in said
    assert "'blocks.0.up.weight' is torch.bfloat16" in said
    refuse_mixed_types("blocks.0", block.requires_grad_(False))


def test_complex_beside_real_weights_in_one_unit_are_told_to_be_kept_as_real_ones() -> None:
    block = Block(4, 8)
    block.spectrum = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"torch\.view_as_real of 'blocks\.0\.spectrum' the par"):
        refuse_mixed_types("blocks.0", block)


class Lazy(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(13, bias=False)


class Sparse(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7, sparse=True)


class Quasi(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Factored(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Orthogonal(Stack):
    def configure_optimizers(self) -> Any:
        matrices = [each for each in self.parameters() if each.dim() == 2]
        if not hasattr(torch.optim, "Muon"):
            return Preconditioner(matrices, {})
        return torch.optim.Muon(matrices)


class Preconditioner(torch.optim.Optimizer):
    """Scales a gradient by the inverse root of its rows' products, as Shampoo does."""

    def __init__(self, parameters: Any, defaults: dict[str, Any]) -> None:
        self.shift = 0.1
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            gradient = each.grad
            values, vectors = torch.linalg.eigh(gradient @ gradient.T)
            root = vectors @ torch.diag((values + self.shift).rsqrt()) @ vectors.T
            each.sub_(root @ gradient, alpha=0.1)


class Preconditioned(Stack):
    def configure_optimizers(self) -> Any:
        return Preconditioner([each for each in self.parameters() if each.dim() == 2], {})


class Signs(torch.optim.Optimizer):
    """An elementwise optimizer of somebody's own, with a norm, which shards have too."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad.sign() * each.norm(), alpha=0.001)


class Elementwise(Stack):
    def configure_optimizers(self) -> Any:
        return Signs([{"params": list(self.parameters())}], {})


class Shortened(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.max_norm = 1.0


class Told(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def fit(rank: int, world_size: int) -> list[str]:
    """Return what each model is refused with, in one process."""
    said = []
    models = [
        Lazy(), Sparse(), Quasi(), Stack(), Factored(), Orthogonal(),
        Preconditioned(), Elementwise(), Shortened(), Told(),
    ]  # fmt: skip
    for number, model in enumerate(models):
        blocks = ["layers.*"] if number == 3 else None
        strategy = ZeROStrategy(telemetry=False, blocks=blocks)
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        try:
            trainer.fit(model, token_data(4, 2))
        except ConfigError as refused:
            said.append(str(refused))
    sharded = Stack()
    for _ in range(2):
        strategy = ZeROStrategy(telemetry=False)
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        try:
            trainer.fit(sharded, token_data(4, 2))
        except ConfigError as refused:
            said.append(str(refused))
    return said


@pytest.mark.ranks
def test_models_and_optimizers_that_cannot_be_sharded_are_refused_by_name() -> None:
    (said,) = run_ranks(fit, 1)
    assert len(said) == 7
    assert "'head.weight' of Lazy has no shape yet" in said[0]
    assert "'embedding' of Sparse makes sparse gradients" in said[1]
    assert "LBFGS takes products of whole gradients" in said[2]
    assert "blocks='layers.*' matches no module of Stack. Did you mean 'blocks.*'?" in said[3]
    assert "Use bolt_ddp, or an optimizer that works on each element by itself" in said[2]
    assert "'embedding' of Shortened has max_norm=1.0, and would shorten" in said[4]
    assert "'head.weight' of Told has a post-accumulate-grad hook" in said[5]
    assert "'embedding.weight' of Stack is sharded already, by another strategy." in said[6]


class Bypassed(Stack):
    """Runs a layer of a block, but not the block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, block = self.embedding(tokens), self.blocks[0]
        assert isinstance(block, Block)
        return self.head(self.norm(x + block.down(block.up(x))))


class Coupling(nn.Module):
    """Runs backwards in training, as the layers of normalizing flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))

    def inverse(self, x: Tensor) -> Tensor:
        return x - self.net(x.flip(-1))

    forward = inverse


class Inverted(Stack):
    """A flow: no forward of its blocks ever runs."""

    def __init__(self) -> None:
        super().__init__(width=24)
        self.blocks = nn.ModuleList([Coupling(), Coupling()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            assert isinstance(block, Coupling)
            x = block.inverse(x)
        return self.head(self.norm(x))


class Reused(Stack):
    """Runs layers of its first block once more behind the last one, as the last norm of a DiT."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, first = self.embedding(tokens), self.blocks[0]
        for block in self.blocks:
            x = block(x)
        assert isinstance(first, Block)
        return self.head(self.norm(x + first.down(first.up(x))))


class Decayed(Stack):
    """Adds the norm of a weight to its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.1 * self.head.weight.norm()


class Projected(Stack):
    """Multiplies with a weight past its layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + (torch.ones(2, 101) @ self.head.weight.t()).sum()


def fit_wrongly(
    rank: int, world_size: int, kind: type[Stack], options: dict[str, Any], tile: int | None
) -> None:
    strategy = ZeROStrategy(telemetry=False, tile_linear_bytes=tile)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(kind(**options), token_data(8, 2))


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "called"), [(Bypassed, "up"), (Inverted, "net")])
def test_a_layer_that_runs_without_its_block_is_explained(kind: type[Stack], called: str) -> None:
    said = (
        rf"'blocks\.0\.{called}\..*weight'.* were computed with while sharded: the module ran.* "
        rf"Let it be gathered by itself, with blocks=\['blocks\.\*', 'blocks\.\*\.{called}'\]"
    )
    with pytest.raises(RankFailure, match=said):
        run_ranks(fit_wrongly, 2, kind, {}, None)


def invert(rank: int, world_size: int, stage: int) -> float:
    strategy = ZeROStrategy(stage=stage, telemetry=False, blocks=["blocks.*", "blocks.*.net"])
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Inverted(), token_data(8, 2))
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.full
@pytest.mark.ranks
def test_a_flow_trains_with_the_blocks_that_its_error_names() -> None:
    assert run_ranks(invert, 2, 3) == pytest.approx(run_ranks(invert, 2, 1), rel=1e-6)


class Transformed(Stack):
    """Takes a derivative through a block by a transform of torch.func."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0]).detach()
        slope = torch.func.grad(lambda each: self.blocks[0](each).square().sum())(x)
        return self.loss(batch) + slope.square().mean()


class GoesBack(Stack):
    """Computes gradients in the step, and the loss behind them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loss(batch).backward()
        return self.loss(batch)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Transformed, r"A transform of torch\.func.*Compute derivatives by torch\.autograd\.grad"),
        (GoesBack, r"training_step's own, set self\.automatic_optimization=False, else call"),
    ],
)
def test_derivatives_that_gathers_do_not_bear_are_explained(kind: type[Stack], said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        run_ranks(fit_wrongly, 2, kind, {}, None)


class Read(Stack):
    """Reads a weight of a layer of a list past its forward, as the prompt encoder of SAM does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.points = nn.ModuleList(nn.Embedding(1, self.embedding.embedding_dim) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        first, second = (each.get_parameter("weight") for each in self.points)
        return super().forward(tokens) + self.head(first - second)


@pytest.mark.full
@pytest.mark.ranks
def test_a_block_of_which_a_weight_is_read_is_told_to_be_left_out_of_blocks() -> None:
    said = (
        r"'points\.0\.weight'.* "
        r"Let it be gathered with what is around it, with blocks=\['blocks\.\*'\], call"
    )
    with pytest.raises(RankFailure, match=said):
        run_ranks(fit_wrongly, 2, Read, {}, None)


def read(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Read()
    options = {"blocks": ["blocks.*"]}
    run = (
        quiet_trainer(1, max_epochs=2)
        if world_size == 1
        else trainer(world_size, 3, options=options, max_epochs=2, use_distributed_sampler=False)
    )
    run.fit(module, token_data(8, 4))  # the same on all ranks
    return whole_parameters(module)


@pytest.mark.full
@pytest.mark.ranks
def test_a_weight_that_is_read_trains_when_its_layer_is_left_out_of_blocks() -> None:
    (wanted,) = run_ranks(read, 1)
    for got in run_ranks(read, 2):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def reuse(rank: int, world_size: int, options: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Reused()
    if options is None:
        run = quiet_trainer(1, max_epochs=2)
    else:
        blocks = ["blocks.*", "blocks.0.up", "blocks.0.down"]
        run = trainer(
            world_size,
            3,
            options={**options, "blocks": blocks},
            max_epochs=2,
            use_distributed_sampler=False,
        )
    run.fit(module, token_data(8, 4))  # the same on all ranks
    return whole_parameters(module)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_layers_that_run_without_their_block_too_train_as_blocks_of_their_own(
    offload: str | None,
) -> None:
    (wanted,) = run_ranks(reuse, 1, None)
    options = {"offload_optimizer": offload, "offload_parameters": offload}
    for got in run_ranks(reuse, 2, options):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Decayed, Projected])
def test_a_weight_in_tiles_that_is_read_directly_is_named(kind: type[Stack]) -> None:
    with pytest.raises(RankFailure) as failed:
        run_ranks(fit_wrongly, 2, kind, {"width": 101, "hidden": 11}, 4096)
    said = str(failed.value)
    assert "'head.weight' is gathered in tiles, by its own layer alone" in said
    assert "gathered_parameters(...); to train through it, set tile_linear_bytes to 5252" in said


class CopiesItself(Stack):
    def on_train_start(self) -> None:
        copy.deepcopy(self.blocks[0])


@pytest.mark.full
@pytest.mark.ranks
def test_a_copy_of_a_sharded_module_is_refused_with_where_to_make_it() -> None:
    with pytest.raises(RankFailure, match=r"called for Block .*Copy it before the run, in "):
        run_ranks(fit_wrongly, 2, CopiesItself, {}, None)

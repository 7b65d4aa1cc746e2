"""What the stages of a pipeline would do apart is refused by name; clipping by hand is right."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch import utilities as lightning_utilities
from lightning.pytorch.callbacks import ModelPruning, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from boltmesh.errors import ConfigError
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.dry_run.unsupported import refuse_run
from boltmesh.strategies.optimizer_probe import mixes_parameters
from boltmesh.strategies.pipeline.options import (
    STAGES,
    refuse_manual_optimization,
    refuse_optimizers,
)
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import RankFailure, reuse_ranks, run_ranks
from tests.support.stack import Stack, token_data


class LogsNorms(Stack):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class LogsNormsBySubmodule(Stack):
    def on_after_backward(self) -> None:
        self.log_dict(lightning_utilities.grad_norm(self, norm_type=2))


class TotalNorm(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        gradients = [each.grad for each in pl_module.parameters()]
        pl_module.log("norm", max(get_total_norm([each]) for each in gradients))


class OwnNorm(Stack):
    """Whose method is nobody else's function."""

    def grad_norm(self) -> float:
        return 1.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grad_norm()


class ByHand(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def refuse(module: Any, *callbacks: Callback, fn: Any = TrainerFn.FITTING, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.state.fn = fn
    options = {"synchronises_norms": False, **options}
    refuse_run(trainer, module, "training_step", because=STAGES, **options)


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "said"),
    [
        (Stack, [], {"synchronises_norms": True}, "sync_batchnorm=True .* GroupNorm"),
        (LogsNorms, [], {}, r"LogsNorms.on_before_optimizer_step calls grad_norm.*gradient_norm\("),
        (LogsNormsBySubmodule, [], {}, "LogsNormsBySubmodule.on_after_backward calls grad_norm"),
        (Stack, [TotalNorm()], {}, "TotalNorm.on_before_optimizer_step calls get_total_norm"),
    ],
)
def test_what_stages_would_do_apart_is_refused(
    module: Any, callbacks: Any, options: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse(module(), *callbacks, **options)


def test_what_every_stage_does_alike_is_not_refused() -> None:
    refuse(Stack(), Callback())
    refuse(OwnNorm())
    refuse(Stack(), synchronises_norms=True, fn=TrainerFn.TESTING)


def test_backward_passes_that_a_step_asks_for_are_refused() -> None:
    refuse_manual_optimization(Stack())
    with pytest.raises(ConfigError, match="ByHand optimises by hand"):
        refuse_manual_optimization(ByHand())


class ClipsItself(torch.optim.SGD):
    """Clips by the norm of all gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Estimates(Optimizer):
    """Grows its step by what it has seen of all gradients, from the second one on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "seen": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * group["seen"] * each.grad)
            group["seen"] += sum(float(each.grad.abs().sum()) for each in group["params"])


class Noisy(Optimizer):
    """Draws random numbers, and looks at one gradient at a time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * (each.grad / each.grad.norm() + torch.randn_like(each)))


class Wraps(Optimizer):
    """Steps another optimizer, of which nothing can be told."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("kind", "is_joint"),
    [
        (torch.optim.LBFGS, True),
        (ClipsItself, True),
        (Estimates, True),
        (Noisy, False),
        (Wraps, False),
        (torch.optim.AdamW, False),
        (torch.optim.Adafactor, False),
    ],
)
def test_optimizers_that_look_at_all_gradients_are_found(kind: Any, is_joint: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = kind(parameters)
    state = torch.get_rng_state()
    assert mixes_parameters(optimizer) == is_joint
    assert torch.equal(torch.get_rng_state(), state)
    assert all(bool((each == 1).all()) for each in parameters)
    assert not optimizer.state
    if is_joint:
        with pytest.raises(ConfigError, match=f"{kind.__name__} steps each parameter by"):
            refuse_optimizers([optimizer])


class Clips(Stack):
    """Clips in its own way, and notes the norms."""

    def __init__(self, how: str) -> None:
        super().__init__(depth=4, ties=True, optimizer="sgd")
        self.how = how
        self.norms: list[float] = []

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.how == "lightning":
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            return
        kind = float(self.how)
        norm = clip_grad_norm_(self.parameters(), 0.3, norm_type=kind)
        self.norms.append(float(norm))


HOWS = ("lightning", "2", "1", "inf")


def clipped(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], list[float]]]:
    found = []
    for how in HOWS:
        strategy: Any = DDPStrategy(telemetry=False)
        if world_size > 1:
            strategy = PipelineParallelStrategy(telemetry=False, microbatches=4)
        seed_everything(1, verbose=False)
        module = Clips(how)
        Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(module, token_data(24, 8))  # fmt: skip
        named = module.named_parameters()
        held = {name: each.detach() for name, each in named if rank == 0 or strategy.holds(name)}
        found.append(
            ({name: each for name, each in held.items() if not each.isnan().any()}, module.norms)
        )
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_clipping_by_hand_takes_the_norm_over_all_stages() -> None:
    (alone,) = run_ranks(clipped, 1)
    ranks = run_ranks(clipped, 2)
    names = set()
    for values in ranks:
        for how, (held, norms), (reference, expected) in zip(HOWS, values, alone, strict=True):
            assert norms == pytest.approx(expected, rel=1e-5), how
            assert (how == "lightning") == (not expected)
            assert not expected or max(expected) > 0.3  # it does clip
            for name, each in held.items():
                torch.testing.assert_close(each, reference[name], rtol=1e-5, atol=1e-6)
                names.add(name)
    assert names == alone[0][0].keys()
    assert torch.nn.utils.clip_grad._get_total_norm.__module__ == "torch.nn.utils.clip_grad"


def run_with(rank: int, world_size: int, arguments: dict[str, Any], optimizer: str) -> None:
    class Model(Stack):
        def configure_optimizers(self) -> Any:
            return getattr(torch.optim, optimizer)(self.parameters())

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": PipelineParallelStrategy(telemetry=False, microbatches=2),
    }
    trainer = Trainer(accelerator="cpu", devices=world_size, max_steps=1, **{**quiet, **arguments})
    trainer.fit(Model(), token_data(16, 8))


@pytest.mark.sample("arguments0-SGD-sync_batchnorm=True")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("arguments", "optimizer", "said"),
    [
        ({"sync_batchnorm": True}, "SGD", "sync_batchnorm=True"),
        (
            {"callbacks": [ModelPruning("l1_unstructured")]},
            "SGD",
            "ModelPruning .* with PipelineParallelStrategy every rank would work on",
        ),
        ({}, "LBFGS", "LBFGS steps each parameter by"),
        (
            {"callbacks": [OnExceptionCheckpoint("x")], "enable_checkpointing": True},
            "SGD",
            "saves when a rank fails",
        ),
    ],
)
def test_a_run_is_refused_on_all_ranks(arguments: Any, optimizer: str, said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        run_ranks(run_with, 2, arguments, optimizer)


class Averaged(Stack):
    """Moves a copy of layers that several stages hold, in a hook."""

    def on_train_batch_end(self, *_: Any) -> None:
        for each in self.parameters():
            each.detach().mul_(0.9)


class Gathering(Stack):
    """Whose step counts the rows of all data ranks, and whose validation, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * self.all_gather(torch.tensor(4.0)).mean() / 4

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", self.all_gather(torch.tensor(float(len(batch[0])))).sum())


def gather(rank: int, world_size: int, stages: int, method: str) -> float:
    strategy = PipelineParallelStrategy(stages=stages, timeout_s=60.0, telemetry=False)
    trainer = quiet_trainer(world_size, strategy, max_steps=1)
    getattr(trainer, method)(Gathering(depth=4), token_data(8, 4))
    return float(trainer.callback_metrics.get("rows", 0))


@pytest.mark.ranks
def test_a_step_that_gathers_values_of_other_pipelines_is_refused() -> None:
    with pytest.raises(RankFailure, match="training_step gathers values of all data ranks"):
        run_ranks(gather, 4, 2, "fit")
    run_ranks(gather, 2, 2, "fit")
    assert run_ranks(gather, 4, 2, "validate") == [8.0] * 4


class Listed(Stack):
    """Has its list from a hook of training."""

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.losses.append(loss := super().training_step(batch, batch_idx))
        return loss


def ended(rank: int, world_size: int) -> list[str]:
    said = []
    for kind in (Listed, Averaged):
        trainer = Trainer(
            accelerator="cpu", devices=world_size, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            strategy=PipelineParallelStrategy(telemetry=False, microbatches=2),
        )  # fmt: skip
        with pytest.raises((ConfigError, RuntimeError)) as raised:
            trainer.fit(kind(), token_data(16, 8))
        said.append(str(raised.value))
    return said


@pytest.mark.full
@pytest.mark.ranks
def test_what_hooks_cannot_do_in_a_pipeline_is_said_in_one_line() -> None:
    for listed, averaged in run_ranks(ended, 2):
        assert "'Listed' object has no attribute 'losses'. training_step is looked at" in listed
        assert "Set the attribute in __init__ or setup" in listed
        assert "A parameter that another rank of the pipeline has was written to" in averaged


class ClipsParts(Stack):
    """Takes norms of parts of its gradients; keeps what is said of parts that ranks have apart."""

    def __init__(self) -> None:
        super().__init__(depth=4, ties=True, groups=True)
        self.norms: list[float] = []
        self.said = ""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        by_group = [group["params"] for group in optimizer.param_groups]
        present = [each for each in self.parameters() if each.grad is not None]
        parts: list[Any] = [*self.parameters(), *by_group, self.blocks[0].parameters(), present]
        self.norms += [float(clip_grad_norm_(each, 1e6)) for each in parts]
        try:
            for each in present:
                clip_grad_norm_(each, 1e-3)
        except ConfigError as error:
            self.said = str(error)


def clips_parts(rank: int, world_size: int) -> tuple[list[float], str]:
    strategy: Any = DDPStrategy(telemetry=False)
    if world_size > 1:
        strategy = PipelineParallelStrategy(telemetry=False, microbatches=4)
    seed_everything(1, verbose=False)
    module = ClipsParts()
    quiet_trainer(world_size, strategy, max_steps=1).fit(module, token_data(8, 8))
    return module.norms, module.said


@pytest.mark.ranks
def test_gradients_are_clipped_by_part_where_all_ranks_name_the_same_part() -> None:
    ((alone, said),) = reuse_ranks(clips_parts, 1)
    assert not said
    for norms, said in reuse_ranks(clips_parts, 2):
        assert norms == pytest.approx(alone, rel=1e-4, abs=1e-7)
        assert "with other parameters on other stages" in said


class Forces(nn.Module):
    """A layer that gives forces by what every block gets, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy, self.near = nn.Linear(width, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        energy = self.energy(x) + self.near(torch.tanh(places))
        (force,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return force


class Backward(Forces):
    """A layer that differentiates by all that its only input was made of."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        self.energy(x).sum().backward(retain_graph=True)
        return x


class OwnForces(Forces):
    """A layer that gives forces by what it makes itself."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) + super().forward(x, places.detach().requires_grad_())


class Slopes(Stack):
    """Computes derivatives in a step, as force fields do: by what every block gets, or by logits,
    or in a layer; or changes gradients between its blocks.

    The graph of each stage leads to ``places``, and holds a part of their derivative.
    """

    def __init__(self, where: str) -> None:
        super().__init__(depth=4, optimizer="sgd")
        self.where = where
        if where in LAYERS:
            self.forces = LAYERS[where](self.embedding.embedding_dim)

    def slope(self, tokens: Tensor) -> Tensor:
        places = 0.1 * tokens[..., None].float()
        with torch.enable_grad():
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x + places.requires_grad_())
            if self.where in LAYERS:
                forces: Tensor = self.forces(
                    x, places.detach() if self.where == "backward" else places
                )
                return forces.square().mean()
            logits = self.head(self.norm(x))
            by = logits if self.where == "logits" else places
            (slope,) = torch.autograd.grad(logits.square().sum(), by, create_graph=True)
        return slope.square().mean()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            if self.where == "hook" and x.requires_grad:  # as MuZero scales gradients of states
                x.register_hook(lambda gradient: gradient * 0.5)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.where in ("validation", "hook") else loss + self.slope(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation":
            self.log("val_loss", self.slope(batch[0]))


LAYERS = {"layer": Forces, "backward": Backward, "own": OwnForces}


def sloped(rank: int, world_size: int, where: str) -> dict[str, Tensor] | str:
    strategy: Any = PipelineParallelStrategy(telemetry=False, microbatches=2)
    seed_everything(1, verbose=False)
    module = Slopes(where)
    trainer = quiet_trainer(
        world_size, strategy if world_size > 1 else "auto", max_steps=2, inference_mode=False
    )
    try:
        trainer.fit(module, token_data(16, 8), token_data(8, 8))
    except ConfigError as error:
        return str(error)
    return {
        name: each.detach() for name, each in module.named_parameters() if not each.isnan().any()
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("training", r"The step \(.*test_refusals.py:\d+\) computes derivatives through layers"),
        ("validation", "calls 'blocks.0' in evaluation, with gradients on, computes"),
        ("layer", r"'forces' \(Forces\) computes derivatives through layers"),
        ("backward", r"'forces' \(Backward\) computes derivatives through layers"),
        ("hook", r"The step \(.*test_refusals.py:\d+\) calls register_hook of what layers give"),
    ],
)
def test_derivatives_and_gradient_hooks_between_stages_are_refused(where: str, said: str) -> None:
    for found in reuse_ranks(sloped, 2, where):
        assert isinstance(found, str)
        assert re.search(said, found)


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["own", pytest.param("logits", marks=pytest.mark.full)])
def test_derivatives_within_the_last_layer_or_behind_it_are_those_of_one_process(
    where: str,
) -> None:
    (alone,) = reuse_ranks(sloped, 1, where)
    for held in reuse_ranks(sloped, 2, where):
        for name, each in held.items():
            torch.testing.assert_close(each, alone[name], rtol=1e-5, atol=1e-6)

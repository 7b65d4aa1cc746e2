"""What ``DDPStrategy`` refuses, and that Lightning's features work with it as with stock DDP."""

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException

from boltmesh.errors import ConfigError
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.data_parallel.ddp import DdpAxis, DdpOptions
from tests.support.models import Regression, regression_data
from tests.support.ranks import RankFailure, run_ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_compression": "powersdg"}, "Did you mean 'powersgd'?"),
        ({"gradient_compression": "zip"}, "Use bf16 or powersgd."),
        ({"bucket_cap_mb": 0}, "Use 25"),
        ({"static_graph": True, "find_unused_parameters": True}, "Drop find_unused_parameters."),
        ({"gradient_compression": "powersgd", "powersgd_rank": 0}, "Use 1 or more."),
        ({"gradient_compression": "powersgd", "powersgd_start_step": 1}, "Use 2 or more."),
    ],
)
def test_options_that_cannot_be_right_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DDPStrategy(**arguments)
    assert message in str(refused.value)


def test_powersgd_with_a_loss_scaler_is_refused_when_the_trainer_is_built() -> None:
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match="bf16-mixed"):
        Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(gradient_compression="powersgd"),
            plugins=[plugin],
            logger=False,
        )


def trainer(world_size: int, **arguments: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": DDPStrategy(telemetry=False),
    }
    return Trainer(accelerator="cpu", devices=world_size, **{**quiet, **arguments})


def fit_with_monitors(rank: int, world_size: int, folder: Path) -> Any:
    seed_everything(1)
    best = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    finder = LearningRateFinder(num_training_steps=40, attr_name="lr")
    module = Regression()
    run = trainer(
        world_size,
        max_epochs=9,
        callbacks=[best, stopping, finder],
        enable_checkpointing=True,
        logger=CSVLogger(folder),
        default_root_dir=folder,
    )
    run.fit(module, regression_data(37, 4), regression_data(13, 4))
    tested = run.test(module, regression_data(13, 4), ckpt_path="best", verbose=False)
    kept = sorted(path.name for path in folder.glob("*.ckpt"))
    return run.current_epoch, kept, best.best_model_path, tested[0]["val_loss"], module.lr


@pytest.mark.full
@pytest.mark.ranks
def test_monitors_loggers_and_the_lr_finder_agree_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(fit_with_monitors, 2, tmp_path)
    epochs, kept, _, _, learning_rate = first
    assert first == second
    assert epochs == 2
    assert learning_rate != 0.01
    assert kept == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert len(list(tmp_path.glob("lightning_logs/*/metrics.csv"))) == 1


class Stops(Callback):
    """Receives a SIGTERM in the middle, as from a scheduler."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)


def fit_until_sigterm(rank: int, world_size: int) -> Any:
    run = trainer(world_size, max_epochs=3, callbacks=[Stops()])
    try:
        run.fit(Regression(), regression_data(48, 4))
    except SIGTERMException:
        return run.global_step
    return None


@pytest.mark.ranks
def test_sigterm_ends_every_rank_at_the_same_step() -> None:
    ends = run_ranks(fit_until_sigterm, 2)
    assert ends[0] == ends[1]
    assert ends[0] is not None


def fit_with_gradients(rank: int, world_size: int, accumulate: int, is_view: bool) -> Any:
    """Return parameters, and how many memories hold the gradients after each step."""
    seed_everything(1)
    counts = []

    class Counts(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            gradients = [each.grad for each in pl_module.parameters()]
            counts.append(len({each.untyped_storage().data_ptr() for each in gradients}))

    strategy = DDPStrategy(telemetry=False, gradient_as_bucket_view=is_view)
    module = Regression()
    run = trainer(
        world_size, strategy=strategy, max_steps=3, accumulate_grad_batches=accumulate,
        callbacks=[Counts()],
    )  # fmt: skip
    run.fit(module, regression_data(48, 4))
    return counts, [each.detach().clone() for each in module.parameters()]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_kept_in_their_buckets_unless_that_is_turned_off(accumulate: int) -> None:
    viewed = run_ranks(fit_with_gradients, 2, accumulate, True)
    apart = run_ranks(fit_with_gradients, 2, accumulate, False)
    number = len(list(Regression().parameters()))
    for (counts, parameters), (all_counts, others) in zip(viewed, apart, strict=True):
        assert all_counts == [number] * 3
        assert max(counts) <= 2  # torch's first bucket is small
        for one, other in zip(parameters, others, strict=True):
            assert torch.equal(one, other)


class Optimistic(torch.optim.Optimizer):
    """Steps by gradients and their change, and keeps those of the step before, no copies."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for each in self.param_groups[0]["params"]:
            before = self.state[each].get("before", torch.zeros_like(each))
            each.sub_(2 * each.grad - before, alpha=0.1)
            self.state[each]["before"] = each.grad
        return loss


class SteppedOptimistically(Regression):
    def configure_optimizers(self) -> Any:
        return Optimistic(self.parameters())


def fit_optimistically(rank: int, world_size: int) -> list[torch.Tensor]:
    seed_everything(1)
    module = SteppedOptimistically()
    strategy = DDPStrategy(telemetry=False) if world_size > 1 else "auto"
    run = trainer(world_size, strategy=strategy, max_steps=4, use_distributed_sampler=False)
    run.fit(module, regression_data(48, 4))  # the same batches on all ranks
    return [each.detach().clone() for each in module.parameters()]


@pytest.mark.ranks
def test_gradients_that_an_optimizer_keeps_stay_what_they_are() -> None:
    (expected,) = run_ranks(fit_optimistically, 1)
    for found in run_ranks(fit_optimistically, 2):
        torch.testing.assert_close(found, expected)


class Silent(Regression):
    """Logs nothing: with torch 2.13 dynamo fails in ``self.log``, under any strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


def fit_compiled(rank: int, world_size: int) -> Any:
    seed_everything(1)
    plain, other = Silent(), Silent()
    other.load_state_dict(plain.state_dict())
    for module in (plain, torch.compile(other, backend="aot_eager")):
        trainer(world_size, max_steps=3).fit(module, regression_data(24, 4))  # type: ignore[arg-type]
    pairs = zip(plain.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow
def test_a_compiled_module_trains_to_the_same_parameters() -> None:
    assert max(run_ranks(fit_compiled, 2)) < 1e-5


class LeavesOut(Regression):
    """Leaves a layer out of the loss, which DDP has to be told."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, uses_side=False)


def fit_leaving_out(rank: int, world_size: int, has_frozen_weight: bool) -> None:
    module = LeavesOut()
    module.side.weight.requires_grad_(not has_frozen_weight)
    trainer(world_size, max_steps=3).fit(module, regression_data(24, 4))


@pytest.mark.ranks
@pytest.mark.parametrize("has_frozen_weight", [True, False])
def test_unused_parameters_are_explained(has_frozen_weight: bool) -> None:
    names = "'side.bias'" if has_frozen_weight else "'side.weight', 'side.bias'"
    message = f"{names} took no part in .*strategy='bolt_ddp_find_unused_parameters_true'"
    with pytest.raises(RankFailure, match=f"[^,] {message}"):
        run_ranks(fit_leaving_out, 2, has_frozen_weight)


def test_arguments_of_torch_are_named_as_ours() -> None:
    error = RuntimeError(
        "Expected to mark a variable ready only once. You can disable unused parameter detection "
        "by passing the keyword argument `find_unused_parameters=False` to "
        "`torch.nn.parallel.DistributedDataParallel`. You can try to use _set_static_graph() as a "
        "workaround."
    )
    DdpAxis(DdpOptions(find_unused_parameters=True)).explain(error)
    assert "torch" not in str(error)
    assert "`find_unused_parameters=False` to `DDPStrategy`" in str(error)
    assert "use `DDPStrategy(static_graph=True)` as" in str(error)


class Draws(LightningModule):
    """Shows which random numbers training sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(torch.rand(1).item())
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def draw(rank: int, world_size: int, seed: int | None) -> list[float]:
    seed_everything(5)
    module = Draws()
    strategy = DDPStrategy(telemetry=False, seed=seed)
    trainer(world_size, strategy=strategy, max_steps=3).fit(module, regression_data(24, 4))
    return module.seen


def unfreeze_late(rank: int, world_size: int) -> None:
    class Unfreezes(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            next(iter(self.parameters())).requires_grad_(batch_idx > 0)

    module = Unfreezes()
    next(iter(module.parameters())).requires_grad_(False)
    trainer(world_size, max_steps=3).fit(module, regression_data(24, 4))


@pytest.mark.ranks
def test_a_parameter_that_is_unfrozen_in_the_run_is_refused_by_name() -> None:
    with pytest.raises(RankFailure, match="was unfrozen after the run had begun"):
        run_ranks(unfreeze_late, 2)


def renormalise(rank: int, world_size: int) -> None:
    module = Regression()
    module.table = torch.nn.Embedding(3, 2, max_norm=0.5)
    trainer(world_size, max_steps=1).fit(module, regression_data(24, 4))


@pytest.mark.full
@pytest.mark.ranks
def test_an_embedding_that_shortens_rows_is_refused_by_name_where_replicas_would_differ() -> None:
    with pytest.raises(RankFailure, match=r"'table' has max_norm=0\.5.*replicas differ"):
        run_ranks(renormalise, 2)
    run_ranks(renormalise, 1)


@pytest.mark.full
@pytest.mark.ranks
def test_a_seed_gives_every_rank_a_stream_of_its_own_that_repeats() -> None:
    alike = run_ranks(draw, 2, None)
    assert alike[0] == alike[1]
    first, second = run_ranks(draw, 2, 3)
    assert first != second
    assert run_ranks(draw, 2, 3) == [first, second]


def resume_with_powersgd(rank: int, world_size: int, folder: Path) -> list[str]:
    path = folder / "a.ckpt"
    for resumed in (None, path):
        strategy = DDPStrategy(telemetry=False, gradient_compression="powersgd")
        run = trainer(world_size, strategy=strategy, max_epochs=1 if resumed is None else 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fit(Regression(), regression_data(24, 4), ckpt_path=resumed)
        run.save_checkpoint(path)
    return [str(each.message) for each in caught]


@pytest.mark.full
@pytest.mark.ranks
def test_a_resumed_powersgd_says_what_it_has_lost(tmp_path: Path) -> None:
    for messages in run_ranks(resume_with_powersgd, 2, tmp_path):
        assert any("PowerSGD had not sent yet" in message for message in messages)


class FastClock(Callback):
    """Lets the clock of one rank run ahead after the third batch."""

    def __init__(self) -> None:
        self.validated: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            trainer._last_val_time = float("-inf")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated.append(trainer.global_step)


def validate_by_time(rank: int, world_size: int) -> list[int]:
    clock = FastClock()
    every = timedelta(hours=1)
    run = trainer(world_size, callbacks=[clock], val_check_interval=every, num_sanity_val_steps=0)
    run.fit_loop.max_epochs = 1
    run.fit(Regression(), regression_data(48, 4), regression_data(8, 4))
    return clock.validated


@pytest.mark.full
@pytest.mark.ranks
def test_a_validation_that_goes_by_time_begins_on_all_ranks_behind_the_same_batch() -> None:
    assert run_ranks(validate_by_time, 2) == [[3], [3]]

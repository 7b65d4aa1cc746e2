"""The callback follows Lightning's loops, with two ranks and a Trainer."""

import contextlib
import time
from functools import partial
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from boltmesh.strategies.lightning_compat.trainer import callbacks_of
from boltmesh.strategies.telemetry import follow_loops
from boltmesh.telemetry.callback import TelemetryCallback
from boltmesh.telemetry.reader.reader import list_jobs, open_job
from boltmesh.telemetry.writer import step_queue
from boltmesh.telemetry.writer.lightning_compat import loader_queue
from boltmesh.telemetry.writer.throughput import count
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Model(lightning.LightningModule):
    def __init__(self, fail_at=None, error=None):
        super().__init__()
        self.lr = 0.01
        self.layer = torch.nn.Linear(4, 4)
        self.fail_at = fail_at
        self.error = error
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        if batch_idx == self.fail_at:
            raise self.error
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        time.sleep(0.02)
        self.log("val_loss", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowData(Dataset):
    """Takes 30 ms an item."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.ones(4), torch.zeros(5, dtype=torch.long)


def loader(num_items=32, batch_size=4):
    return DataLoader(TensorDataset(torch.randn(num_items, 4)), batch_size=batch_size)


def strategy():
    from boltmesh.strategies import DDPStrategy

    return DDPStrategy()


def trainer(**options):
    return lightning.Trainer(**{**QUIET, "strategy": strategy(), "devices": 2, **options})


def look(which=None):
    torch.distributed.barrier()
    with open_job(which) as job:
        return job.snapshot()


def phases(step):
    return {each.name: each.seconds for each in step.phases}


def fit_worker(rank, world_size, folder):
    model = Model()
    checkpoint = ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1)
    fit = trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        val_check_interval=2,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    fit.fit(model, loader(), loader(8))
    return look(), model.losses, fit.global_step


@pytest.mark.ranks
def test_a_fit_with_accumulation_validation_and_checkpoints_is_followed(tmp_path):
    for rank, (seen, losses, global_step) in enumerate(run_ranks(fit_worker, 2, str(tmp_path))):
        steps = seen.ranks[rank].steps
        assert (seen.state, seen.cause) == ("finished", None)
        assert [step.index for step in steps] == list(range(8))
        assert [step.epoch for step in steps] == [0] * 4 + [1] * 4
        assert [step.global_step for step in steps] == [0, 1, 1, 2, 2, 3, 3, 4]
        assert global_step == seen.global_step == 4
        assert [step.loss for step in steps] == pytest.approx(losses)
        assert {step.samples for step in steps} == {4}
        assert {step.tokens for step in steps} == {None}
        # Validation runs after every second batch; its time belongs to the step that follows.
        validated = [phases(step)["validation"] > 0.01 for step in steps]
        assert validated == [False, False, True, False, True, False, True, False]
        for step in steps:
            assert sum(phases(step).values()) == pytest.approx(step.seconds, abs=1e-6)
            assert phases(step)["forward"] > 0
            assert phases(step)["backward"] > 0
        assert {"loss", "lr", "train_loss", "val_loss", "epoch_loss"} <= set(seen.metrics)
        history: dict[str, list[int]] = {}
        for point in seen.history:
            history.setdefault(point.name, []).append(point.global_step)
        assert history["val_loss"] == [1, 2, 3, 4]
        assert history["epoch_loss"] == [2, 4]
        assert history["lr"] == [1, 2, 3, 4]
        assert seen.checkpoint is not None
        assert seen.checkpoint.endswith(".ckpt")
        kinds = [event.kind for event in seen.events if event.rank == 0]
        assert kinds.count("validation") == 4
        assert kinds.count("checkpoint") == 4  # after each validation


class FullQueue(Callback):
    """Lets a batch end only when the loader's worker has made all that it may make ahead."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        while batch_idx < 12 and (loader_queue(trainer) or 0) < 3:
            time.sleep(0.001)


def queue_worker(rank, world_size):
    data = TensorDataset(torch.randn(64, 4))
    batches = DataLoader(data, batch_size=4, num_workers=1, prefetch_factor=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_queue, "WRITE_EVERY_NS", 0)  # before the next batch is counted
        trainer(devices=1, max_epochs=1, callbacks=[FullQueue()]).fit(Model(), batches)
    return look()


@pytest.mark.full
@pytest.mark.ranks
def test_batches_that_the_loader_has_ready_are_a_series():
    (seen,) = run_ranks(queue_worker, 1)
    ready = [point.value for point in seen.trends if point.name == "loader_queue"]
    assert len(ready) == 2  # a point every eight batches
    assert ready[0] in {2, 3}  # one of three was taken, perhaps another is ready since


def slow_worker(rank, world_size):
    fit = trainer(max_epochs=1, limit_val_batches=0)
    fit.fit(Model(), DataLoader(SlowData(), batch_size=2))
    return look().ranks[rank].steps


@pytest.mark.full
@pytest.mark.ranks
def test_waiting_for_the_loader_is_the_data_phase():
    for steps in run_ranks(slow_worker, 2):
        assert len(steps) == 4
        for step in steps[1:]:
            assert 0.05 < phases(step)["data"] < step.seconds
            assert step.tokens == 10


def failing_worker(rank, world_size, error):
    fit = trainer(max_epochs=1, limit_val_batches=0)
    with contextlib.suppress(ValueError, SystemExit):
        fit.fit(Model(fail_at=2, error=error), loader())
    return look()


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad batch"), "ValueError: bad batch"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_recorded_with_its_phase(error, said):
    for seen in run_ranks(failing_worker, 2, error):
        assert seen.state == "failed"
        assert [rank.error for rank in seen.ranks] == [said, said]
        assert seen.cause is not None
        assert seen.cause.endswith(f"failed in forward after step 2: {said}")


def several_worker(rank, world_size):
    model = Model()
    fit = trainer(max_epochs=1)
    fit.fit(model, loader(), loader(8))
    fit.fit_loop.max_epochs = 2
    fit.fit(model, loader(), loader(8))
    fit.validate(model, loader(8), verbose=False)
    torch.distributed.barrier()
    return [(job.state, job.global_step) for job in reversed(list_jobs())]


@pytest.mark.full
@pytest.mark.ranks
def test_each_run_of_one_trainer_is_a_job_that_ends_well():
    for jobs in run_ranks(several_worker, 2):
        assert jobs == [("finished", 4), ("finished", 8), ("finished", 0)]


def one_job_worker(rank, world_size):
    import os

    os.environ["BOLTMESH_JOB_ID"] = "one"
    model = Model()
    fit = trainer(max_epochs=1)
    fit.fit(model, loader(), loader(8))
    fit.validate(model, loader(8), verbose=False)
    return look("one")


@pytest.mark.full
@pytest.mark.ranks
def test_runs_under_one_id_are_one_job():
    for seen in run_ranks(one_job_worker, 2):
        assert seen.state == "finished"
        assert len(seen.ranks[0].steps) == 4


class TimedFinder(LearningRateFinder):
    """Knows when it has found a rate, and when the second batch after that begins."""

    found_s = second_s = 0.0

    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        self.found_s = time.monotonic()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.found_s and batch_idx == 1:
            self.second_s = time.monotonic()


def tuned_worker(rank, world_size):
    finder = TimedFinder(num_training_steps=3, update_attr=False)
    fit = trainer(max_epochs=1, limit_val_batches=0, callbacks=[finder])
    fit.fit(Model(), loader())
    return look().ranks[rank].steps, look().state, finder.second_s - finder.found_s


@pytest.mark.full
@pytest.mark.ranks
def test_the_inner_fit_of_the_rate_finder_is_no_part_of_the_steps():
    for steps, state, first_s in run_ranks(tuned_worker, 2):
        assert [step.index for step in steps] == [0, 1, 2, 3]
        assert 0 < steps[0].seconds < first_s
        assert state == "finished"


class Breaker(Callback):
    """Breaks telemetry in the middle of a fit."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            trainer.strategy.recorder._file.close()
            trainer.strategy.recorder._file.status = None


def broken_worker(rank, world_size):
    import warnings

    model = Model()
    fit = trainer(max_epochs=1, limit_val_batches=0, callbacks=[Breaker()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(model, loader())
    said = [str(each.message) for each in caught if "telemetry" in str(each.message)]
    return fit.global_step, said


@pytest.mark.ranks
def test_training_ends_as_ever_when_telemetry_breaks_and_one_warning_is_given():
    for global_step, said in run_ranks(broken_worker, 2):
        assert global_step == 4
        assert len(said) == 1


def kinds_of(fit):
    return [type(each) for each in callbacks_of(fit)]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_a_trainer_of_somebody_else_gets_nothing():
    fit = lightning.Trainer(**QUIET, max_epochs=1, devices=1)
    fit.fit(Model(), loader(), loader(8))
    assert TelemetryCallback not in kinds_of(fit)


def test_a_strategy_adds_the_callback_once_in_front_of_those_that_save(monkeypatch):
    fit = lightning.Trainer(accelerator="cpu", logger=False, devices=1)
    follow_loops(fit)
    follow_loops(fit)
    kinds = kinds_of(fit)
    assert kinds.count(TelemetryCallback) == 1
    assert kinds[-2:] == [TelemetryCallback, ModelCheckpoint]

    monkeypatch.setenv("BOLTMESH_TELEMETRY", "0")
    fit = lightning.Trainer(accelerator="cpu", logger=False, devices=1)
    follow_loops(fit)
    assert TelemetryCallback not in kinds_of(fit)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_the_callback_is_idle_for_another_strategy():
    fit = lightning.Trainer(**QUIET, max_epochs=1, callbacks=[TelemetryCallback()], devices=1)
    fit.fit(Model(), loader(), loader(8))
    assert fit.global_step == 8
    assert list_jobs() == []


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (torch.zeros(5, 7, dtype=torch.long), 5, 35),
        ([torch.zeros(5, 7), torch.zeros(5, dtype=torch.long)], 5, None),
        ({"ids": torch.zeros(3, 9, dtype=torch.int32), "mask": torch.ones(3, 9)}, 3, 27),
        ({"mask": torch.ones(3, 9, dtype=torch.bool), "ids": torch.zeros(3, 9).long()}, 3, 27),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), 2, None),
        (torch.tensor(1.0), 1, None),
        ("text", None, None),
        (None, None, None),
        (iter([torch.zeros(3)]), None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samples_and_tokens_of_a_batch_are_counted(batch, samples, tokens):
    assert count(batch) == (samples, tokens)


class Norms(Callback):
    """Asks for the norm before each step."""

    def __init__(self):
        self.asked = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.asked[trainer.global_step + 1] = trainer.strategy.gradient_norm(optimizer)


def norm_worker(rank, world_size, name, clip):
    lightning.seed_everything(1, verbose=False)
    norms = Norms()
    strategy = pipeline(telemetry=True) if name == "bolt_pipeline" else name
    options = {"max_steps": 6, "log_every_n_steps": 2, "gradient_clip_val": clip}
    fit = quiet_trainer(world_size, strategy, callbacks=[norms], **options)
    fit.fit(Stack(depth=4), token_data(64, 8))
    history = look().history
    return norms.asked, {
        point.global_step: point.value for point in history if point.name == "boltmesh/grad_norm"
    }


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["bolt_ddp", "bolt_zero2", "bolt_zero3_cpu", "bolt_pipeline"])
def test_the_norm_by_which_gradients_are_clipped_is_a_metric(name):
    for asked, recorded in run_ranks(partial(norm_worker, name=name, clip=0.3), 2):
        assert len(asked) == 6
        assert recorded == pytest.approx({step: asked[step] for step in (2, 4, 6)}, rel=1e-5)
        assert max(recorded.values()) > 0.3


@pytest.mark.full
@pytest.mark.ranks
def test_without_clipping_there_is_no_norm():
    for _, recorded in run_ranks(partial(norm_worker, name="bolt_ddp", clip=None), 2):
        assert recorded == {}

"""Lightning's ways to save and load, with checkpoints that are directories."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor

from boltmesh.errors import ConfigError
from boltmesh.strategies import DDPStrategy, ZeROStrategy
from boltmesh.strategies.checkpoint.directory import load_directory
from boltmesh.strategies.checkpoint.manifest import find_fault
from boltmesh.strategies.checkpoint.shard_reader import Placeholder
from boltmesh.strategies.dry_run.unsupported import refuse_lone_saves
from tests.parity.resuming import Run, differences, read_whole
from tests.strategies.test_resume import loader
from tests.support.models import FEATURES, Regression, TwoOptimizers, regression_data
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


def trainer(
    world_size: int, *callbacks: Callback, stage: int | None = 3, **arguments: Any
) -> Trainer:
    if stage is None:
        strategy: Any = DDPStrategy(telemetry=False)
    else:
        strategy = ZeROStrategy(stage=stage, telemetry=False)
    given: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": strategy,
        **arguments,
    }
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **given,
    )


def mean(predictions: Any) -> float:
    return torch.cat(predictions).mean().item()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def keep_some(rank: int, world_size: int, folder: Path) -> Any:
    seed_everything(3, verbose=False)
    best = ModelCheckpoint(
        folder / "best", "{step}", monitor="val_loss", save_top_k=1, save_last=True
    )
    newest = ModelCheckpoint(
        folder / "newest", "{step}", every_n_train_steps=2, save_top_k=1, save_last="link"
    )
    weights = ModelCheckpoint(folder / "weights", "{epoch}", save_weights_only=True)
    run = trainer(world_size, best, newest, weights, max_epochs=3)
    run.fit(Regression(), regression_data(32, 4), regression_data(8, 4))
    kept = Path(best.best_model_path).name
    results = run.validate(ckpt_path="best", dataloaders=regression_data(8, 4), verbose=False)
    run.save_checkpoint(folder / "at-the-end.ckpt")
    run.save_checkpoint(folder / "only-weights.ckpt", weights_only=True)
    return kept, best.best_model_score.item(), results[0]["val_loss"]


@pytest.mark.full
def test_model_checkpoint_keeps_and_removes_directories(tmp_path: Path) -> None:
    for kept, score, validated in run_ranks(keep_some, 2, tmp_path):
        assert names(tmp_path / "best") == {kept, "last.ckpt"}
        assert validated == pytest.approx(score, rel=1e-6)
    assert names(tmp_path / "newest") == {"step=12.ckpt", "last.ckpt"}
    assert (tmp_path / "newest" / "last.ckpt").is_symlink()
    for path in (*tmp_path.glob("*/*.ckpt"), *tmp_path.glob("*.ckpt")):
        assert find_fault(path) is None, path
    for path in (tmp_path / "weights/epoch=2.ckpt", tmp_path / "only-weights.ckpt"):
        checkpoint = load_directory(path)
        assert set(checkpoint["state_dict"]) == set(Regression().state_dict())
        assert "optimizer_states" not in checkpoint


def evaluate(rank: int, world_size: int, path: Path, stage: int | None) -> Any:
    seed_everything(99, verbose=False)
    module = Regression()
    data = regression_data(16, 4)
    run = trainer(world_size, stage=stage)
    return [
        run.validate(module, data, ckpt_path=path, verbose=False)[0]["val_loss"],
        run.test(module, data, ckpt_path=path, verbose=False)[0]["val_loss"],
        mean(run.predict(module, data, ckpt_path=path)),
    ]


def fit_and_evaluate(rank: int, world_size: int, folder: Path) -> Any:
    seed_everything(3, verbose=False)
    data = regression_data(16, 4)
    run = trainer(world_size, stage=None, max_epochs=2)
    run.fit(Regression(), regression_data(32, 4))
    run.save_checkpoint(folder / "file.ckpt")
    module = Regression()
    run = trainer(world_size, max_epochs=2)
    run.fit(module, regression_data(32, 4), ckpt_path=folder / "file.ckpt")
    run.save_checkpoint(folder / "shards.ckpt")
    return [
        run.validate(module, data, verbose=False)[0]["val_loss"],
        run.test(module, data, verbose=False)[0]["val_loss"],
        mean(run.predict(module, data)),
    ]


@pytest.mark.full
def test_evaluation_takes_weights_from_directories_and_files(tmp_path: Path) -> None:
    expected = run_ranks(fit_and_evaluate, 1, tmp_path)[0]
    for name, stage in (("shards", 3), ("shards", 1), ("shards", None), ("file", 2)):
        ranks = run_ranks(evaluate, 2, tmp_path / f"{name}.ckpt", stage)
        for found in ranks:
            assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
        predicted = sum(found[2] for found in ranks) / len(ranks)
        assert predicted == pytest.approx(expected[2], rel=1e-5)


def fit(
    world_size: int, stage: int, kind: str, accumulate: int, saver: Callback | None, **given: Any
) -> dict[str, Tensor]:
    seed_everything(11, verbose=False)
    module = Regression(dropout=0.3)
    if given:
        seed_everything(77, verbose=False)  # nothing of the new process may matter
    callbacks = [] if saver is None else [saver]
    run = trainer(
        world_size, *callbacks, stage=stage, max_epochs=2, accumulate_grad_batches=accumulate
    )
    run.fit(module, loader(kind), loader("plain"), **given)
    found = {name: whole(each) for name, each in module.named_parameters()}
    for name, each in module.named_parameters():
        for key, value in run.optimizers[0].state[each].items():
            found[f"{name}.{key}"] = whole(value)
    return found


def stop_and_resume(
    rank: int, world_size: int, folder: Path, stage: int, kind: str, accumulate: int
) -> Any:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    straight = fit(world_size, stage, kind, accumulate, saver)
    saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    apart = {}
    for path in (saved[0], saved[-2]):
        again = fit(world_size, stage, kind, accumulate, None, ckpt_path=path)
        different = [name for name in straight if not torch.equal(straight[name], again[name])]
        if different:
            apart[path.name] = different
    return len(saved), apart


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kind", "accumulate"), [(1, "plain", 2), (2, "stream", 1), (3, "plain", 1)]
)
def test_a_checkpoint_in_mid_epoch_continues_to_the_bit(
    tmp_path: Path, stage: int, kind: str, accumulate: int
) -> None:
    results = run_ranks(stop_and_resume, 2, tmp_path, stage, kind, accumulate)
    for saved, apart in results:
        assert saved >= 3
        assert apart == {}


def resume_in_one(rank: int, world_size: int, path: Path) -> None:
    fit(world_size, 3, "plain", 1, None, ckpt_path=path)


def save_early(rank: int, world_size: int, folder: Path) -> None:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(world_size, 3, "plain", 1, saver)


@pytest.mark.full
def test_another_number_of_ranks_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    run_ranks(save_early, 2, tmp_path)
    with pytest.raises(RankFailure, match="in the middle of an epoch by 2 data ranks"):
        run_ranks(resume_in_one, 1, tmp_path / "step=2.ckpt")


class SavesAtTheEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def alternate(rank: int, world_size: int, folder: Path, offload: Any) -> list[str]:
    middle = ModelCheckpoint(folder, "middle", every_n_train_steps=4, save_top_k=1)
    ended = []
    for resume in (None, folder / "middle.ckpt"):
        seed_everything(4 if resume is None else 77, verbose=False)
        module = TwoOptimizers()
        path = folder / ("whole.ckpt" if resume is None else "resumed.ckpt")
        run = trainer(
            world_size,
            SavesAtTheEnd(path),
            *([middle] if resume is None else []),
            max_steps=6,
            strategy=ZeROStrategy(offload_optimizer=offload, telemetry=False),
        )
        run.fit(module, regression_data(64, 4), ckpt_path=resume)
        assert run.global_step == 6
        ended.append(load_directory(path))
    apart = []
    for saved in ("state_dict", "optimizer_states"):
        one, other = (dict(flatten(each[saved])) for each in ended)
        assert one.keys() == other.keys()
        apart += [name for name in one if not torch.equal(one[name], other[name])]
    return apart


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.load() if isinstance(value, Placeholder) else value
    elif isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten(each, f"{name}.{key}")


@pytest.mark.sample("cpu")
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_several_optimizers_go_on_to_the_bit(tmp_path: Path, offload: str | None) -> None:
    assert run_ranks(alternate, 2, tmp_path, offload) == [[], []]


class Particular(Regression):
    """Does in its hooks what users do there."""

    seen: Tensor

    def __init__(self, settings: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("seen", torch.zeros(2))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def get_extra_state(self) -> Any:
        return {"extra": 7}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {
            f"old.{name}" if name.startswith("net.") else name: value
            for name, value in checkpoint["state_dict"].items()
            if not name.startswith("side.")
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k.removeprefix("old."): v for k, v in state.items()}
        own = self.state_dict()
        assert all(own[name].shape == v.shape for name, v in checkpoint["state_dict"].items()
                   if isinstance(v, Tensor))  # fmt: skip
        checkpoint["state_dict"]["side.weight"] = torch.full((1, 6), 3.0)
        checkpoint["state_dict"]["side.bias"] = torch.full((1,), 4.0)


def use_hooks(rank: int, world_size: int, folder: Path) -> Any:
    settings = OmegaConf.create({"depth": {"size": 3}, "names": ["a", "b"]})
    module = Particular(settings)
    run = trainer(world_size, max_steps=3)
    run.fit(module, regression_data(32, 4))
    run.save_checkpoint(folder / "a.ckpt")
    again = Particular()
    run = trainer(world_size, max_steps=4)
    run.fit(again, regression_data(32, 4), ckpt_path=folder / "a.ckpt")
    once_more = Particular()
    trainer(world_size).validate(
        once_more, regression_data(8, 4), ckpt_path=folder / "a.ckpt", verbose=False
    )
    same = all(
        torch.equal(whole(one), whole(other))
        for one, other in zip(once_more.net.parameters(), module.net.parameters(), strict=True)
    )
    side = whole(once_more.side.weight)[0, 0].item(), whole(once_more.side.bias).item()
    return same, *side, again.seen.tolist(), again.extra, run.global_step


@pytest.mark.full
def test_hooks_rename_drop_and_add_what_is_stored(tmp_path: Path) -> None:
    for found in run_ranks(use_hooks, 2, tmp_path):
        assert found == (True, 3.0, 4.0, [4.0, 4.0], 7, 4)
    checkpoint = load_directory(tmp_path / "a.ckpt")
    assert checkpoint["hyper_parameters"]["settings"] == {"depth": {"size": 3}, "names": ["a", "b"]}
    assert "old.net.0.weight" in checkpoint["state_dict"]
    assert "side.weight" not in checkpoint["state_dict"]


def save_before_and_after(rank: int, world_size: int, folder: Path) -> None:
    strategy = ZeROStrategy(offload_optimizer="cpu", offload_fraction=0.5, telemetry=False)
    saver = SavesAtTheEnd(folder / "before.ckpt")
    run = trainer(world_size, saver, max_steps=3, strategy=strategy)
    run.fit(Regression(), regression_data(32, 4))
    run.save_checkpoint(folder / "after.ckpt")


@pytest.mark.full
def test_what_was_offloaded_can_be_saved_when_the_run_is_over(tmp_path: Path) -> None:
    run_ranks(save_before_and_after, 2, tmp_path)
    before, after = (read_whole(tmp_path / f"{each}.ckpt", Run()) for each in ("before", "after"))
    assert len(before) == 8 + 3 * 8
    assert differences(before, after) == []


class FailsOnOne(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise ValueError("planted")
        return super().training_step(batch, batch_idx)


class SavesOnError(Callback):
    """What Lightning's own callbacks do, one of a user's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def fail(rank: int, world_size: int, folder: Path, stage: int | None) -> None:
    run = trainer(world_size, SavesOnError(folder / f"{rank}.ckpt"), stage=stage, max_steps=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit(FailsOnOne(), regression_data(64, 4))
        finally:
            text = "\n".join(str(each.message) for each in caught)
            (folder / f"warnings-{rank}").write_text(text)


@pytest.mark.full
@pytest.mark.parametrize("stage", [None, 3])
def test_a_save_while_a_rank_fails_waits_for_nobody(tmp_path: Path, stage: int | None) -> None:
    with pytest.raises(RankFailure, match="ValueError: planted"):
        run_ranks(fail, 2, tmp_path, stage)
    said = (tmp_path / "warnings-1").read_text()
    if stage is not None:
        assert "1.ckpt was not written: the run is ending by an error" in said
        assert list(tmp_path.glob("*.ckpt*")) == []


def save_mismatch(rank: int, world_size: int, folder: Path) -> None:
    run = trainer(world_size, max_steps=1)
    run.fit(Regression(), regression_data(32, 4))
    run.save_checkpoint(folder / "a.ckpt")


def load_mismatch(rank: int, world_size: int, folder: Path) -> None:
    run = trainer(world_size, max_steps=2)
    run.fit(Regression(width=9), regression_data(32, 4), ckpt_path=folder / "a.ckpt")


def load_other_groups(rank: int, world_size: int, folder: Path) -> None:
    run = trainer(world_size, max_steps=2)
    module = Regression(has_frozen_layer=True)
    run.fit(module, regression_data(32, 4), ckpt_path=folder / "a.ckpt")


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(save_mismatch, 2, tmp_path)
    with pytest.raises(RankFailure, match=r"size mismatch for net\.0\.weight.*\[11, 6\].*\[9, 6\]"):
        run_ranks(load_mismatch, 2, tmp_path)
    with pytest.raises(RankFailure, match=r"group 0 of AdamW has 6 parameters.* has 8"):
        run_ranks(load_other_groups, 2, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "callback", [OnExceptionCheckpoint("folder"), ModelCheckpoint(save_on_exception=True)]
)
def test_callbacks_that_save_when_a_rank_fails_are_refused(callback: Callback) -> None:
    with pytest.raises(ConfigError, match="every_n_train_steps"):
        refuse_lone_saves([callback])


class DrawingLogger(CSVLogger):
    """Does what TensorBoard's with ``log_graph=True`` does."""

    _log_graph = True

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        model(torch.zeros(2, FEATURES))


def draw_graph(rank: int, world_size: int, folder: Path) -> None:
    trainer(world_size, logger=DrawingLogger(folder)).fit(Regression(), regression_data(8, 4))


@pytest.mark.full
def test_a_logger_that_runs_the_model_on_one_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="runs the model on the first rank alone"):
        run_ranks(draw_graph, 2, tmp_path, timeout_s=120)


@pytest.mark.full
def test_a_checkpoint_plugin_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ConfigError, match="would never call AsyncCheckpointIO"):
        Trainer(accelerator="cpu", strategy=ZeROStrategy(), plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigError, match="would never call AsyncCheckpointIO"):
        ZeROStrategy(checkpoint_io=AsyncCheckpointIO())

"""Checkpoints at addresses of fsspec: in memory, at file://, in an object store of all ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from boltmesh.conversion.export_checkpoint import export
from boltmesh.conversion.import_checkpoint import import_checkpoint
from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies import (
    DDPStrategy,
    PipelineParallelStrategy,
    StartingWeights,
    ZeROStrategy,
)
from boltmesh.strategies.checkpoint import directory
from boltmesh.strategies.checkpoint.directory import load_directory
from boltmesh.strategies.checkpoint.manifest import find_fault
from tests.support.blocks import Blocks
from tests.support.models import regression_data
from tests.support.object_store import ObjectStore, install, keys
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4

STRATEGIES: dict[str, Callable[..., Any]] = {
    "zero": lambda **options: ZeROStrategy(stage=2, telemetry=False, **options),
    "pipeline": lambda **options: PipelineParallelStrategy(
        microbatches=2, telemetry=False, **options
    ),
}


class Scored(Blocks):
    """Logs the step, so that the newest checkpoint is the best."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("progress", float(self.global_step))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def build(strategy: Any, *callbacks: Callback, world_size: int = 1, steps: int = STEPS) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=steps, logger=False,
        callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        use_distributed_sampler=False,
    )  # fmt: skip


def fit(trainer: Trainer, seed: int = 3, **given: Any) -> dict[str, Tensor]:
    """Train; return what this rank has of the weights."""
    seed_everything(seed, verbose=False)
    module = Scored()
    trainer.fit(module, regression_data(8 * STEPS, 8), **given)
    return weights(module)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Those that this rank has, whole; of a pipeline's other layers it has NaN."""
    values = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in module.named_parameters()
    }
    return {name: each for name, each in values.items() if not each.isnan().any()}


class AtTheStart(Callback):
    """Remembers the weights that training began with."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.weights = weights(pl_module)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, each in one.items():
        assert torch.equal(each, other[name]), name


def best_two(folder: str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, "{step}", "progress", mode="max", save_top_k=2, every_n_train_steps=1, **options
    )


def in_memory(rank: int, world_size: int, folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    zero, replicas = STRATEGIES["zero"], DDPStrategy(telemetry=False)
    expected = fit(build(zero()))
    for is_async in (False, True):
        place = f"memory://top-{is_async}"
        trainer = build(zero(async_save=is_async), best_two(place, save_last=True))
        assert_same(fit(trainer), expected)
        names = {path.rpartition("/")[2] for path in memory.ls(f"top-{is_async}", detail=False)}
        assert names == {"step=3.ckpt", "step=4.ckpt", "last.ckpt"}
        assert [find_fault(f"{place}/{name}") for name in names] == [None] * 3
        assert load_directory(f"{place}/last.ckpt")["global_step"] == STEPS
        assert_same(fit(build(zero()), 5, ckpt_path=f"{place}/step=3.ckpt"), expected)
        # One file of replicas goes to the same place and comes from there.
        saver = best_two(f"{place}-file")
        fit(build(DDPStrategy(telemetry=False, async_save=is_async), saver))
        assert memory.isfile(f"top-{is_async}-file/step=3.ckpt")
        fit(build(zero()), 5, ckpt_path=f"{place}-file/step=3.ckpt")

    trainer = build(zero())
    fit(trainer)
    trainer.save_checkpoint("memory://given/a.ckpt")
    assert find_fault("memory://given/a.ckpt") is None
    assert_same(fit(build(replicas), 5, ckpt_path="memory://given/a.ckpt"), expected)
    trainer.save_checkpoint("memory://given/a.ckpt")  # in its own place
    starting = StartingWeights("memory://given/a.ckpt")
    seen = AtTheStart()
    fit(build(zero(), starting, seen, steps=1), 5)
    assert_same(seen.weights, expected)
    with pytest.raises(ConfigError, match="memory://none does not exist"):
        StartingWeights("memory://none")
    with pytest.raises(ValueError, match="only supported for local file paths"):
        fit(build(zero(), best_two("memory://link", save_last="link")))
    with pytest.raises(CheckpointError, match="storage_options="):
        trainer.save_checkpoint("memory://given/b.ckpt", storage_options={"key": 1})

    options: Any = {"force": False, "prefix": None, "max_shard_bytes": None}
    plain = folder / "plain.ckpt"
    export("memory://given/a.ckpt", plain, counted=lambda _: lambda _: None, **options)
    assert_same(torch.load(plain, weights_only=True)["state_dict"], expected)
    import_checkpoint(plain, "memory://given/b.ckpt", prefix="", ties={}, force=False)
    assert_same(fit(build(zero()), 5, ckpt_path="memory://given/b.ckpt"), expected)
    with pytest.raises(ConfigError, match=r"memory://given/b\.ckpt exists"):
        import_checkpoint(plain, "memory://given/b.ckpt", prefix="", ties={}, force=False)
    with pytest.raises(ConfigError, match="copy the result"):
        export(plain, "memory://given/c.ckpt", counted=lambda _: lambda _: None, **options)


@pytest.mark.full
def test_directories_in_memory_do_all_that_those_on_a_disk_do(tmp_path: Path) -> None:
    run_ranks(in_memory, 1, tmp_path)


def at_file_addresses(rank: int, world_size: int, folder: Path) -> None:
    os.chdir(folder)
    expected = fit(build(STRATEGIES["zero"](), world_size=world_size))
    saver = best_two(f"file://{folder}/kept", save_last="link")
    trainer = build(STRATEGIES["zero"](), saver, world_size=world_size)
    fit(trainer)
    trainer.save_checkpoint(f"file://{folder}/given.ckpt")
    again = build(STRATEGIES["zero"](), world_size=world_size)
    assert_same(fit(again, 5, ckpt_path=f"file://{folder}/kept/step=3.ckpt"), expected)


def test_a_file_address_is_the_path_that_it_names(tmp_path: Path) -> None:
    run_ranks(at_file_addresses, 2, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"kept", "given.ckpt"}
    kept = {each.name for each in (tmp_path / "kept").iterdir()}
    assert kept == {"step=3.ckpt", "step=4.ckpt", "last.ckpt"}
    assert (tmp_path / "kept/last.ckpt").is_symlink()
    assert find_fault(tmp_path / "given.ckpt") is None


def break_third_save(action: str, key: str) -> None:
    if action == "put" and key.endswith("step=3.ckpt/__1_0.distcp"):
        raise ConnectionError("the store is gone")


def lose_a_save(rank: int, world_size: int, folder: Path, name: str, is_async: bool) -> None:
    store = folder / "store"
    install(store)
    expected = fit(build(STRATEGIES[name](), world_size=world_size))
    saver = best_two("objects://bucket/run", save_last=True)
    ObjectStore.before = staticmethod(break_third_save) if rank == 1 else None
    with pytest.raises(CheckpointError) as caught:
        fit(build(STRATEGIES[name](async_save=is_async), saver, world_size=world_size))
    said = "objects://bucket/run/step=3.ckpt could not be written: the store is gone (rank 1)"
    assert said in str(caught.value)
    ObjectStore.before = None
    assert find_fault("objects://bucket/run/step=3.ckpt") == "it has no manifest.json"
    assert find_fault("objects://bucket/run/last.ckpt") is None
    torch.distributed.barrier()
    saver = best_two("objects://bucket/run", save_last=True)
    trainer = build(STRATEGIES[name](), saver, world_size=world_size)
    found = fit(trainer, 5, ckpt_path="objects://bucket/run/last.ckpt")
    assert_same(found, expected)
    for each in ("step=3", "step=4", "last"):
        assert find_fault(f"objects://bucket/run/{each}.ckpt") is None
    torch.distributed.barrier()
    folders = {key.split("/")[2] for key in keys(store)}
    assert folders == {"step=3.ckpt", "step=4.ckpt", "last.ckpt"}


@pytest.mark.sample("zero-True")
@pytest.mark.parametrize(("name", "is_async"), [("zero", True), ("pipeline", False)])
def test_ranks_resume_from_an_object_store_that_has_lost_a_save(
    tmp_path: Path, name: str, is_async: bool
) -> None:
    run_ranks(lose_a_save, 2, tmp_path, name, is_async)


def save_apart(rank: int, world_size: int, folder: Path) -> list[str]:
    said = []
    saver = ModelCheckpoint("memory://apart")
    with pytest.raises(ConfigError) as caught:
        fit(build(STRATEGIES["zero"](), saver, world_size=world_size))
    said.append(str(caught.value))
    # As where each host has a disk of its own.
    with pytest.raises(ConfigError) as caught:
        directory._refuse_unshared(str(folder / f"host {rank}"))
    said.append(str(caught.value))
    trainer = build(STRATEGIES["zero"](), world_size=world_size)
    fit(trainer)
    for action in (
        lambda: trainer.save_checkpoint("memory://apart/a.ckpt"),
        lambda: fit(build(STRATEGIES["zero"](), world_size=world_size), ckpt_path="memory://b"),
    ):
        if rank == 0:
            fsspec.filesystem("memory").pipe_file("/b/manifest.json", b"")
        with pytest.raises(CheckpointError) as told:
            action()
        said.append(str(told.value))
    return said


@pytest.mark.full
def test_folders_that_ranks_do_not_share_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for callback, host, saved, loaded in run_ranks(save_apart, 2, tmp_path):
        assert callback.startswith("ModelCheckpoint saves to memory://apart, where all ranks write")
        assert "rank 1 does not see what rank 0 writes there" in callback
        assert "ModelCheckpoint saves to" in host
        assert "rank 1 does not see" in host
        assert "rank 0 has made a folder there that this rank does not see" in saved
        assert "memory://b is a directory for rank 0, and rank 1 does not see it" in loaded

"""A run that was stopped and resumed is, to the bit, the run that was never stopped."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from boltmesh.errors import CheckpointError
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.random_state import capture_random_state, restore_random_state
from tests.support.models import FEATURES, Regression
from tests.support.ranks import RankFailure, run_ranks


class Augmented(Dataset[Any]):
    """Draws from all three generators for every sample, as image augmentation does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(FEATURES) + random.random() + np.random.rand()
        return index / self.count + 0.1 * noise.float(), torch.tensor([index / self.count])


class Stream(IterableDataset[Any]):
    """The same without a length, so that the fit loop fetches one batch ahead."""

    def __iter__(self) -> Any:
        return (Augmented(37)[index] for index in range(37))


class Mixed(Regression):
    """Takes a batch of each of several loaders."""

    def loss(self, batch: Any, *, uses_side: bool = True) -> Tensor:
        if not isinstance(batch, dict):
            return super().loss(batch, uses_side=uses_side)
        losses = [super(Mixed, self).loss(each) for each in batch.values()]
        return torch.stack(losses).mean()


class Own:
    """A loader that keeps its place itself."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Any:
        while self.place < len(self):
            self.place += 1
            rows = [Augmented(43)[(self.place * 4 + at) % 43] for at in range(4)]
            yield torch.utils.data.default_collate(rows)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def loader(kind: str) -> Any:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    if kind in {"several", "several streams"}:
        # The shorter one ends at a step that is saved, and begins again.
        short = DataLoader(Augmented(16), batch_size=4, shuffle=True)
        return {"long": loader("stream" if "streams" in kind else "plain"), "short": short}
    if kind == "generator":
        own = torch.Generator().manual_seed(3)
        return DataLoader(Augmented(43), batch_size=4, shuffle=True, generator=own)
    if kind == "own":
        return Own()
    workers = 1 if kind == "workers" else 0
    return DataLoader(Augmented(43), batch_size=4, shuffle=True, num_workers=workers)


def fit(
    world_size: int,
    kind: str,
    folder: Path | None,
    resume: Path | None = None,
    *,
    epochs: int = 3,
    kind_of_module: type[Mixed] = Mixed,
    **arguments: Any,
) -> dict[str, Tensor]:
    seed_everything(11)
    module = kind_of_module(dropout=0.3)
    callbacks = []
    if folder is not None:
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks.append(saver)
    if resume is not None:
        seed_everything(77)  # nothing of the new process may matter
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": DDPStrategy(telemetry=False),
        "max_epochs": epochs,
        "callbacks": callbacks,
        "enable_checkpointing": bool(callbacks),
    }
    trainer = Trainer(accelerator="cpu", devices=world_size, **{**quiet, **arguments})
    trainer.fit(module, loader(kind), loader("plain"), ckpt_path=resume)
    state = trainer.optimizers[0].state_dict()["state"]
    momenta = {f"{n}.{k}": v for n, each in state.items() for k, v in each.items()}
    return {**module.state_dict(), **momenta}


def stop_and_resume(rank: int, world_size: int, folder: Path, kind: str, accumulate: int) -> Any:
    whole = fit(world_size, kind, folder, accumulate_grad_batches=accumulate)
    saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    apart = {}
    # Starting workers takes long: one in mid-epoch, one at its end.
    chosen = saved if kind != "workers" else [saved[0], saved[2]]
    for path in chosen:
        again = fit(world_size, kind, None, path, accumulate_grad_batches=accumulate)
        different = [name for name in whole if not torch.equal(whole[name], again[name])]
        if different:
            apart[path.name] = different
    return len(saved), apart


@pytest.mark.sample("1-stream-1")
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kind", "accumulate"),
    [(1, "plain", 1), (2, "plain", 2), (2, "workers", 2), (1, "stream", 1), (2, "stream", 2)],
)
def test_every_checkpoint_continues_to_the_bit(
    tmp_path: Path, world_size: int, kind: str, accumulate: int
) -> None:
    results = run_ranks(stop_and_resume, world_size, tmp_path, kind, accumulate)
    for saved, apart in results:
        assert saved >= 4
        assert apart == {}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [("several", 2), ("several streams", 2), ("several streams", 3), ("generator", 2), ("own", 2)],
)
def test_loaders_of_every_kind_continue_to_the_bit(
    tmp_path: Path, kind: str, accumulate: int
) -> None:
    ((saved, apart),) = run_ranks(stop_and_resume, 1, tmp_path, kind, accumulate)
    assert saved >= 4
    assert apart == {}


class Plateau(Mixed):
    """Halves its learning rate after each epoch but the first."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.99
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


def stop_behind_a_validation(rank: int, world_size: int, folder: Path) -> Any:
    """Validation is after batches 4 and 8 of 11; saved are batches 2, 4, ..., but for the last."""
    arguments: dict[str, Any] = {"val_check_interval": 4, "kind_of_module": Plateau, "epochs": 3}
    whole = fit(world_size, "plain", folder, **arguments)
    rates = {}
    for path in folder.glob("*.ckpt"):
        if int(path.stem.split("=")[1]) % 11 == 0:
            continue  # Lightning goes on behind the end of that epoch
        again = fit(world_size, "plain", None, path, **arguments)
        rates[path.name] = [name for name in whole if not torch.equal(whole[name], again[name])]
    return rates


@pytest.mark.ranks
def test_a_plateau_is_seen_at_the_end_of_the_epoch_that_was_resumed(tmp_path: Path) -> None:
    (apart,) = run_ranks(stop_behind_a_validation, 1, tmp_path)
    assert len(apart) > 6
    assert not any(apart.values()), apart


def save_in_two(rank: int, world_size: int, folder: Path) -> None:
    fit(world_size, "plain", folder, epochs=1)


def resume_in_one(rank: int, world_size: int, path: Path) -> None:
    fit(world_size, "plain", None, path, epochs=2)


@pytest.mark.full
@pytest.mark.ranks
def test_another_number_of_ranks_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    run_ranks(save_in_two, 2, tmp_path)
    with pytest.raises(RankFailure, match="in the middle of an epoch by 2 data ranks") as refused:
        run_ranks(resume_in_one, 1, tmp_path / "step=2.ckpt")
    assert CheckpointError.__name__ in str(refused.value)


def exchange_with_plain_lightning(rank: int, world_size: int, folder: Path) -> Any:
    ours = folder / "ours"
    fit(world_size, "plain", ours)
    plain = SingleDeviceStrategy(torch.device("cpu"))
    fit(1, "plain", folder / "theirs", ours / "step=4.ckpt", strategy=plain, epochs=2)
    loaded = Regression.load_from_checkpoint(ours / "step=4.ckpt", weights_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(1, "plain", None, next((folder / "theirs").glob("*.ckpt")), epochs=3)
    return type(loaded).__name__, [str(each.message) for each in caught]


@pytest.mark.ranks
def test_checkpoints_pass_between_plain_lightning_and_us(tmp_path: Path) -> None:
    ((name, messages),) = run_ranks(exchange_with_plain_lightning, 1, tmp_path)
    assert name == "Regression"
    assert any("does not hold this loader's random state" in message for message in messages)


class Counts(LightningModule):
    """Remembers which samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch[1].flatten().tolist()
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_twice(rank: int, world_size: int) -> list[list[float]]:
    seed_everything(2)
    data = loader("plain")
    seen = []
    for _ in range(2):
        module = Counts()
        strategy = DDPStrategy(telemetry=False)
        trainer = Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data)
        seen.append(module.seen)
    return seen


@pytest.mark.full
@pytest.mark.ranks
def test_a_loader_used_in_two_fits_gives_all_of_its_data_each_time() -> None:
    for world_size in (1, 2):
        ranks = run_ranks(fit_twice, world_size)
        for which in range(2):
            seen = sorted(value for rank in ranks for value in rank[which])
            expected = sorted(torch.tensor([i / 43 for i in range(43)] * 2).tolist())
            assert set(seen) == set(expected)
            assert len(seen) == 2 * (43 + (world_size - 43 % world_size) % world_size)


def test_random_states_are_put_back() -> None:
    state = capture_random_state()
    drawn = torch.rand(3).tolist(), random.random(), np.random.rand(), np.random.randn()
    restore_random_state(state)
    again = torch.rand(3).tolist(), random.random(), np.random.rand(), np.random.randn()
    assert again == drawn

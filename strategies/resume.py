"""Continuing to the bit: what a checkpoint of ours holds beside what Lightning puts in.

Lightning stores neither random states nor the place in the data. The entry ``boltmesh`` holds the
random state of each rank and where each stands in each training loader. Everything else in the
file is Lightning's own, so plain Lightning reads it and ignores the entry.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from boltmesh.errors import CheckpointError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.loader_position import (
    LoaderState,
    ResumePoint,
    announce,
    is_resumable,
    loader_state,
    make_resumable,
    resume_loader,
)

if TYPE_CHECKING:
    from boltmesh.strategies.engine import MeshStrategy

KEY = "boltmesh"
FORMAT = 1


class ResumeManager:
    """Stores the entry, reads it, and puts a resumed run where it was. One per strategy."""

    def __init__(self, strategy: "MeshStrategy") -> None:
        self._strategy = strategy
        self.point = ResumePoint(strategy.root_device)
        self._loaded = False
        self._entry: dict[str, Any] | None = None

    def adopt(self, dataloader: object, trainer: Trainer) -> object:
        """Make a loader of a fit resumable where that can be done."""
        make_resumable(dataloader, self.point, is_for_training=bool(trainer.training))
        return dataloader

    def store(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Add the entry. Collective over all ranks, unless the run is ending by an error.

        A rank that failed saves alone while the others are elsewhere; it then stores its own
        state, and the other ranks' streams begin anew.
        """
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        loaders = compat.training_loaders(trainer)
        is_over = not loaders or compat.is_epoch_over(trainer)
        prefetched = compat.prefetched_batches(trainer)
        mine = {
            "random": self.point.current(),
            "loaders": [
                loader_state(each, prefetched=prefetched, is_epoch_over=is_over).to_dict()
                for each in loaders
                if is_resumable(each)
            ],
        }
        world_size, rank = self._strategy.world_size, self._strategy.global_rank
        ranks: list[Any] = [None] * world_size
        if world_size == 1 or trainer.state.status == TrainerStatus.INTERRUPTED:
            ranks[rank] = mine
        else:
            dist.all_gather_object(ranks, mine)
        checkpoint[KEY] = {
            "format": FORMAT,
            "mesh": self._strategy.layout.sizes,
            "is_mid_epoch": not is_over,
            "ranks": ranks,
        }
        self._withdraw(checkpoint, loaders)

    @staticmethod
    def _withdraw(checkpoint: dict[str, Any], loaders: list[Any]) -> None:
        """Take the empty states of our loaders out of Lightning's list, which it counts."""
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        if "combined_loader" not in state:
            return
        stateful = [each for each in loaders if hasattr(each, "state_dict")]
        pairs = zip(stateful, state["combined_loader"], strict=True)
        theirs = [each_state for each, each_state in pairs if not is_resumable(each)]
        if theirs:
            state["combined_loader"] = theirs
        else:
            del state["combined_loader"]

    def read(self, checkpoint: dict[str, Any], trainer: Trainer, path: str) -> None:
        """Take the entry of a checkpoint that a fit resumes from.

        Raises:
            CheckpointError: When it was written in the middle of an epoch by another number of
                data ranks, whose shares of the data nobody can match.
        """
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        self._loaded = True
        entry = checkpoint.get(KEY)
        if entry is not None:
            then, now = entry["mesh"], self._strategy.layout.sizes
            if entry["is_mid_epoch"] and then["data"] != now["data"]:
                raise CheckpointError(
                    f"{path} was written in the middle of an epoch by {then['data']} data ranks, "
                    f"and this job has {now['data']}, which would share the rest of the epoch "
                    f"differently. Resume with {then['data']} data ranks, or from a checkpoint "
                    f"written at the end of an epoch."
                )
            if then != now:
                warnings.warn(
                    f"{path} was written by {then['data']} data ranks and this job has "
                    f"{now['data']}: random streams begin anew on every rank.",
                    stacklevel=2,
                )
                entry = None
        self._entry = entry

    def start(self, trainer: Trainer) -> None:
        """Called on every rank when training starts, before its first batch is used."""
        loaders = [each for each in compat.training_loaders(trainer) if is_resumable(each)]
        for loader in loaders:
            announce(loader)
        if not self._loaded:
            return
        self._loaded = False
        mine = self._entry["ranks"][self._strategy.global_rank] if self._entry else None
        self._entry = None
        self.point.begin(mine["random"] if mine else None)
        states = [LoaderState.from_dict(each) for each in mine["loaders"]] if mine else []
        if len(states) != len(loaders):
            # Nobody of ours wrote it, or the loaders are others now: Lightning's own count of
            # batches is what is left, and with a sampler that is seeded by epoch it is enough.
            position = compat.batches_to_skip(trainer)
            states = [LoaderState(position, None) for _ in loaders]
            if position:
                warnings.warn(
                    f"The checkpoint does not hold this loader's random state: the first "
                    f"{position} batches of the epoch are passed over, and random numbers "
                    f"differ from the run that wrote it.",
                    stacklevel=2,
                )
        for loader, state in zip(loaders, states, strict=True):
            resume_loader(loader, state)
        if loaders:
            compat.restart_fetching(trainer)

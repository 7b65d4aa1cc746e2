"""Bitwise resume: the entry that the strategy adds to a checkpoint of Lightning.

Lightning stores neither random states nor positions in the data. The entry ``boltmesh`` holds the
random state of each rank, its positions in its training loaders, and the values that schedulers
monitored last. The rest of the file is Lightning's own, so plain Lightning reads it and ignores
the entry.
"""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.optimizer_state import refuse_own_form
from boltmesh.strategies.engine.resumable_loader import (
    LoaderState,
    ResumePoint,
    is_resumable,
    loader_state,
    make_resumable,
    resume_loader,
)
from boltmesh.strategies.lightning_compat.loops import (
    batches_to_skip,
    begin_restart,
    call_before_fetch,
    end_restart,
    ended_loaders,
    is_epoch_over,
    monitored_values,
    prefetched_batches,
    restart_fetching,
    set_sampler_epochs,
    training_loaders,
)
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.object_collectives import gather_objects

if TYPE_CHECKING:
    from boltmesh.strategies.engine import MeshStrategy

KEY = "boltmesh"
FORMAT = 1


class ResumeManager:
    """Writes and reads the entry, and restores the position of a run. One per strategy."""

    def __init__(self, strategy: "MeshStrategy") -> None:
        self._strategy = strategy
        self.point = ResumePoint(strategy.root_device)
        self._is_loaded = False
        """True from the loading of a checkpoint until training starts."""
        self._states: list[LoaderState] | None = None
        """States of the training loaders in order; None if the checkpoint has no entry."""
        self._num_adopted = 0
        self.monitored: dict[str, float] = {}
        """Last values that schedulers monitored in the resumed run, by key."""

    def adopt(self, dataloader: object, trainer: Trainer) -> object:
        """Make a loader of a fit resumable if possible, and return it."""
        is_for_training = bool(trainer.training)
        can_resume = make_resumable(dataloader, self.point, is_for_training=is_for_training)
        if can_resume and is_for_training and self._is_loaded:
            resume_loader(dataloader, self._next_state(trainer))
        return dataloader

    def _next_state(self, trainer: Trainer) -> LoaderState:
        number = self._num_adopted
        self._num_adopted += 1
        if self._states is not None and number < len(self._states):
            return self._states[number]
        # The checkpoint has no entry, or there are more loaders now. Lightning's count of batches
        # is enough with a sampler that is seeded by epoch.
        position = batches_to_skip(trainer)
        if position:
            warnings.warn(
                f"The checkpoint does not hold this loader's random state: the first {position} "
                f"batches of the epoch are passed over, and random numbers differ from the run "
                f"that wrote it.",
                stacklevel=2,
            )
        return LoaderState(position, None)

    def store(self, checkpoint: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
        """Return the checkpoint with the entry. Collective, unless the run ends by an error.

        A rank that failed saves alone and stores its own state; the other ranks' random streams
        restart from the seed.
        """
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return checkpoint
        loaders = training_loaders(trainer)
        is_over = not loaders or is_epoch_over(trainer)
        prefetched = prefetched_batches(trainer)
        mine = {
            "random": self.point.current(),
            "monitored": monitored_values(trainer),
            "loaders": [
                vars(
                    loader_state(
                        each, prefetched=prefetched, is_epoch_over=is_over, has_ended=has_ended
                    )
                )
                for each, has_ended in zip(loaders, ended_loaders(trainer), strict=True)
                if is_resumable(each)
            ],
        }
        world_size, rank = self._strategy.world_size, self._strategy.global_rank
        ranks: list[Any] = [None] * world_size
        if world_size == 1 or trainer.state.status == TrainerStatus.INTERRUPTED:
            ranks[rank] = mine
        else:
            # As arrays: torch pickles the storage of each tensor as a separate file.
            ranks = gather_objects(apply_to_collection(mine, Tensor, Tensor.numpy))
            ranks = apply_to_collection(ranks, np.ndarray, torch.from_numpy)
        entry = {
            "format": FORMAT,
            "mesh": self._strategy.layout.sizes,
            "is_mid_epoch": not is_over,
            "ranks": ranks,
            "strategy": {
                key: value
                for axis in self._strategy.axes
                for key, value in axis.kept_for_resume().items()
            },
        }
        # A copy: callbacks may keep the dictionary that they got.
        return {**checkpoint, KEY: entry}

    def read(self, checkpoint: dict[str, Any], trainer: Trainer, path: str) -> None:
        """Remove the entry from a checkpoint that a fit resumes from, and load it.

        Raises:
            CheckpointError: It was written in the middle of an epoch by another number of data
                ranks, which divided the data differently.
        """
        entry = checkpoint.pop(KEY, None)
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        self._is_loaded, self._states, self._num_adopted = True, None, 0
        if entry is None:
            self.point.begin(None)
            return
        for axis in self._strategy.axes:
            axis.take_kept(entry.get("strategy", {}))
        then, now = entry["mesh"], self._strategy.layout.sizes
        if entry["is_mid_epoch"] and then["data"] != now["data"]:
            raise CheckpointError(
                f"{path} was written in the middle of an epoch by {then['data']} data ranks, "
                f"and this job has {now['data']}, which would share the rest of the epoch "
                f"differently. Resume with {then['data']} data ranks, or from a checkpoint "
                f"written at the end of an epoch."
            )
        mine = entry["ranks"][self._writer(then)] if then["data"] == now["data"] else None
        if mine is None:
            warnings.warn(
                f"{path} holds no random state of rank {self._strategy.global_rank} in this "
                f"layout ({then['data']} data ranks wrote it, this job has {now['data']}): its "
                f"random numbers restart from the seed.",
                stacklevel=2,
            )
        else:
            self._states = [LoaderState(**each) for each in mine["loaders"]]
        written = next((each for each in entry["ranks"] if each is not None), None)
        if mine is None and written is not None and not entry["is_mid_epoch"]:
            # All ranks shuffle a new epoch in the same order, whatever seed this process has.
            self._states = [
                LoaderState(
                    0, None, sampler_seed=each["sampler_seed"], generators=each.get("generators")
                )
                for each in written["loaders"]
            ]
        self.monitored.update((mine or written or {}).get("monitored", {}))
        self.point.begin(mine["random"] if mine else None)

    def _writer(self, then: dict[str, int]) -> int:
        """Return the rank of the saved run whose entry this rank loads.

        The saved run has as many data ranks. In another layout it is the first rank with the same
        batches: the ranks that share them draw the same numbers.
        """
        written = MeshLayout(**then)
        if written == self._strategy.layout:
            return self._strategy.global_rank
        return written.rank_at(data=self._strategy.coordinates["data"])

    def settle(self, trainer: Trainer) -> None:
        """Called on every rank before a training batch is used."""
        if self.point.is_resuming:
            end_restart(trainer)
        self.point.settle()

    def start(self, trainer: Trainer) -> None:
        """Called on every rank when training starts, before its first batch is used."""
        if self._strategy.stores_shards:
            for optimizer in self._strategy.optimizers:
                refuse_own_form(optimizer)
        if not self._is_loaded:
            return
        begin_restart(trainer)
        loaders = [each for each in training_loaders(trainer) if is_resumable(each)]
        early = [each for each in loaders if not each.place.is_resumed]
        if early and self._states:
            # They were iterated over before the checkpoint was loaded: a module that reads
            # ``estimated_stepping_batches`` causes that.
            for loader in early:
                resume_loader(loader, self._next_state(trainer))
        are_all_ours = len(loaders) == len(training_loaders(trainer))
        if (early and self._states) or (are_all_ours and prefetched_batches(trainer)):
            set_sampler_epochs(trainer)  # batches fetched ahead are shuffled by it
            restart_fetching(trainer)
        if not are_all_ours and not prefetched_batches(trainer):
            call_before_fetch(trainer, self.point.resume_passes)
        self._is_loaded, self._states = False, None
        if are_all_ours:
            # Lightning recognises only loaders with a ``state_dict``.
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended before the epoch"
            )

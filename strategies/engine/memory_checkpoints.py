"""Copies of the newest state of all ranks in host memory, from which a failed run resumes.

A copy has the contents and the files of a checkpoint on a disk. Each host keeps in memory the state
of its own ranks and, in a job of several hosts, that of the host before it. So a run survives the
death of a rank or the loss of a host.

``host_memory`` has the paths of the files, ``host_part`` writes and sends them. A copy takes the
state between two batches, and a thread writes it beside training. The copy before it is deleted
when the new one is complete on all hosts.

Every copy is made between two optimizer steps of one epoch, with no validation in between: a run
resumed at the end of an epoch, or before a validation, would skip the end or the validation.
"""

import contextlib
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint import host_memory
from boltmesh.strategies.checkpoint.archive_check import find_damage as find_damage_in_file
from boltmesh.strategies.checkpoint.async_save import AsyncSave, serialised
from boltmesh.strategies.checkpoint.atomic_replace import remove
from boltmesh.strategies.checkpoint.directory import copy_part, find_damage
from boltmesh.strategies.checkpoint.file import write_file
from boltmesh.strategies.checkpoint.host_part import HostRanks, send_part, write_part
from boltmesh.strategies.lightning_compat.loops import (
    batches_to_break,
    is_epoch_over,
    validation_follows,
)
from boltmesh.strategies.lightning_compat.trainer import add_callback
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.process_groups import temporary_group
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import CHECKPOINTS
from boltmesh.telemetry.writer.memory import StoredBytes

if TYPE_CHECKING:
    from boltmesh.strategies.engine.strategy import MeshStrategy

_ADDRESS = "memory of the hosts, step="
"""Prefix of the address of a copy, which takes the place of a path."""


class MemoryCheckpoints:
    """Makes, finds and loads the copies of one strategy.

    Args:
        strategy: The strategy.
        every: The most optimizer steps that a failure may lose. Copies begin twice as often, so
            that each has half of ``every`` to become complete.

    Raises:
        ConfigError: ``every`` is no integer of 2 or more.
    """

    def __init__(self, strategy: "MeshStrategy", every: int) -> None:
        if type(every) is not int or every < 2:
            raise ConfigError(
                f"checkpoint_in_memory_every={every!r} is no number of optimizer steps, of which "
                f"it takes 2 or more. Use 20, or leave it out for no copies."
            )
        self._strategy = strategy
        self.every = every
        self._copying: AsyncSave | None = None
        self._ranks: HostRanks | None = None
        self._folder: Path | None = None
        self._run = Path()
        self._begun = 0
        """Step of the newest copy, complete or not."""
        self._complete = 0
        """Step of the newest copy that is complete, or of the start of this run."""
        self._last_step = 0
        self._steps_per_batch = 1
        """Optimizer steps per batch; more than one under manual optimization."""

    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks make their own threads and groups.
        return {**vars(self), "_copying": None, "_ranks": None}

    # Start of a run.

    def find(self, run: Path, run_id: str, *, newer_than: int) -> int | None:
        """Return the step of the newest complete copy, and fetch its files. Collective.

        Args:
            run: The run's folder.
            run_id: See ``host_memory.make_run_id``.
            newer_than: Step of the checkpoint that the run resumes from without a copy.

        Returns:
            None if there is no newer copy.
        """
        self._run = run
        ranks = self._attach(run_id)
        assert self._folder is not None
        held = host_memory.steps_in(self._folder) if ranks.is_leader else {}
        needed = {0} if not self._strategy.stores_shards else set(range(ranks.num_hosts))
        steps: set[int] = set().union(*ranks.gather(set(held)))
        for step in sorted(steps, reverse=True):
            if step <= newer_than:
                break
            whole = {part: path for part, path in held.get(step, {}).items() if _is_whole(path)}
            have = [set(each) for each in ranks.gather(set(whole))]
            if needed <= set().union(*have):
                self._fetch(step, needed, have, ranks)
                self._keep_only(step, ranks)
                return step
        self._keep_only(None, ranks)  # parts of one step may be of different starts
        return None

    def _attach(self, run_id: str) -> HostRanks:
        """Set the folder of this layout, and make the group of the copies. Collective."""
        strategy = self._strategy
        if self._ranks is None:
            group = dist.new_group(backend="gloo", timeout=strategy.timeout, group_desc="copies")
            temporary_group(group, strategy)
            strategy.recorder.name_group(group, CHECKPOINTS)
            self._ranks = HostRanks(group, strategy.global_rank, strategy.num_processes)
        sizes = "x".join(map(str, strategy.layout.sizes.values()))
        name = f"{run_id}-{strategy.strategy_name}-{sizes}-{strategy.num_nodes}"
        _all_or_config_error(host_memory.make_user_folder, self._ranks)
        self._folder = host_memory.user_folder() / name
        return self._ranks

    def _fetch(self, step: int, needed: set[int], have: list[set[int]], ranks: HostRanks) -> None:
        """Send each host the part that its ranks load. Collective."""
        for host in range(ranks.num_hosts):
            leader = host * ranks.per_host
            part = host if len(needed) > 1 else 0
            if part in have[leader]:
                continue
            holder = next(rank for rank, parts in enumerate(have) if part in parts)
            path = self._path(part, step)
            is_holder, is_leader = ranks.rank == holder, ranks.rank == leader
            send_part(
                path if is_holder else None, leader, path if is_leader else None, holder, ranks
            )

    def _path(self, part: int, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"part-{part}" / f"step={step}.ckpt"

    @staticmethod
    def address_of(step: int) -> str:
        """Return the address of a copy, for ``place_of``."""
        return f"{_ADDRESS}{step}"

    def place_of(self, address: object) -> Path | None:
        """Return the path of the copy that this rank loads; None for any other checkpoint."""
        text = str(address)
        if self._ranks is None or not text.startswith(_ADDRESS):
            return None
        part = self._ranks.host if self._strategy.stores_shards else 0
        return self._path(part, int(text.removeprefix(_ADDRESS)))

    def start(self, trainer: Trainer) -> None:
        """Prepare for copies in a fit. Collective over all ranks.

        Raises:
            ConfigError: No step allows a copy, no restart would use it, or memory is too small.
        """
        if self._ranks is None:
            raise ConfigError(
                f"checkpoint_in_memory_every={self.every} is for runs of boltmesh fit, which go on "
                f"from such a copy after a failure. Start it with boltmesh fit, or leave it out."
            )
        strategy, ranks = self._strategy, self._ranks
        if strategy.data_axis.keeps_state_on_disk:
            raise ConfigError(
                f"checkpoint_in_memory_every={self.every} copies this rank's share of model and "
                f"optimizer into host memory, and offload to 'nvme' is for what does not fit "
                f"there. Leave one of them out."
            )
        between = float(trainer.num_training_batches)
        if trainer.enable_validation and trainer.val_check_batch is not None:
            between = min(between, trainer.val_check_batch)
        if between <= trainer.accumulate_grad_batches:
            raise ConfigError(
                f"checkpoint_in_memory_every={self.every} needs two optimizer steps of one epoch "
                f"without a validation between them, and here each step ends an epoch or is "
                f"followed by a validation. Validate less often, or leave it out."
            )
        self._begun = self._complete = self._last_step = trainer.global_step
        self._copying = AsyncSave()
        add_callback(trainer, MemoryCopies(self))
        own = self.expected_bytes()
        strategy.recorder.event(
            "checkpoint", f"copies in host memory take {own / 1e9:.3f} GB for this rank"
        )
        held = sum(ranks.of(ranks.gather(own)))
        _all_or_config_error(partial(self._prepare_folder, held), ranks)

    def _prepare_folder(self, needed: int) -> None:
        folder = self._folder
        assert folder is not None
        for left, run in host_memory.forgotten_folders():
            if left != folder and (run is None or not (run / host_memory.ID_FILE).exists()):
                shutil.rmtree(left, ignore_errors=True)
        host_memory.refuse_small(needed - host_memory.stored_bytes(folder))
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / host_memory.RUN_FILE).write_text(str(self._run.resolve()), encoding="utf-8")

    def expected_bytes(self) -> int:
        """Return the bytes of host memory that this rank's part of the copies takes.

        Two copies while one is written; with several hosts, two of another host's rank as well.
        Replicas have one copy on each of the first two hosts, counted for its first rank.
        """
        strategy, ranks = self._strategy, self._ranks
        own = sum(
            each.predicted_bytes or 0
            for each in strategy.expected_memory()
            if each.kind in {"parameters", "optimizer", "buffers"}
        )
        if strategy.stores_shards:
            return own * (2 if strategy.num_nodes == 1 else 4)
        return own * 2 if ranks is not None and ranks.is_leader and ranks.host < 2 else 0

    def expected_memory(self) -> MemoryKind:
        """Return ``expected_bytes`` for telemetry."""
        return MemoryKind("copies", "host", None, self.expected_bytes())

    def stored_bytes(self) -> StoredBytes:
        """Return this rank's part of the bytes of the files on its host."""
        ranks, size = self._ranks, 0
        if ranks is not None and self._folder is not None:
            size = host_memory.stored_bytes(self._folder)
            if self._strategy.stores_shards:
                size //= ranks.per_host
            elif not ranks.is_leader:
                size = 0
        return StoredBytes("host", size)

    # Training.

    def before_batch(self, global_step: int) -> None:
        """Wait for a copy if a failure in this batch could lose more than ``every`` steps.

        Raises:
            CheckpointError: A copy could not be made.
        """
        reached = global_step + self._steps_per_batch
        if self._copying is not None and reached - self._complete > self.every:
            self.wait()

    def after_batch(self, trainer: Trainer) -> None:
        """Begin a copy if one is due. Collective over all ranks."""
        step, before = trainer.global_step, self._last_step
        if step == before or self._copying is None:
            return
        self._last_step, self._steps_per_batch = step, step - before
        if is_epoch_over(trainer) or validation_follows(trainer):
            return
        is_break_next = batches_to_break(trainer) <= trainer.accumulate_grad_batches
        next_moment = step + self._steps_per_batch * (2 if is_break_next else 1)
        if next_moment - self._begun > (self.every + 1) // 2:
            trainer.save_checkpoint(self.address_of(step), weights_only=False)

    def is_own(self, address: object) -> bool:
        """Whether an address is that of a copy."""
        return str(address).startswith(_ADDRESS)

    def save(self, checkpoint: dict[str, Any], address: object) -> None:
        """Copy the state and begin to write it. Collective over all ranks."""
        step = int(str(address).removeprefix(_ADDRESS))
        self.wait()
        strategy, ranks, copying = self._strategy, self._ranks, self._copying
        assert ranks is not None
        assert copying is not None
        if strategy.stores_shards:
            is_divided = strategy.divides_modules
            kept, data = copy_part(checkpoint, is_divided=is_divided, writes_plain=ranks.is_leader)
            place = self._path(ranks.host, step)
            write = partial(write_part, kept, data, place, ranks, is_divided=is_divided)
        else:
            data = serialised(checkpoint) if ranks.rank == 0 else b""
            write = partial(self._write_file, data, self._path(0, step), ranks)
        self._begun = step
        copying.start(
            write, partial(self._send_on, step, ranks), partial(self._keep_only, step, ranks)
        )

    @staticmethod
    def _write_file(data: bytes, place: Path, ranks: HostRanks) -> None:
        act = partial(write_file, place, lambda file: file.write(data))
        ranks.run(act if ranks.rank == 0 else noop)

    def _send_on(self, step: int, ranks: HostRanks) -> None:
        """Send the part of each host to the next host. Collective."""
        count = ranks.num_hosts
        if count == 1:
            return
        following = (ranks.host + 1) % count * ranks.per_host
        before = (ranks.host - 1) % count
        sends = ranks.is_leader and (self._strategy.stores_shards or ranks.host == 0)
        receives = ranks.is_leader and (self._strategy.stores_shards or before == 0)
        send_part(
            self._path(ranks.host, step) if sends else None,
            following,
            self._path(before, step) if receives else None,
            before * ranks.per_host,
            ranks,
        )

    def _keep_only(self, step: int | None, ranks: HostRanks) -> None:
        """Delete all copies but that of ``step``, once it is complete on all hosts. Collective."""
        ranks.run(noop)
        if ranks.is_leader and self._folder is not None:
            name = None if step is None else self._path(0, step).name
            for each in self._folder.glob("part-*/*"):
                if each.name != name:
                    with contextlib.suppress(OSError):
                        remove(each)

    def wait(self) -> None:
        """Wait until no copy is being written.

        Raises:
            CheckpointError: The copy could not be written.
        """
        if self._copying is not None:
            self._copying.wait()
            self._complete = max(self._complete, self._begun)

    def close(self) -> None:
        """Wait for this rank's writes at the end of its run; other ranks may have ended."""
        copying, self._copying, self._ranks = self._copying, None, None
        if copying is not None:
            try:
                copying.wait()
            except Exception as error:  # noqa: BLE001 - must not hide the error that ends the run
                warnings.warn(f"The last copy in memory is not there: {error}", stacklevel=2)

    def forget(self) -> None:
        """Delete the copies on this host after a run without failure."""
        if self._folder is not None and self._strategy.local_rank == 0:
            run_id = self._folder.name.partition("-")[0]
            for each in self._folder.parent.glob(f"{run_id}-*"):  # of other layouts as well
                shutil.rmtree(each, ignore_errors=True)
        if self._folder is not None and self._strategy.is_global_zero:
            with contextlib.suppress(OSError):
                (self._run / host_memory.ID_FILE).unlink(missing_ok=True)


class MemoryCopies(Checkpoint):
    """Callback that makes the copies. A ``Checkpoint``, because the Trainer calls those last.

    Args:
        copies: The copies of the strategy.
    """

    def __init__(self, copies: MemoryCheckpoints) -> None:
        self._copies = copies

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._copies.after_batch(trainer)


def _all_or_config_error(action: Callable[[], object], ranks: HostRanks) -> None:
    """Run an action on the first rank of each host and raise its ConfigError on all ranks."""
    said = None
    if ranks.is_leader:
        try:
            action()
        except ConfigError as error:
            said = str(error)
    reason = next((each for each in ranks.gather(said) if each is not None), None)
    if reason is not None:
        raise ConfigError(reason)


def _is_whole(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_dir():
            return find_damage(path, threads=4) is None
        with path.open("rb") as file:
            return find_damage_in_file(file) is None
    return False

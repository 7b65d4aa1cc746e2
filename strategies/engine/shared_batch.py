"""Ranks that get the same batches, and compute different parts of what is made of them.

What a pipeline and a tensor group have in common: where one process would stand, several do. They
draw the same random numbers, see the same data, count each batch once in metrics, and none of them
has the whole model.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.distributed import ProcessGroup
from typing_extensions import override

from boltmesh.strategies.dry_run.batch_check import BatchDigest, batch_digest
from boltmesh.strategies.dry_run.broadcast import share_random_state
from boltmesh.strategies.dry_run.metrics import gather_over, let_gather
from boltmesh.strategies.dry_run.unsupported import Reasons, refuse_run
from boltmesh.strategies.engine.strategy import MeshStrategy
from boltmesh.strategies.lightning_compat.loops import gives_last_batch, seed_workers
from boltmesh.strategies.lightning_compat.trainer import callbacks_of, trainer_of
from boltmesh.strategies.torch_compat.optimizers import total_norm_replaced


class SharedBatchStrategy(MeshStrategy):
    """The engine with ranks that share batches; what each axis of such ranks stands on."""

    defers_building = True
    reasons: Reasons
    """Why ranks of the axis cannot do apart what one process does."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sample: tuple[Any, tuple[Any, ...]] = None, ()
        """A batch of the run that is set up, and what a step is called with behind it."""

    @property
    @override
    def is_distributed(self) -> bool:  # type: ignore[override]
        """Whether the Trainer has to deal the data out: ranks that share batches get the same.

        So loaders keep the sampler that their author gave them where there are no replicas, and a
        run sees its data in the order of one process.
        """
        return self.layout.data > 1

    @property
    @override
    def stores_shards(self) -> bool:
        return True

    # Starting.

    @override
    def _reset_seed(self) -> None:
        # Ranks that run the script themselves stand where one process would; ``place`` makes them
        # alike. Those that begin as empty processes have nothing but the seed.
        if self.layout.data > 1 or self._start_method in {"spawn", "forkserver"}:
            super()._reset_seed()

    def sharing_groups(self) -> list[ProcessGroup]:
        """Return this rank's group on each axis of ranks that share batches, outermost first."""
        return []

    @override
    def place(self, trainer: Trainer) -> None:
        super().place(trainer)
        assert self.lightning_module is not None
        refuse_run(
            trainer,
            self.lightning_module,
            self._step_name,
            synchronises_norms=self._layer_sync is not None,
            because=self.reasons,
        )
        for group in self.sharing_groups():
            share_random_state(group, self.root_device)

    @override
    def setup(self, trainer: Trainer) -> None:
        gather_over(self._metric_owners(), self.groups["data"])
        super().setup(trainer)
        self._sample = None, ()

    # Metrics.

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._adopt_metrics()

    @override
    def _begin_evaluation(self) -> None:
        super()._begin_evaluation()
        self._adopt_metrics()

    def _adopt_metrics(self) -> None:
        """Metrics may have been made as late as in the user's hooks at the start of a loop."""
        gather_over(self._metric_owners(), self.groups["data"])

    def _metric_owners(self) -> list[object]:
        trainer = trainer_of(self.lightning_module)
        callbacks = [] if trainer is None else callbacks_of(trainer)
        return [self.lightning_module, *callbacks]

    # Batches.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        # Lightning would seed them by the global rank: other crops and masks on every rank.
        seed_workers(dataloader, self.coordinates["data"])
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        trainer = trainer_of(self.lightning_module)
        is_last = False
        if trainer is not None and trainer.state.fn is not None:
            is_last = gives_last_batch(trainer)
        ready = super().batch_to_device(batch, device, dataloader_idx)
        # Before the transfer, so that no device is waited for; on the CPU as the step gets it.
        seen = ready if self.root_device.type == "cpu" else batch
        self.announce_batch(ready, batch_digest(seen, is_last=is_last))
        return ready

    def announce_batch(self, batch: Any, digest: BatchDigest) -> None:
        """Take what this rank's batch is, to be compared before a step with it.

        Args:
            batch: As the step will get it.
            digest: What it was before its transfer.
        """

    # Gradients.

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        # A hook of the user's may clip by what torch has.
        with self._true_norms():
            return super().optimizer_step(*args, **kwargs)

    def _true_norms(self) -> AbstractContextManager[None]:
        """Let torch clip by the norm of the whole model, where a rank has parts of it.

        A door may leave all ranks to the data axis, which knows what torch does with its shards.
        """
        if self.layout.pipeline == 1 and self.layout.tensor == 1:
            return nullcontext()
        return total_norm_replaced(self.data_axis.norms.total)

    # Checkpoints.

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within it, the module gives its state, parts of it, to who knows that they are."""
        yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.opened():
            return super().lightning_module_state_dict()

    @override
    def whole_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with self.opened():
            return super().whole_state(state_dict)

    # Ending.

    @override
    def teardown(self) -> None:
        let_gather(self._metric_owners())
        super().teardown()

"""What a rank of a pipeline has of the model, what of it goes into checkpoints, and what beside it.

Gradients that a schedule applies a step late go along, so that a resumed run applies them too.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from boltmesh.strategies.checkpoint.optimizer_state import Take
from boltmesh.strategies.engine.shared_batch import SharedBatchStrategy
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.stage_params import add_pending, gathered, joined_state


class PipelineCheckpoints(SharedBatchStrategy):
    """Saves and loads the stages that this rank has, as parts of one model."""

    divides_modules = True
    pipeline_axis: PipelineAxis

    # What this rank has.

    @override
    def held_parameters(self) -> Collection[Parameter]:
        axis = self.pipeline_axis
        return axis.holdings.parameters if axis.placement is not None else []

    @override
    def kept_beside(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        delayed = self.pipeline_axis.delayed
        return ((), ()) if delayed is None else delayed.tensors()

    # Checkpoints.

    @override
    def holds(self, name: str) -> bool:
        here = self.coordinates["pipeline"] in self.pipeline_axis.holdings.holders(name)
        return here and super().holds(name)

    @override
    def stores(self, name: str) -> bool:
        if self.coordinates["data"] > 0 and not self.data_axis.is_sharded:
            return False  # the same as the first data rank's
        here = self.pipeline_axis.holdings.holders(name)[0] == self.coordinates["pipeline"]
        return here and super().stores(name)

    @override
    def holds_buffer(self, name: str) -> bool:
        return self.pipeline_axis.holdings.has_buffer(name) and super().holds_buffer(name)

    @override
    @contextmanager
    def opened(self) -> Iterator[None]:
        with super().opened(), self.pipeline_axis.holdings.guard.opened():
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._obstacle:
            self.refuse_unplaced()
            self.pipeline_axis.drain()
        return super().lightning_module_state_dict()

    @override
    def whole_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        holdings = self.pipeline_axis.holdings
        return gathered(
            super().whole_state(state_dict),
            lambda name: holdings.holders(name)[0],
            self.groups["pipeline"],
            self.root_device,
            keeps=self.local_rank == 0,
        )

    @override
    def join_state(self, state: dict[str, Any]) -> dict[str, Any]:
        delayed = self.pipeline_axis.delayed
        if delayed is not None:
            add_pending(state, self._named_parameters(), delayed.pending())
        return joined_state(state, self.stores)

    def _named_parameters(self) -> dict[str, Parameter]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.named_parameters())

    @override
    def take_pending(self) -> Take | None:
        delayed = self.pipeline_axis.delayed
        if delayed is None:
            return None
        delayed.begin()
        return delayed.put

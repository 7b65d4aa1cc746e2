"""The gradients of PipeDream-2BW: made by one batch, complete and applied in the step of the next.

The update is W(t+1) = W(t) - step(gradient of batch t-1 at W(t-1)) (Narayanan et al. 2021,
https://arxiv.org/abs/2006.09503, section 3.1): on every rank the same delay of one step. The first
batch of a run finds no gradient, and its optimizer step changes nothing; that of the last batch is
not applied unless the run is gone on with, for which checkpoints keep it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from boltmesh.strategies.pipeline.sharing import SharedParameters
from boltmesh.strategies.pipeline.versions import ParameterSlots, WeightVersion
from boltmesh.strategies.torch_compat import scale_all


@dataclass
class _Batch:
    """One whose backward passes are not all done."""

    version: WeightVersion
    num_microbatches: int
    total: Tensor | float | None
    """What its gradients are to be divided by; None where it gave no loss."""


class DelayedGradients:
    """What is under way between two batches on one rank.

    Args:
        slots: The parameters of this rank.
        shared: Those that several ranks hold.
        finish: Does the backward passes that are left of so many microbatches. Collective.
        drop: Lets go of them.
    """

    def __init__(
        self,
        slots: ParameterSlots,
        shared: SharedParameters,
        finish: Callable[[int], None],
        drop: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._shared = shared
        self._finish = finish
        self._drop = drop
        self._under_way: _Batch | None = None
        self._ready: dict[int, Tensor] = {}
        """Of the newest batch that is complete, until a step takes them."""

    @contextmanager
    def batch(self) -> Iterator[int]:
        """Within, a batch's schedule is run; gives the microbatches of the one that it completes.

        Collective over the pipeline. That batch's gradient is ready afterwards, and the new one
        goes on when ``wait`` is called.
        """
        before, self._under_way = self._under_way, None
        self._version = WeightVersion(self._slots)
        with self._version.in_place():
            yield before.num_microbatches if before is not None else 0
        if before is not None:
            self._complete(before)

    def wait(self, num_microbatches: int, total: Tensor | float | None) -> None:
        """Keep the batch that was run last until the next one completes it.

        Args:
            num_microbatches: Of it.
            total: What its gradients are to be divided by; None where it gave no loss.
        """
        self._version.part()
        self._under_way = _Batch(self._version, num_microbatches, total)
        del self._version

    def take(self) -> dict[int, Tensor]:
        """Give away the gradients that are ready, by identity of their parameter."""
        ready, self._ready = self._ready, {}
        return ready

    def drain(self) -> None:
        """Complete what is under way, so that no graph is left. Collective over the pipeline.

        Nothing of what is computed changes by it.
        """
        before, self._under_way = self._under_way, None
        if before is not None:
            self._finish(before.num_microbatches)
            self._complete(before)

    def abandon(self) -> None:
        """Let go of what is under way; what is ready stays."""
        self._under_way = None
        self._drop()

    def _complete(self, batch: _Batch) -> None:
        if batch.total is None:
            return
        made = batch.version.gradients()
        made |= self._shared.add_up(made)
        if made:
            _divide(list(made.values()), batch.total)
        self._ready = made

    # Keeping.

    def pending(self) -> Mapping[int, Tensor]:
        """Return the gradients that are ready, which stay here; after ``drain`` all there are."""
        return self._ready

    def begin(self) -> None:
        """Begin anew: nothing is under way, nothing ready."""
        self.abandon()
        self._ready = {}

    def put(self, parameter: Parameter, gradient: Tensor) -> None:
        """Take a gradient that a run before has kept."""
        self._ready[id(parameter)] = gradient

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is kept in memory beside the module: weights and gradients."""
        weights: list[Tensor] = []
        gradients = list(self._ready.values())
        if self._under_way is not None:
            kept = self._under_way.version.tensors()
            weights, gradients = kept[0], gradients + kept[1]
        return weights, gradients


def _divide(gradients: Sequence[Tensor], total: Tensor | float) -> None:
    """As ``Deposit`` does it: in the same way on every rank; without any weight to zeros."""
    whole = torch.as_tensor(total, dtype=torch.float64, device=gradients[0].device)
    factor = torch.where(whole == 0, 0.0, 1 / whole)
    for dtype in {each.dtype for each in gradients}:
        alike = [each for each in gradients if each.dtype == dtype]
        scale_all(alike, factor.to(torch.promote_types(dtype, torch.float32)))

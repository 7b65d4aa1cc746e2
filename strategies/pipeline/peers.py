"""What several pipelines do together, and what they tell each other of failures.

They are those of other data ranks, and those of the ranks that share each layer with this one.

A pipeline that fails in a step raises on all of its ranks; the others find out when they wait for
it at the end of a batch. So do those of the same pipeline where a rank fails outside of steps, in a
hook of the user's or as its optimizer steps. Nobody can be woken there (see [Note: Failing
together] in ``executor/failure.py``), but the wait ends with the process that is waited for, or
after a grace period, and the cause is in the store by then.
"""

import itertools
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from boltmesh.errors import BoltMeshError, PipelineError
from boltmesh.strategies.dry_run.broadcast import broadcast_from_rank0
from boltmesh.strategies.pipeline.runtime.failure import FailureBoard

_RUNS: Final = itertools.count()
"""Of this process: what was told in one run is not heard in another."""


class PeerPipelines:
    """The pipelines beside this one. Collective to make, over all ranks.

    Args:
        count: Pipelines of the job, this one among them.
        num_ranks: Of the job.
        on_stuck: See ``FailureBoard``.
    """

    def __init__(
        self, count: int, num_ranks: int, on_stuck: Callable[[PipelineError], None]
    ) -> None:
        self._alarm: FailureBoard | None = None
        self._failed = f"Another {'pipeline' if count > 1 else 'rank'} of the job failed"
        if num_ranks > 1:
            name = f"replicas-{broadcast_from_rank0(next(_RUNS))}"
            self._alarm = FailureBoard(dist.get_rank(), name, on_stuck=on_stuck)

    def meet(self, action: Callable[[], None]) -> None:
        """Do something that is collective over the data axis.

        Raises:
            PipelineError: With the cause, where another pipeline has failed.
        """
        if self._alarm is None:
            action()
            return
        try:
            with self._alarm.watching():
                action()
        except BoltMeshError:
            raise
        except Exception as error:
            cause = self._alarm.look()
            if cause is None:
                raise
            raise PipelineError(f"{self._failed}: {cause}") from error
        self._alarm.num_moves += 1

    def explain(self, error: BaseException) -> None:
        """Put into an error that ends this rank what another one has told of its own."""
        if self._alarm is None or isinstance(error, BoltMeshError):
            return
        cause = self._alarm.look()
        if cause is not None and cause not in str(error):
            told = f"{self._failed}: {cause.rstrip('.')}."
            error.args = (f"{told} Here it shows as: {error}",)

    def tell(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        if self._alarm is not None:
            self._alarm.ring(str(error) or type(error).__name__)

    def close(self) -> None:
        """End the thread that looks for failures."""
        if self._alarm is not None:
            self._alarm.close()

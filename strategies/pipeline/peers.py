"""What several pipelines do together, and the causes of failures that they share.

These are the pipelines of other data ranks, and those of the ranks that share each layer with this
one. A pipeline that fails in a step raises on all of its ranks; the other pipelines find out when
they wait for it at the end of a batch. The ranks of one pipeline share failures outside of steps in
the same way: in a user's hook, or while an optimizer steps. A waiting rank cannot be woken there
(see [Note: Failing together] in ``runtime/failure.py``), but the wait ends with the process that
is waited for, or after a grace period, and the cause is on the board by then.
"""

import itertools
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from boltmesh.errors import BoltMeshError, PipelineError
from boltmesh.failure_board import FailureBoard
from boltmesh.strategies.dry_run.broadcast import broadcast_from_rank0

_RUNS: Final = itertools.count()
"""Of this process: a cause that was posted in one run is not read in another one."""


class PeerPipelines:
    """The other pipelines of the job. Collective to make, over all ranks.

    Args:
        count: Pipelines of the job, this one among them.
        num_ranks: Of the job.
        on_stuck: See ``FailureBoard``.
    """

    def __init__(
        self, count: int, num_ranks: int, on_stuck: Callable[[BoltMeshError], None]
    ) -> None:
        self._board: FailureBoard | None = None
        self._failed = f"Another {'pipeline' if count > 1 else 'rank'} of the job failed"
        if num_ranks > 1:
            name = f"replicas-{broadcast_from_rank0(next(_RUNS))}"
            self._board = FailureBoard(
                dist.get_rank(), name, error=PipelineError, on_stuck=on_stuck
            )

    def run_collective(self, action: Callable[[], None]) -> None:
        """Run an action that is collective over the data axis.

        Raises:
            PipelineError: Another pipeline has failed; with its cause.
        """
        if self._board is None:
            action()
            return
        try:
            with self._board.monitoring():
                action()
        except BoltMeshError:
            raise
        except Exception as error:
            cause = self._board.peek()
            if cause is None:
                raise
            raise PipelineError(f"{self._failed}: {cause}") from error

    def annotate(self, error: BaseException) -> None:
        """Put the cause that another rank posted into an error that ends this rank."""
        if self._board is None or isinstance(error, BoltMeshError):
            return
        cause = self._board.peek()
        if cause is not None and cause not in str(error):
            first = f"{self._failed}: {cause.rstrip('.')}."
            error.args = (f"{first} Here it shows as: {error}",)

    def post(self, error: BaseException) -> None:
        """Post why this rank ends."""
        if self._board is not None:
            self._board.post(str(error) or type(error).__name__)

    def close(self) -> None:
        """Stop the monitor thread."""
        if self._board is not None:
            self._board.close()

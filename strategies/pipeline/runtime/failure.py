"""Failure of a pipeline on all ranks together, and the error that describes it.

[Note: Failing together]
A rank that waits for a message cannot be interrupted: gloo's receives cannot time out without
closing the connection nor be cancelled, and NCCL's wait on the device. So a rank that fails posts
its cause on the ``FailureBoard`` and then goes through its remaining actions without computing: it
sends zeros for the values or gradients that are due, and receives messages that arrive. The other
ranks read the cause as soon as they are idle, and do the same. All messages arrive, no rank waits
for one that never comes, and the groups can be used afterwards. Then all ranks raise the first
cause.

[Note: Failing within a shared stage]
If ranks compute each layer together, a rank that fails leaves the others of its stage in the middle
of a collective, which ends only with its process. So it does not wait for ranks that compute: it
gives the idle ones time to read the cause, sends its zeros, and raises. A rank that receives the
zeros knows the cause by then, and does not enter a collective that the failing rank would never
enter.

``PeerPipelines`` are the pipelines of other data ranks, and those of the ranks that compute each
layer together with this one. A pipeline that fails in a step raises on all of its ranks; the other
pipelines notice when they wait for it at the end of a batch. The ranks of one pipeline share
failures outside of steps in the same way: in a user's hook, or while an optimizer steps. A waiting
rank cannot be interrupted there, but the wait ends with the other process, or after a grace period,
and the cause is on the board by then.
"""

import itertools
from collections.abc import Callable
from typing import Final

import torch.distributed as dist
from torch.nn import Module

from boltmesh.errors import BoltMeshError, PipelineError
from boltmesh.failure_board import FailureBoard
from boltmesh.schedule_sim import Action
from boltmesh.strategies.blocks import failing_module
from boltmesh.strategies.object_collectives import broadcast_from_rank0

_PHASES: Final = {
    "F": "the forward pass",
    "B": "the backward pass",
    "I": "the backward pass to the inputs",
    "W": "the backward pass to the weights",
    "SEND_F": "sending the values",
    "RECV_F": "receiving the values",
    "SEND_B": "sending the gradients",
    "RECV_B": "receiving the gradients",
}


def describe_failure(
    error: BaseException,
    action: Action | None,
    *,
    rank: int,
    name_of: Callable[[Module], str | None],
    batch: str = "",
) -> str:
    """Return a sentence with the failure and its place. Errors of the runtime keep their text."""
    if isinstance(error, PipelineError):
        return f"{error} (found on rank {rank})" if action is not None else str(error)
    if action is None:
        where = f"The pipeline on rank {rank} failed outside of any stage"
    else:
        where = (
            f"Stage {action.stage} on rank {rank} failed in {_PHASES[action.kind]} of microbatch "
            f"{action.microbatch}{batch}"
        )
        module = failing_module(error)
        if module is not None:
            name = name_of(module)
            kind = type(module).__name__
            where += f", in '{name}' ({kind})" if name else f", in a {kind}"
    return f"{where}: {type(error).__name__}: {error}"


_RUNS: Final = itertools.count()
"""Numbers the runs of this process, so that a cause of one run is not read in another."""


class PeerPipelines:
    """The other pipelines of the job. The constructor is collective over all ranks.

    Args:
        count: Pipelines of the job, this one among them.
        num_ranks: Ranks of the job.
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
            PipelineError: Another pipeline failed; with its cause.
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
        """Add the cause that another rank posted to an error that ends this rank."""
        if self._board is None or isinstance(error, BoltMeshError):
            return
        cause = self._board.peek()
        if cause is not None and cause not in str(error):
            first = f"{self._failed}: {cause.rstrip('.')}."
            error.args = (f"{first} Here it shows as: {error}",)

    def post(self, error: BaseException) -> None:
        """Post the error that ends this rank."""
        if self._board is not None:
            self._board.post(str(error) or type(error).__name__)

    def close(self) -> None:
        """Stop the monitor thread."""
        if self._board is not None:
            self._board.close()

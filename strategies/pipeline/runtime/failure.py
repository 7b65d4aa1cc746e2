"""How a pipeline step fails on all ranks together, and the error that describes it.

[Note: Failing together]
A rank that waits for a message cannot be woken: gloo's receives neither time out without closing
the connection nor can they be cancelled, and NCCL's wait on the device. So a rank that fails posts
its cause on the ``FailureBoard`` and then goes through its remaining actions without computing: it
sends zeros for the values or gradients that are due, and receives what arrives. The other ranks
read the cause as soon as they are idle, and do the same. All messages arrive, no rank waits for one
that never comes, and the groups can be used afterwards. Then all ranks raise the first cause.

[Note: Failing within a shared stage]
Where ranks share each layer, a rank that fails leaves the others of its stage in the middle of a
sum, which ends only with its process. So it does not wait for ranks that compute: it gives the idle
ones time to read the cause, sends its zeros, and raises. A rank that receives zeros knows by then
what they are, and does not enter a sum of its own, which the failing rank would never enter.
"""

from collections.abc import Callable
from typing import Final

from torch.nn import Module

from boltmesh.errors import PipelineError
from boltmesh.schedule_sim import Action

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
    """Return one sentence: what failed, and where. Errors of the runtime keep their own text."""
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


def failing_module(error: BaseException) -> Module | None:
    """Return the innermost module whose code an error came from."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, Module):
            found = module
        traceback = traceback.tb_next
    return found

"""Makes groups of ranks of a pipeline, in every pipeline of the job at once."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


def new_group(
    members: Sequence[int],
    pipelines: Sequence[Sequence[int]],
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    description: str,
) -> ProcessGroup | None:
    """Return a group of some ranks of this rank's pipeline; None where it is not one of them.

    Collective over all ranks of the job, members or not: ranks that have made different numbers of
    groups may never meet in the next one (gloo, torch 2.13).

    Args:
        members: Places in the pipeline, alike on all ranks.
        pipelines: The global ranks of every pipeline of the job, alike on all ranks.
        timeout: Of its collectives; torch's default if None.
        backend: The default one if None.
        description: What errors call it.
    """
    found: ProcessGroup | None = None
    own = dist.get_rank()
    for ranks in pipelines:
        chosen = [ranks[each] for each in members]
        made = dist.new_group(chosen, timeout, backend=backend, group_desc=description)
        if own in chosen:
            found = made
    return found

"""Sees to it that the ranks of a tensor group have the same batch, before they compute with it.

Each rank computes some heads of every token; with another batch on one of them all train on
nonsense, without a word. A digest of each batch is compared while the batch is transferred.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from boltmesh.errors import ConfigError
from boltmesh.strategies.steps.digest import BatchDigest, batch_digest, explain_difference

BYTES_PER_RANK = torch.int64.itemsize
"""Of the question that is asked for each batch."""


class _Question(NamedTuple):
    batch: Any
    """As the step will get it, by identity."""
    digest: BatchDigest
    row: torch.Tensor
    """A number of each rank, 0-filled by the others."""
    work: Work | None


class SameBatches:
    """The questions of one tensor group.

    Args:
        group: Its ranks, on the CPU and of its own, so that no kernel is waited for.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._asked: _Question | None = None

    def ask(self, batch: Any, digest: BatchDigest) -> None:
        """Begin to compare a batch. Collective over the group.

        Args:
            batch: As the step will get it.
            digest: What it was where its values could be read without waiting.
        """
        row = torch.zeros(self._group.size(), dtype=torch.int64)
        row[self._group.rank()] = digest.number
        work = dist.all_reduce(row, group=self._group, async_op=True)
        self._asked = _Question(batch, digest, row, work)

    def settle(self, batch: Any) -> None:
        """Wait for the answer, before a step with the batch. Collective over the group.

        Raises:
            ConfigError: On all ranks, when they have different batches.
        """
        if self._asked is None or self._asked.batch is not batch:
            self.ask(batch, batch_digest(batch))  # a step that was given another one
        question, self._asked = self._asked, None
        assert question is not None
        if question.work is not None:
            question.work.wait()
        if len(set(question.row.tolist())) > 1:
            raise ConfigError(self._explain(question.digest))

    def _explain(self, digest: BatchDigest) -> str:
        told: list[BatchDigest] = [BatchDigest()] * self._group.size()
        dist.all_gather_object(told, digest, group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        return explain_difference(dict(zip(ranks, told, strict=True)), group="tensor group")

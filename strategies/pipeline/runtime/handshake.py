"""What the ranks of a pipeline agree on, at both ends of a step.

At its beginning, that both sides of each border await the same: ranks that were given different
batches would otherwise hang, or take bytes for something that they are not. Beside it each tells a
digest of its batch, which has to be the same on all, and how long it computed in an earlier step.
The question is asked while the first stage computes already, and answered before the first message.

At its end, that nobody has failed. So no rank is in a later step than one that fails, and all
raise in the same step. See [Note: Failing together] in ``failure.py``. The rank that ends last, on
which the next step waits, has the answer of all others by then. What ranks have to tell each other
of the step goes along, such as its loss: each further message would be one more to wait for.

Small rows that all ranks of a pipeline tell each other, straight from each to each.

gloo's collectives hand a row around in a ring, from thread to thread, and every rank waits for the
last one and then for the way back. Here whoever comes last finds the rows of all others there
already. Between two ranks on one host an ``all_reduce`` of 128 bytes takes 0.9 ms and this 0.1 ms
(torch 2.13). The receives are posted beforehand, so that no sender waits for them.
"""

import contextlib
import itertools
from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from boltmesh.errors import PipelineError
from boltmesh.strategies.dry_run.batch_check import BatchDigest, explain_difference
from boltmesh.strategies.pipeline.runtime.failure import Deadline
from boltmesh.strategies.pipeline.runtime.p2p import HostMessages, describe_specs, digest
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.runtime.timing import FIGURES, BubbleMeter
from boltmesh.strategies.pipeline.schedules.actions import RankProgram


class RowExchange:
    """A row of each rank to all others, once. Every rank of the group has to make one.

    Args:
        group: On the CPU. None for a single rank.
        length: Of a row; equal on all ranks.
        dtype: Of its numbers; also equal.
        tag: Tells exchanges apart that are open at the same time.
    """

    def __init__(
        self, group: ProcessGroup | None, length: int, dtype: torch.dtype, *, tag: int
    ) -> None:
        self._group = group
        self._messages = None if group is None else HostMessages(group)
        self._tag = tag
        self._own: Tensor | None = None
        self._sent: list[Work] = []
        self._awaited: list[Work] = []
        others = [] if group is None else [r for r in range(group.size()) if r != group.rank()]
        self._rows = torch.empty((len(others), length), dtype=dtype)
        self._others = others
        for other, row in zip(others, self._rows, strict=True):
            assert self._messages is not None
            self._awaited.append(self._messages.receive(row, other, tag))

    def tell(self, row: Tensor) -> None:
        """Send this rank's row; returns at once."""
        self._own = row  # its memory has to stay until it is through
        for other in self._others:
            assert self._messages is not None
            self._sent.append(self._messages.send(row, other, self._tag))

    def hear(self, patience: Deadline) -> Tensor:
        """Wait for the others, after ``tell``; return the rows of all ranks, in their order."""
        assert self._own is not None
        patience.wait((*self._awaited, *self._sent))
        self._awaited, self._sent = [], []
        before = 0 if self._group is None else self._group.rank()
        return torch.cat([self._rows[:before], self._own[None], self._rows[before:]])


def exchange_size(length: int, dtype: torch.dtype, num_ranks: int) -> tuple[int, int]:
    """Return the bytes and the messages that a rank sends; it receives as many."""
    return length * dtype.itemsize * (num_ranks - 1), num_ranks - 1


Specs = Mapping[tuple[int, int], tuple[ValueSpec, ...]]
"""By stage and microbatch what it gives, or what it awaits."""

_UNKNOWN: Final = -1

_ROW: Final = torch.int64
_TOLD: Final = torch.float64
_BEGIN, _END = 0, 1


def agreement_size(num_stages: int, num_ranks: int, num_told: int) -> tuple[int, int]:
    """Return the bytes and the messages that a rank sends for both agreements of a step."""
    begin = exchange_size(_row_length(num_stages, num_ranks), _ROW, num_ranks)
    end = exchange_size(1 + num_told, _TOLD, num_ranks)
    return begin[0] + end[0], begin[1] + end[1]


def _row_length(num_stages: int, num_ranks: int) -> int:
    return 2 * num_stages + (1 + FIGURES) * num_ranks


class DisagreementError(PipelineError):
    """Stages that await different things. All ranks raise it, before anything is sent."""


class Handshake:
    """The questions of one step.

    Args:
        group: The ranks of the pipeline, on the CPU and of its own, so that a question is never
            taken for anything else and waits for no kernel. None for a single rank.
        program: What this rank does.
        specs: What this rank's stages give and what they await; None where that could not be
            found out.
        batch: What this rank says of its batch.
        meter: Whose figures of an earlier run are told beside.
        patience: With the other ranks.
        num_told: How many numbers each rank tells at the end; equal on all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        program: RankProgram,
        specs: tuple[Specs, Specs] | None,
        batch: BatchDigest,
        meter: BubbleMeter,
        patience: Deadline,
        num_told: int,
    ) -> None:
        self._group = group
        self.patience = patience
        self._num_told = num_told
        self._rank_of_stage = program.rank_of_stage
        self._specs = specs
        self._batch = batch
        self._meter = meter
        digests = self._own_digests(program)
        batches = [0] * (1 if group is None else group.size())
        batches[0 if group is None else group.rank()] = batch.number
        # What only completes a batch says nothing about the schedule.
        is_training = program.has_backward and bool(program.microbatches)
        figures = meter.begin(is_training=is_training)
        # All lie in one row, of a length that no batch changes.
        row = torch.tensor([*digests[0], *digests[1], *batches, *figures], dtype=_ROW)
        self._question: RowExchange | None = None
        if group is None:
            meter.hear(figures)
        else:
            self._question = RowExchange(group, len(row), _ROW, tag=_BEGIN)
            self._question.tell(row)
            # Asked for now, so that nobody has to wait for room when all is done.
            self._end = RowExchange(group, 1 + num_told, _TOLD, tag=_END)

    def _own_digests(self, program: RankProgram) -> list[list[int]]:
        """Return what this rank knows, and zeros for what others know.

        By side and stage, whatever the batch is: what each stage gives, and what it awaits.
        """
        table = [[0] * len(program.rank_of_stage) for _ in range(2)]
        for side in range(2):
            for stage in program.stages:
                table[side][stage] = (
                    _UNKNOWN if self._specs is None else digest(self._at(side, stage))
                )
        return table

    def _at(self, side: int, stage: int) -> tuple[tuple[ValueSpec, ...], ...]:
        """What a stage gives (0) or awaits (1) in each microbatch."""
        specs = self._specs[side] if self._specs is not None else {}
        return tuple(values for (owner, _), values in specs.items() if owner == stage)

    def settle(self) -> None:
        """Wait for the answer. Collective the first time, then nothing.

        Raises:
            DisagreementError: Two stages await different things, or one does not know what, or
                ranks have different batches.
        """
        question, self._question = self._question, None
        if question is None:
            return
        told = question.hear(self.patience).sum(0).tolist()
        num_stages, num_ranks = len(self._rank_of_stage), max(self._rank_of_stage) + 1
        given, awaited = told[:num_stages], told[num_stages : 2 * num_stages]
        if min(given + awaited) < 0:
            raise DisagreementError  # whoever does not know has told why
        batches, figures = told[2 * num_stages :][:num_ranks], told[2 * num_stages + num_ranks :]
        if len(set(batches) - {0}) > 1:
            raise DisagreementError(self._explain_batches())
        for stage, (behind, before) in enumerate(zip(given[:-1], awaited[1:], strict=True)):
            if behind != before:
                raise DisagreementError(self._explain(stage))
        self._meter.hear(figures)

    def _explain_batches(self) -> str:
        """Say how the batches of ranks differ. Collective."""
        assert self._group is not None
        told: list[BatchDigest] = [BatchDigest()] * dist.get_world_size(self._group)
        dist.all_gather_object(told, self._batch, group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        pairs = zip(ranks, told, strict=True)
        return explain_difference({rank: each for rank, each in pairs if each.number})

    def _explain(self, stage: int) -> str:
        """Say what both sides of the border behind a stage know of it. Collective."""
        assert self._group is not None
        mine = [list(map(describe_specs, self._at(side, stage + side))) for side in range(2)]
        told: list[list[list[str]]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(told, mine, group=self._group)
        ranks = [self._rank_of_stage[stage + side] for side in range(2)]
        both = list(itertools.zip_longest(told[ranks[0]][0], told[ranks[1]][1]))
        microbatch, texts = next(
            (index, texts) for index, texts in enumerate(both) if texts[0] != texts[1]
        )
        sides = []
        for side, verb in enumerate(("gives", "awaits")):
            place = f"stage {stage + side} on rank {dist.get_global_rank(self._group, ranks[side])}"
            sides.append(f"{place} {verb} {texts[side] or 'no such microbatch'}")
        return (
            f"In microbatch {microbatch} {', and '.join(sides)}. All ranks of a pipeline have to "
            "get the same batch: check that the data does not depend on the rank."
        )

    def conclude(self, told: Tensor | None) -> Tensor | None:
        """Return what all ranks tell of the step. Collective; the last thing in a step.

        Args:
            told: By this rank, shape ``(num_told,)``, fp64; None where it fails.

        Returns:
            A row of each rank, ``(num_ranks, num_told)``; None where any of them fails.
        """
        row = torch.zeros(1 + self._num_told, dtype=_TOLD)
        if told is None:
            row[0] = 1.0
        elif self._num_told:
            row[1:] = told
        rows = row[None]
        if self._group is not None:
            self._end.tell(row)
            rows = self._end.hear(self.patience)
        return None if rows[:, 0].any() else rows[:, 1:]

    def wait_for_all(self) -> None:
        """Wait until all ranks know why the step failed: with one of them its store may go."""
        if self._group is not None:
            with contextlib.suppress(Exception):  # who is gone needs not know
                work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
                self.patience.wait([work])

"""Buffers and attributes that the code between layers changes, kept as one process would.

Every stage runs that code for every microbatch, up to where it hands on. What it writes into a
buffer of its own counts once: on the stage that has what is written, from where all other ranks
get it after the batch. What it only counts (batches seen, say) is kept from one stage of each rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.strategies.dry_run.no_side_effects import CONTAINERS
from boltmesh.strategies.pipeline.microbatch_runs import During
from boltmesh.strategies.pipeline.stage.cut import ANY_STAGE, StagePlan
from boltmesh.strategies.pipeline.stage_params import broadcast


class NonStageState:
    """What a step leaves behind outside of units.

    Args:
        root: The whole model.
        stages: Of this rank.
        rank_of_stage: Of all stages, ranks within ``group``.
        group: The pipeline.
    """

    def __init__(
        self,
        root: Module,
        stages: Iterable[int],
        rank_of_stage: Sequence[int],
        group: ProcessGroup,
    ) -> None:
        self._root = root
        self._keeper = max(stages)
        """The stage of this rank that comes furthest in the step."""
        self._rank_of_stage = rank_of_stage
        self._group = group
        self._replaced: dict[str, Tensor] = {}
        """The model's own buffers, by the names under which copies of them stand now."""

    def during(
        self,
        inner: During,
        plans: Sequence[StagePlan],
        keeps: Callable[[int], bool] = lambda _: True,
    ) -> During:
        """Return what microbatches of a stage are run in.

        Args:
            inner: What they are run in besides.
            plans: Of the stage, by microbatch.
            keeps: Whether what a microbatch changed stays.
        """
        self._keep_buffers()  # of a batch that an error ended
        if not any(plan.changed_buffers or plan.changed_attributes for plan in plans):
            return inner  # nearly all models; it is entered for each microbatch

        @contextmanager
        def both(microbatch: int) -> Iterator[None]:
            with inner(microbatch), self._around(plans[microbatch], keeps(microbatch)):
                yield

        return both

    @contextmanager
    def _around(self, plan: StagePlan, keeps: bool) -> Iterator[None]:
        """Within, a stage runs; afterwards stands what it has to leave behind, and no more.

        Each microbatch writes into copies: backward passes of others still need what these read.
        """
        is_kept = keeps and plan.stage == self._keeper
        attributes = frozenset() if is_kept else plan.changed_attributes
        buffers = self._buffers(plan.changed_buffers)
        copies = {id(each): each.detach().clone() for _, each in buffers}
        kept = [self._kept(*each) for each in attributes]
        for name, each in buffers:
            self._set_buffer(name, copies[id(each)])
        try:
            yield
        finally:
            for name, each in buffers:
                owner = plan.changed_buffers[name]
                if keeps and plan.stage == (self._keeper if owner == ANY_STAGE else owner):
                    self._replaced.setdefault(name, each)
                else:
                    self._set_buffer(name, each)
            for container, key, present, value, members in kept:
                _put_back(container, key, present, value, members)

    def _keep_buffers(self) -> None:
        """Let the model have its own buffers again, with the last microbatch's values."""
        for name, each in self._replaced.items():
            now = self._root.get_buffer(name)
            if now.shape == each.shape and now.dtype == each.dtype:
                each.data.copy_(now.detach())
                self._set_buffer(name, each)
        self._replaced = {}

    def share(self, plans: Iterable[StagePlan], *, is_joined: bool = False) -> None:
        """Give all ranks the buffers that one stage has. Collective over the pipeline.

        Args:
            plans: Of all microbatches that were run, each of any stage.
            is_joined: Whether the last stage has run the step on the whole batch.
        """
        self._keep_buffers()
        end = len(self._rank_of_stage) - 1
        owners = {
            name: end if is_joined else owner
            for plan in plans
            for name, owner in plan.changed_buffers.items()
            if owner != ANY_STAGE or is_joined
        }
        for name, each in self._buffers(sorted(owners)):
            broadcast(each, self._rank_of_stage[owners[name]], self._group)

    def broadcast(self, names: Iterable[str]) -> None:
        """Give all ranks the first one's values of some buffers. Collective over the pipeline."""
        for _, each in self._buffers(names):
            broadcast(each, 0, self._group)

    def _buffers(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        return [(name, self._root.get_buffer(name)) for name in names]

    def _set_buffer(self, name: str, tensor: Tensor) -> None:
        holder, _, key = name.rpartition(".")
        setattr(self._root.get_submodule(holder), key, tensor)

    def _kept(self, module: str, key: str) -> tuple[dict[str, Any], str, bool, Any, Any]:
        attributes = vars(self._root.get_submodule(module))
        value: Any = attributes.get(key)
        members = value.copy() if type(value) in CONTAINERS else None
        return attributes, key, key in attributes, value, members


def _put_back(
    attributes: dict[str, Any], key: str, was_present: bool, value: Any, members: Any
) -> None:
    if not was_present:
        attributes.pop(key, None)
        return
    attributes[key] = value
    if members is None:
        return
    value.clear()
    if isinstance(value, list):
        value.extend(members)
    else:
        value.update(members)

"""Verifies before the first step that a step computes the same whole and with its sequence cut.

One batch of the run is run both ways. The loss, logged values, outputs of a block, and the mean
over the ranks of every gradient have to agree. Long sequences are shortened for this.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.strategies.context.entries import EntryHooks, SequenceEntry
from boltmesh.strategies.context.opaque_functions import flex_attention_watched, functions_watched
from boltmesh.strategies.context.seq_shard import ContextState, make_all_whole, step_ended
from boltmesh.strategies.context.tokenwise import TokenwiseModule, TokenwiseModules
from boltmesh.strategies.dry_run.comparison import difference
from boltmesh.strategies.dry_run.step import (
    DryRun,
    DryRunOutcome,
    converted,
    floats_in,
    full_float32,
    zeros_filled,
)
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pytree import replace_tensors
from boltmesh.strategies.torch_compat.communication import destroy_group

_LOG = logging.getLogger(__name__)

SHORT = 1024
"""Most positions of a sequence that is verified; longer ones are shortened if possible."""


@dataclass(frozen=True)
class ContextProof:
    """A step to be verified.

    Args:
        dry_run: The step with a batch of the run, equal on all ranks.
        entries: The modules that first take its sequence.
        state: State with a process group of its own, which a failure on one rank leaves unusable.
        world_cpu_group: CPU group of all ranks of the job, which agree on the result.
        blocks: Repeated blocks by name.
        tokenwise: Modules that run on plain tensors.
        tile: Number of positions that these compute at a time; None: all.
    """

    dry_run: DryRun
    entries: tuple[SequenceEntry, ...]
    state: ContextState
    world_cpu_group: ProcessGroup
    blocks: Mapping[str, Module]
    tokenwise: Mapping[str, TokenwiseModule]
    tile: int | None

    def check(self) -> None:
        """Compare the step whole and cut.

        Collective over all ranks of the job, whose models are equal and whole and do not change.
        The group of the state is destroyed.

        Raises:
            ConfigError: If the results differ, or the step cannot be run.
        """
        module, device = self.dry_run.module, self.dry_run.device
        probes = dict(list(self.blocks.items())[-1:])
        wide = partial(torch.promote_types, torch.float32)
        is_idle = True
        try:
            with (
                converted(module, device, wide),
                zeros_filled(module),
                full_float32(),
                flex_attention_watched(),
            ):
                args = floats_in(torch.float32, move_data_to_device(self.dry_run.args, device))
                run = replace(self.dry_run, args=tuple(args), probes=probes)
                lengths = self._lengths(run)
                run, whole = self._run_whole(run, max(lengths, default=0))
                if not lengths:
                    raise ConfigError(
                        f"{type(module).__name__}.{run.step} does not call "
                        f"{' or '.join(repr(each.module) for each in self.entries)}, where its "
                        f"sequence would be divided. Use a strategy without a context axis."
                    )
                is_idle = False
                fault, cut = None, DryRunOutcome()
                try:
                    cut = self._run_cut(run)
                except Exception as error:  # noqa: BLE001 - the user's step may raise anything
                    fault = f"raises {_told(error)}"
                    # Where it is alone with that, the others wait in a collective until it times
                    # out.
                    _LOG.warning("boltmesh: the step with a divided sequence %s", fault)
                fault = self._first(fault)
                is_idle = fault is None
                if is_idle:
                    fault = self._difference(run, whole, cut)
        finally:
            destroy_group(self.state.group.process_group, is_idle=is_idle)
        if fault is not None:
            raise ConfigError(
                f"{type(module).__name__}.{run.step} with its sequence divided over "
                f"{self.state.group.size} ranks computes something else than whole: it {fault}. "
                f"Use a strategy without a context axis, such as bolt_zero3."
            )

    def _run_whole(self, run: DryRun, longest: int) -> tuple[DryRun, DryRunOutcome]:
        """Run the step whole, with a shortened batch if that is possible. Collective."""
        short = max(SHORT, 4 * self.state.group.size)
        if longest > short:
            shorter = replace(run, args=_shortened(run.args, longest, longest - short))
            try:
                found, outcome, fault = self._lengths(shorter), shorter.run(), None
            except Exception as error:  # noqa: BLE001 - as of a table of positions of fixed size
                found, outcome, fault = set(), DryRunOutcome(), _told(error)
            if self._first(fault) is None and found and max(found) < longest:
                return shorter, outcome
        whole, cause = DryRunOutcome(), None
        try:
            whole = run.run()
        except Exception as error:  # noqa: BLE001 - the user's step may raise anything
            cause = error
        self._refuse_failed(run, cause)
        return run, whole

    def _lengths(self, run: DryRun) -> set[int]:
        """Return the lengths of a step's sequences; raise its error on all ranks. Collective."""
        lengths: set[int] = set()
        entries = EntryHooks(run.module, self.entries, self.state, on_length=lengths.add)
        cause: Exception | None = None
        try:
            run.run(has_backward=not run.module.automatic_optimization)
        except Exception as error:  # noqa: BLE001 - the user's step may raise anything
            cause = error
        finally:
            entries.remove()
        self._refuse_failed(run, cause)
        return lengths

    def _refuse_failed(self, run: DryRun, cause: Exception | None) -> None:
        """Raise on all ranks if the step has raised on one. Collective over all ranks."""
        fault = self._first(None if cause is None else _told(cause))
        if fault is not None:
            raise ConfigError(
                f"{type(run.module).__name__}.{run.step} could not be run before the first step, "
                f"to compare it whole and with its sequence divided: {fault}"
            ) from cause

    def _run_cut(self, run: DryRun) -> DryRunOutcome:
        entries = EntryHooks(run.module, self.entries, self.state)
        self.state.take_batch(run.args)
        is_training = run.step == "training_step"
        modules = TokenwiseModules(
            run.module, self.tokenwise, self.state, is_training=is_training, tile=self.tile
        )
        try:
            with entries.on(), functions_watched(), step_ended(self.state):
                outcome = _run_with_whole_results(run)
        finally:
            modules.remove()
            entries.remove()
        return outcome

    def _difference(self, run: DryRun, whole: DryRunOutcome, cut: DryRunOutcome) -> str | None:
        """Return how the outcomes differ, with mean gradients. Collective over all ranks."""
        names = sorted(cut.gradients)
        if any(each != names for each in gather_objects(names, self.world_cpu_group)):
            return "gives gradients to other parameters on some ranks"
        for name in names:
            gradient = cut.gradients[name].contiguous()
            dist.all_reduce(gradient, group=self.state.group.process_group)
            cut.gradients[name] = gradient / self.state.group.size
        fault = self._first(difference(whole, cut, {}))
        if fault is not None:
            fault = self._first(difference(whole, cut, {}, run.run_nudged()))
        return fault

    def _first(self, text: str | None) -> str | None:
        """Return the text of the first rank that has one. Collective over all ranks."""
        of_ranks = gather_objects(text, self.world_cpu_group)
        return next((each for each in of_ranks if each is not None), None)


def _run_with_whole_results(run: DryRun) -> DryRunOutcome:
    """Run a step and return its outcome with whole tensors. Collective over the context group."""
    with results_whole(run.module, run.step):
        outcome = run.run()
    outcome.probed = {
        name: make_all_whole(several, "an output") for name, several in outcome.probed.items()
    }
    outcome.kept = {}  # may be of this rank's tokens
    return outcome


def results_whole(module: Module, step: str) -> AbstractContextManager[None]:
    """Context in which a step of a module returns whole tensors, not cut ones."""
    method = getattr(module, step)

    def run(*args: Any, **kwargs: Any) -> Any:
        return make_all_whole(method(*args, **kwargs), f"the result of {step}")

    return patched(module, **{step: run})


def _told(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0][:400]
    return text if isinstance(error, BoltMeshError) else f"{type(error).__name__}: {text}"


def _shortened(args: tuple[Any, ...], length: int, less: int) -> tuple[Any, ...]:
    """Remove positions from the end of each dim that is as long as the sequence, or one off.

    Targets that a dataset has shifted are one off.
    """

    def shorten(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if abs(size - length) <= 1 and (dim or tensor.ndim == 1):
                tensor = tensor.narrow(dim, 0, size - less)
        return tensor

    return tuple(replace_tensors(args, shorten))

"""Runs this rank's stages once with a batch, on tensors without data: for who counts what they do.

Nothing is sent or received. What crosses borders is made up, of the shapes that are planned.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from boltmesh.strategies.pipeline.executor.backward import Graph, backward
from boltmesh.strategies.pipeline.replay.stage_run import StageRun
from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.strategies.steps.metrics import find_metrics
from boltmesh.strategies.steps.quiet import quiet
from boltmesh.strategies.steps.restoring import modules_unchanged, random_state_unchanged
from boltmesh.strategies.torch_compat import FakeTensorMode


@dataclass(frozen=True)
class StageRehearsal:
    """Forward and backward passes of all microbatches of a batch of training.

    Args:
        module: Whose parameters are without data when this is called.
        device: Where they seem to be.
        runs: By microbatch: what the step is called with, and the stages of this rank.
    """

    module: LightningModule
    device: torch.device
    runs: Sequence[tuple[tuple[Any, ...], Sequence[StageRun]]]

    def __call__(self, mode: FakeTensorMode) -> None:
        """Run it. Modules, gradients and random numbers are as before afterwards.

        Args:
            mode: Of the parameters.
        """
        with ExitStack() as stack:
            stack.enter_context(random_state_unchanged(self.device))
            stack.enter_context(modules_unchanged(self.module.modules()))
            stack.enter_context(quiet(self.module, find_metrics(self.module)))
            stack.enter_context(torch.enable_grad())
            self.module.train()
            for args, stages in self.runs:
                for stage in stages:
                    self._run(stage, args, mode)

    def _run(self, stage: StageRun, args: tuple[Any, ...], mode: FakeTensorMode) -> None:
        received = tuple(self._made_up(each, mode) for each in stage.plan.values_in)
        result = stage.forward(received, args)
        if isinstance(result, Mapping):
            result = result.get("loss")
        given = result if isinstance(result, tuple) else (result,)
        outputs = [each for each in given if isinstance(each, Tensor)]
        backward(Graph.of(received, outputs), tuple(torch.zeros_like(each) for each in outputs))

    def _made_up(self, spec: ValueSpec, mode: FakeTensorMode) -> Tensor:
        with mode:
            value = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return value.requires_grad_() if spec.needs_grad else value

"""``PipelineStep``: one run of a rank's actions.

A stage keeps the inputs of a microbatch and the graph behind its outputs from the forward pass to
the end of the backward pass (of its second half, if it has two). The outputs themselves are freed
as soon as they are sent, unless autograd needs them.

Layers that run again in a backward pass of the batch before are refused: the weights have changed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from boltmesh.errors import ConfigError, PipelineError
from boltmesh.failure_board import Deadline
from boltmesh.schedule_sim import RECEIVES, SENDS, Action
from boltmesh.strategies.pipeline.runtime.backward import (
    Grads,
    StageGraph,
    WeightsHalf,
    backward,
    backward_inputs,
)
from boltmesh.strategies.pipeline.runtime.p2p import StageTransport, check_outputs
from boltmesh.strategies.pipeline.runtime.stage import Chunk, PipelineStage, Specs, ValueSpec
from boltmesh.strategies.pipeline.runtime.timing import ChunkTimer
from boltmesh.strategies.pipeline.schedules.actions import RankProgram


@contextmanager
def no_module_runs() -> Iterator[None]:
    """Return a context in which no module may be called.

    Raises:
        ConfigError: One was called, as by ``torch.utils.checkpoint`` in a backward pass.
    """

    def refuse(module: Module, arguments: Any) -> None:
        raise ConfigError(
            f"a {type(module).__name__} runs again in its backward pass, as "
            f"torch.utils.checkpoint does it, and with schedule='pipedream_2bw' that comes after "
            f"the next optimizer step: it would compute with other weights than before. Leave "
            f"checkpointing out (gradient_checkpointing_disable() in Hugging Face models), or use "
            f"schedule='1f1b'."
        )

    with register_module_forward_pre_hook(refuse):
        yield


@dataclass
class Carried:
    """Microbatches of a step whose backward passes run in the next one.

    Their numbers count from the end of their batch; -1 is the last.
    """

    graphs: dict[Chunk, StageGraph] = field(default_factory=dict)
    grads: dict[Chunk, Grads] = field(default_factory=dict)
    """Gradients of their outputs that have arrived already."""
    given: dict[Chunk, tuple[ValueSpec, ...]] = field(default_factory=dict)
    awaited: dict[Chunk, tuple[ValueSpec, ...]] = field(default_factory=dict)


@dataclass
class StepOutcome:
    """Results of a run on one rank."""

    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Outputs of the last stage by microbatch, without graph; empty on other ranks."""
    peak_live: dict[int, int] = field(default_factory=dict)
    """Most microbatches that were kept at the same time, by stage."""
    reports: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float64))
    """Reports of all ranks at the end, shape ``(R, report_length)``, fp64."""


class PipelineStep:
    """Performs the actions of one run.

    Args:
        program: The actions of this rank.
        stages: The stages of this rank, by number.
        given: The values that a stage sends, by stage and microbatch.
        awaited: The values that a stage receives, by stage and microbatch.
        transport: Messages to the other ranks.
        spans: Measures chunks.
        device: Device of values.
        carried: Microbatches of the step before that end in this one.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, PipelineStage],
        given: Specs,
        awaited: Specs,
        transport: StageTransport,
        spans: ChunkTimer,
        device: torch.device,
        carried: Carried | None = None,
    ) -> None:
        carried = Carried() if carried is None else carried
        self._program = program
        self._stages = stages
        self._given, self._awaited = {**given, **carried.given}, {**awaited, **carried.awaited}
        self._transport, self._spans, self._device = transport, spans, device
        self._is_training = program.has_backward
        self._live = dict.fromkeys(program.stages, 0)
        for stage, _ in carried.graphs:
            self._live[stage] += 1
        self.known_failure: Callable[[], str | None] = lambda: None
        """Returns the cause of a failure, if this rank knows of one."""
        self.outcome = StepOutcome(peak_live=dict(self._live))
        self._values: dict[Chunk, tuple[Tensor, ...]] = {}
        """Inputs of a stage from a stage of the same rank."""
        self._grads: dict[Chunk, Grads] = dict(carried.grads)
        """Gradients of a stage's outputs that exist already."""
        self._to_send: dict[Action, tuple[Tensor, ...]] = {}
        self._graphs: dict[Chunk, StageGraph] = dict(carried.graphs)
        self._later: dict[Chunk, WeightsHalf] = {}

    def perform(self, action: Action) -> None:
        """Perform the next action."""
        self._METHODS[action.kind](self, action)

    def drain_after_failure(self, actions: Sequence[Action], deadline: Deadline) -> None:
        """Send zeros and receive the due messages without computing, after a rank has failed.

        Returns when all messages have arrived or failed, or after the deadline.
        """
        self.abandon()
        for action in actions:
            with contextlib.suppress(Exception):  # the cause is known; this peer may be gone
                self._drain(action)
        self._transport.finish_after_failure(deadline)

    def _drain(self, action: Action) -> None:
        if action.kind in SENDS:
            zeros = [self._zeros(spec) for spec in self._crossing(action)]
            self._transport.send(action, zeros, [""] * len(zeros), self._program.peer(action))
        elif action.kind in RECEIVES:
            self._post_receive(action)

    def finish(self) -> Carried | None:
        """Wait for messages in flight; return the work left for the next step."""
        left = self._leave() if self._program.carries else None
        self._transport.finish()
        return left

    def _leave(self) -> Carried:
        left = Carried()
        count = len(self._program.microbatches)
        for (index, microbatch), graph in self._graphs.items():
            chunk, later = (index, microbatch), (index, microbatch - count)
            left.graphs[later] = graph
            left.given[later], left.awaited[later] = self._given[chunk], self._awaited[chunk]
            arrival = Action(index, "RECV_B", microbatch)
            if chunk in self._grads:
                left.grads[later] = self._grads[chunk]
            elif self._transport.awaits(arrival):
                left.grads[later] = self._arrived_grads(arrival)
        return left

    def abandon(self) -> None:
        """Free all values, gradients and graphs."""
        for kept in (self._values, self._grads, self._to_send, self._graphs, self._later):
            kept.clear()

    def _forward(self, action: Action) -> None:
        index, microbatch = chunk = action.stage, action.microbatch
        stage = self._stages[index]
        received = self._inputs(chunk)
        start = self._spans.begin()
        outputs = stage.forward(microbatch, received)
        self._end_span(action, start)
        specs = self._given[chunk]
        if not stage.is_last:
            check_outputs(
                outputs,
                specs,
                stage=index,
                microbatch=microbatch,
                is_differentiated=self._is_training,
            )
        if self._is_training:
            self._graphs[chunk] = StageGraph.of(received, outputs)
            self._live[index] += 1
            self.outcome.peak_live[index] = max(self.outcome.peak_live[index], self._live[index])
        values = tuple(output.detach() for output in outputs)
        if stage.is_last:
            self.outcome.outputs[microbatch] = values
            if self._is_training:
                self._grads[chunk] = tuple(torch.ones_like(value) for value in values)
        elif self._program.is_local(index + 1):
            self._values[index + 1, microbatch] = values
        else:
            self._to_send[Action(index, "SEND_F", microbatch)] = values

    def _inputs(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """Return the inputs of a stage; leaves if their gradient is sent back."""
        index, microbatch = chunk
        if self._stages[index].is_first:
            return ()
        if self._program.is_local(index - 1):
            values = self._values.pop(chunk)
        else:
            values = self._receive(Action(index, "RECV_F", microbatch))
        if self._is_training:
            for value, spec in zip(values, self._awaited[chunk], strict=True):
                value.requires_grad_(spec.needs_grad)
        return values

    def _backward(self, action: Action) -> None:
        graph, grads = self._begin_backward(action)
        start = self._spans.begin()
        with no_module_runs() if action.microbatch < 0 else contextlib.nullcontext():
            input_grads = backward(graph, grads)
        self._end_span(action, start)
        self._live[action.stage] -= 1
        self._hand_back(action, input_grads)

    def _backward_inputs(self, action: Action) -> None:
        graph, grads = self._begin_backward(action)
        start = self._spans.begin()
        input_grads, later = backward_inputs(graph, grads)
        self._end_span(action, start)
        self._later[action.stage, action.microbatch] = later
        self._hand_back(action, input_grads)

    def _backward_weights(self, action: Action) -> None:
        later = self._later.pop((action.stage, action.microbatch))
        start = self._spans.begin()
        later.run()
        self._end_span(action, start)
        self._live[action.stage] -= 1

    def _end_span(self, action: Action, start: Any) -> None:
        if action.microbatch < 0:  # of the batch before
            action = action._replace(microbatch=self._program.number(action))
        self._spans.end(action, start)

    def _begin_backward(self, action: Action) -> tuple[StageGraph, Grads]:
        """Take the graph and the gradients of its outputs, and free the sent outputs."""
        index, microbatch = chunk = action.stage, action.microbatch
        if chunk in self._grads:  # from a stage of this rank, or arrived in the step before
            return self._graphs.pop(chunk), self._grads.pop(chunk)
        grads = self._arrived_grads(Action(index, "RECV_B", microbatch))
        # The next stage has sent the gradient, so the outputs have arrived there.
        self._transport.finish_send(Action(index, "SEND_F", microbatch))
        return self._graphs.pop(chunk), grads

    def _arrived_grads(self, arrival: Action) -> Grads:
        """Wait for the gradients of a stage's outputs; None for outputs without one."""
        arrived = iter(self._receive(arrival))
        specs = self._given[arrival.stage, arrival.microbatch]
        return tuple(next(arrived) if spec.needs_grad else None for spec in specs)

    def _hand_back(self, action: Action, input_grads: Grads) -> None:
        """Send the gradients of a stage's inputs to the stage before, zeros for missing ones."""
        index, microbatch = chunk = action.stage, action.microbatch
        if index == 0:
            return
        if self._program.is_local(index - 1):
            self._grads[index - 1, microbatch] = input_grads
            return
        self._to_send[Action(index, "SEND_B", microbatch)] = tuple(
            self._zeros(spec) if grad is None else grad
            for grad, spec in zip(input_grads, self._awaited[chunk], strict=True)
            if spec.needs_grad
        )

    def _send(self, action: Action) -> None:
        origins = [spec.origin for spec in self._crossing(action)]
        if action.kind == "SEND_B":
            origins = [f"the gradient of {origin}" for origin in origins]
        values = self._to_send.pop(action)
        self._transport.send(action, values, origins, self._program.peer(action))
        if action.kind == "SEND_B" or not self._is_training:
            self._transport.limit(action)

    def _post_receive(self, action: Action) -> None:
        self._transport.post_receive(action, self._crossing(action), self._program.peer(action))

    def _receive(self, action: Action) -> tuple[Tensor, ...]:
        try:
            values = self._transport.receive(action)
        except RuntimeError as error:
            peer = self._program.peer(action)
            what = "values" if action.kind == "RECV_F" else "gradients"
            where = "does not answer" if "timed out" in str(error).lower() else "is gone"
            raise PipelineError(
                f"Stage {action.stage} waited for the {what} of microbatch {action.microbatch} "
                f"from pipeline rank {peer}, which {where}: {error}"
            ) from error
        if cause := self.known_failure():  # then the values are zeros of a failed rank
            raise PipelineError(cause)
        return values

    def _crossing(self, action: Action) -> Sequence[ValueSpec]:
        """Return the values of a message."""
        is_behind = action.boundary > action.stage
        specs = (self._given if is_behind else self._awaited)[action.stage, action.microbatch]
        if action.kind.endswith("F"):
            return specs
        return [spec for spec in specs if spec.needs_grad]

    def _zeros(self, spec: ValueSpec) -> Tensor:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)

    # On the class: methods bound to a step would keep it, with its tensors, until a garbage
    # collection.
    _METHODS: ClassVar[Mapping[str, Callable[["PipelineStep", Action], None]]] = {
        "F": _forward,
        "B": _backward,
        "I": _backward_inputs,
        "W": _backward_weights,
        "SEND_F": _send,
        "SEND_B": _send,
        "RECV_F": _post_receive,
        "RECV_B": _post_receive,
    }

"""Sends values and gradients between stages on different ranks.

Messages are posted in the order of the schedule and matched in that order between any two ranks,
by NCCL as well as gloo. Over NCCL every tensor is sent as flat bytes, since it supports neither
complex numbers nor 16-bit integers. A tensor without elements is not sent.

A buffer is kept until its message has arrived. On a GPU the current stream waits; buffers that
another stream allocated are recorded on it.

Over gloo messages are posted at the backend of the group, not by torch's functions: these go
through the dispatcher, where telemetry observes them in Python, which would take longer than all
other records of a chunk. ``HostMessages`` reports them to telemetry itself.
"""

import contextlib
import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from boltmesh.errors import ConfigError, PipelineError
from boltmesh.failure_board import Deadline
from boltmesh.schedule_sim import Action
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.torch_compat.communication import host_backend
from boltmesh.strategies.torch_compat.tensors import times_written
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES


class HostMessages:
    """Sends and receives between any two ranks of a group, matched by their order for each tag.

    Args:
        group: Group with a backend for the CPU.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._backend = host_backend(group)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send a contiguous tensor of any shape and dtype; returns at once.

        Args:
            tensor: The tensor, not to be written until the work is waited for.
            peer: Rank within the group.
            tag: Distinguishes messages between the same ranks.
        """
        COLLECTIVES.note_message("send", self._group, tensor.nbytes, peer)
        return self._backend.send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Receive into a contiguous tensor with the sender's shape and dtype; returns at once.

        Args:
            tensor: The buffer, valid after the work is waited for.
            peer: Rank within the group.
            tag: Distinguishes messages between the same ranks.
        """
        COLLECTIVES.note_message("recv", self._group, tensor.nbytes, peer)
        return self._backend.recv([tensor], peer, tag)


SENDS_IN_FLIGHT: Final = 8
"""Limit of messages in flight of a stage and kind without an answer. Further sends wait for the
oldest one: buffers must not pile up, and no peer gains from a sender further ahead."""


class _Sent(NamedTuple):
    works: list[Work]
    wires: list[Tensor]
    borrowed: list[tuple[Tensor, int, str]]
    """Values that are sent without a copy: tensor, version counter, origin."""


class _PendingReceive(NamedTuple):
    works: list[Work]
    values: tuple[Tensor, ...]


class StageTransport:
    """Sends and receives the messages of one rank.

    Args:
        group: Ranks of the pipeline axis; None if one rank has all stages.
        device: Device of received values.
        gradient_group: The same ranks, for gradients; None: ``group``. Messages of one NCCL
            communicator are serialized: a value behind an awaited gradient would not be sent
            before that gradient arrives.

    Raises:
        ConfigError: For gloo between GPUs.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        device: torch.device,
        gradient_group: ProcessGroup | None = None,
    ) -> None:
        if group is not None and device.type != "cpu" and dist.get_backend(group) == "gloo":
            raise ConfigError(
                f"process_group_backend='gloo' cannot send tensors of {device} from one stage of a "
                f"pipeline to the next: gloo's messages take memory of the host alone. Leave "
                f"process_group_backend out, and nccl sends them; or train with "
                f"accelerator='cpu'."
            )
        self._group = group
        self._gradient_group = gradient_group or group
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._messages = HostMessages(group) if group is not None and self._is_on_host else None
        self._sent: dict[Action, _Sent] = {}
        self._awaited: dict[Action, _PendingReceive] = {}

    def post_receive(self, action: Action, specs: Sequence[ValueSpec], peer: int) -> None:
        """Allocate tensors of these shapes and dtypes and post their receives; see ``receive``.

        Args:
            action: The action that receives.
            specs: The values to receive.
            peer: Rank within the group.
        """
        values = tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs
        )
        wires = [self._wire(value) for value in values if value.numel()]
        self._awaited[action] = _PendingReceive(self._post(dist.irecv, wires, peer, action), values)

    def awaits(self, action: Action) -> bool:
        """Whether a receive is posted and not yet taken."""
        return action in self._awaited

    def receive(self, action: Action) -> tuple[Tensor, ...]:
        """Wait for the values of ``post_receive``, with the shapes and dtypes of its specs.

        The values belong to the caller. On a GPU the current stream waits for them.
        """
        works, values = self._awaited.pop(action)
        for work in works:
            work.wait()
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for value in values:
                value.record_stream(stream)
        return values

    def send(
        self, action: Action, values: Sequence[Tensor], origins: Sequence[str], peer: int
    ) -> None:
        """Send values; those that are not contiguous are copied before.

        Args:
            action: The action that sends.
            values: Values of any shape and dtype, not to be written until ``finish_send``.
            origins: Their origins, for errors.
            peer: Rank within the group.
        """
        wires, borrowed = [], []
        for value, origin in zip(values, origins, strict=True):
            if not value.numel():
                continue
            whole = value
            if not value.is_contiguous() or value.is_conj() or value.is_neg():
                whole = value.resolve_conj().resolve_neg().contiguous()
            wires.append(self._wire(whole))
            if whole is value and not value.is_inference():
                borrowed.append((value, times_written(value), origin))
        works = self._post(dist.isend, wires, peer, action)
        self._sent[action] = _Sent(works, wires, borrowed)

    def finish_send(self, action: Action) -> None:
        """Wait until a message is sent and free its buffers; no-op if that was done.

        Raises:
            PipelineError: A value was written in place while it was sent.
        """
        sent = self._sent.pop(action, None)
        if sent is None:
            return
        for work in sent.works:
            work.wait()
        for value, times, origin in sent.borrowed:
            if times_written(value) != times:
                raise PipelineError(
                    f"Stage {action.stage} was sending {origin} while it was changed in place, in "
                    f"microbatch {action.microbatch}. What is handed to another stage has to "
                    "stay as it is until the step ends: give a .clone() of it."
                )

    def limit(self, action: Action) -> None:
        """Wait for the oldest sends of this kind and stage beyond ``SENDS_IN_FLIGHT``."""
        same = [each for each in self._sent if (each.stage, each.kind) == action[:2]]
        for each in same[: max(0, len(same) - SENDS_IN_FLIGHT)]:
            self.finish_send(each)

    def finish(self) -> None:
        """Wait for all messages in flight, sends and receives."""
        for action in list(self._sent):
            self.finish_send(action)
        for action in list(self._awaited):
            self.receive(action)

    def finish_after_failure(self, deadline: Deadline) -> None:
        """Wait for all messages in flight, failed or not, and drop their values."""
        waiting = [work for sent in self._sent.values() for work in sent.works]
        waiting += [work for awaited in self._awaited.values() for work in awaited.works]
        if self._is_on_host:
            deadline.wait_despite_errors(waiting)
        else:
            for work in waiting:  # the stream waits, not this thread
                with contextlib.suppress(Exception):  # the cause is known; this peer may be gone
                    work.wait()
        self._sent.clear()
        self._awaited.clear()

    def _post(
        self, do: Callable[..., Work | None], wires: list[Tensor], peer: int, action: Action
    ) -> list[Work]:
        if not wires:
            return []
        is_gradient = action.kind.endswith("B")
        tag = 2 * action.boundary + is_gradient
        if self._messages is not None:
            post = self._messages.send if do is dist.isend else self._messages.receive
            return [post(wire, peer, tag) for wire in wires]
        group = self._gradient_group if is_gradient else self._group
        return dist.batch_isend_irecv(
            [P2POp(do, wire, group=group, tag=tag, group_peer=peer) for wire in wires]
        )

    def _wire(self, tensor: Tensor) -> Tensor:
        """Return the tensor for the backend, on a GPU as flat bytes; its memory is shared."""
        # gloo does not use the dtype.
        return tensor if self._is_on_host else tensor.reshape(-1).view(torch.uint8)


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return, for example, ``float32 (4, 8)``."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def describe_specs(specs: Sequence[ValueSpec]) -> str:
    """Return a description of the values of a boundary."""
    if not specs:
        return "nothing"
    return ", ".join(
        f"{describe_tensor(spec.shape, spec.dtype)}{'' if spec.needs_grad else ' without gradient'}"
        f" ({spec.origin})"
        for spec in specs
    )


@functools.lru_cache(maxsize=1024)
def digest(microbatches: tuple[tuple[ValueSpec, ...], ...]) -> int:
    """Return a hash below 2**32 of the values of a boundary, to compare its two sides.

    Paths of files are left out: they differ between hosts, and of generated code between processes.
    """
    without_files = [
        [replace(spec, origin=spec.origin.partition(" at ")[0]) for spec in each]
        for each in microbatches
    ]
    return zlib.crc32(";".join(map(describe_specs, without_files)).encode())


def check_outputs(
    outputs: Sequence[Tensor],
    specs: Sequence[ValueSpec],
    *,
    stage: int,
    microbatch: int,
    is_differentiated: bool,
) -> None:
    """Refuse outputs other than the next stage expects.

    Args:
        outputs: Outputs of the stage.
        specs: The shapes, dtypes and gradients that the next stage expects.
        stage: The stage.
        microbatch: The microbatch.
        is_differentiated: The outputs have a graph that is differentiated.

    Raises:
        PipelineError: Their number, a shape, a dtype or a gradient differs.
    """
    boundary = (
        f"the boundary from stage {stage} to stage {stage + 1}, in microbatch {microbatch}, awaits"
    )
    if len(outputs) != len(specs):
        raise PipelineError(
            f"Stage {stage} gave {len(outputs)} values, and {boundary} {len(specs)}: "
            f"{describe_specs(specs)}. What a stage hands on may not depend on values of the batch."
        )
    for output, spec in zip(outputs, specs, strict=True):
        if output.shape != spec.shape or output.dtype != spec.dtype:
            raise PipelineError(
                f"Stage {stage} gave {spec.origin} as "
                f"{describe_tensor(output.shape, output.dtype)}, and {boundary} "
                f"{describe_tensor(spec.shape, spec.dtype)}. Shapes and types may depend on those "
                "of the batch, not on its values."
            )
        if output.layout != torch.strided:
            raise PipelineError(
                f"Stage {stage} gave {spec.origin} in the layout {output.layout}, and {boundary} a "
                "dense tensor: make it dense before the boundary."
            )
        if is_differentiated and output.requires_grad and not spec.needs_grad:
            raise PipelineError(
                f"Stage {stage} gave {spec.origin} with a gradient, and {boundary} none for it: it "
                "would be lost. Whether a value is trained may not change within a step."
            )

"""Carries values and gradients between stages on different ranks.

Messages are posted in the order of the schedule and matched in that order between any two ranks,
by NCCL and by gloo alike. Over NCCL every tensor travels as flat bytes, so that any dtype can: it
knows no complex numbers and no 16-bit integers. What has no elements is not sent.

A buffer stays referenced until its message is known to be through. On a GPU waiting is done by
the current stream; buffers that another stream allocated are marked for it.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from boltmesh.errors import PipelineError
from boltmesh.strategies.pipeline.executor.messages import HostMessages
from boltmesh.strategies.pipeline.executor.patience import Patience
from boltmesh.strategies.pipeline.executor.program import Action
from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.strategies.torch_compat import times_written

SENDS_IN_FLIGHT: Final = 8
"""How many messages of a stage that nothing answers may be on their way before the oldest is
waited for: buffers must not pile up, and no peer gains from a sender further ahead than this."""


class _Sent(NamedTuple):
    works: list[Work]
    wires: list[Tensor]
    borrowed: list[tuple[Tensor, int, str]]
    """Values that are sent from where they lie: tensor, times written, origin."""


class _Awaited(NamedTuple):
    works: list[Work]
    values: tuple[Tensor, ...]


class Transport:
    """The messages of one rank.

    Args:
        group: Ranks of the pipeline axis; None where one rank has all stages.
        device: Where values arrive.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._messages = HostMessages(group) if group is not None and self._is_on_host else None
        self._sent: dict[Action, _Sent] = {}
        self._awaited: dict[Action, _Awaited] = {}

    def post_receive(self, action: Action, specs: Sequence[ValueSpec], peer: int) -> None:
        """Make room for values and ask for them; ``receive`` gives them."""
        values = tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs
        )
        wires = [self._wire(value) for value in values if value.numel()]
        self._awaited[action] = _Awaited(self._post(dist.irecv, wires, peer, action), values)

    def awaits(self, action: Action) -> bool:
        """Whether values were asked for and not taken yet."""
        return action in self._awaited

    def receive(self, action: Action) -> tuple[Tensor, ...]:
        """Wait for what ``post_receive`` asked for; the values are the caller's."""
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
        """Send values from where they lie, or from a copy where they have gaps."""
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
        """Wait for a message to be through and let its buffers go; at once if that was done.

        Raises:
            PipelineError: A value was written in place while it was on its way.
        """
        sent = self._sent.pop(action, None)
        if sent is None:
            return
        for work in sent.works:
            work.wait()
        for value, times, origin in sent.borrowed:
            if times_written(value) != times:
                raise PipelineError(
                    f"The {origin} was changed in place while stage {action.stage} was sending it, "
                    f"in microbatch {action.microbatch}. What is handed to another stage has to "
                    "stay as it is until the step ends: give a .clone() of it."
                )

    def limit(self, action: Action) -> None:
        """Wait for the oldest messages of this kind and stage while too many are on their way."""
        same = [each for each in self._sent if (each.stage, each.kind) == action[:2]]
        for each in same[: max(0, len(same) - SENDS_IN_FLIGHT)]:
            self.finish_send(each)

    def finish(self) -> None:
        """Wait for everything that is on its way, received or not."""
        for action in list(self._sent):
            self.finish_send(action)
        for action in list(self._awaited):
            self.receive(action)

    def finish_after_failure(self, patience: Patience) -> None:
        """The same, whatever becomes of each message; values are thrown away."""
        waiting = [work for sent in self._sent.values() for work in sent.works]
        waiting += [work for awaited in self._awaited.values() for work in awaited.works]
        if self._device.type == "cpu":
            patience.wait_for_each(waiting)
        for work in waiting if self._device.type != "cpu" else ():  # which the stream waits for
            with contextlib.suppress(Exception):  # the cause is known; this peer may be gone
                work.wait()
        self._sent.clear()
        self._awaited.clear()

    def _post(
        self, do: Callable[..., Work | None], wires: list[Tensor], peer: int, action: Action
    ) -> list[Work]:
        if not wires:
            return []
        border = action.stage + (action.kind in {"SEND_F", "RECV_B"})
        tag = 2 * border + action.kind.endswith("B")
        if self._messages is not None:
            post = self._messages.send if do is dist.isend else self._messages.receive
            return [post(wire, peer, tag) for wire in wires]
        return dist.batch_isend_irecv(
            [P2POp(do, wire, group=self._group, tag=tag, group_peer=peer) for wire in wires]
        )

    def _wire(self, tensor: Tensor) -> Tensor:
        """Return what is handed to the backend for a contiguous tensor: its memory."""
        # gloo asks for no dtype.
        return tensor if self._is_on_host else tensor.reshape(-1).view(torch.uint8)

"""The gradients of a bucket: taken from the device as they arrive, kept until its step."""

import torch
from torch import Tensor

from boltmesh.strategies.grad_norm import tensor_norm
from boltmesh.strategies.offload.buckets import Bucket, BucketChunk, Slot
from boltmesh.strategies.offload.streams import CopyStream
from boltmesh.strategies.offload.update_rule import PieceGradient
from boltmesh.strategies.torch_compat.tensors import event_on_stream


class BucketGradients:
    """What has arrived for one step of one bucket.

    On the CPU gradients stay where FSDP2 made them. From an accelerator they are copied to
    ``host``, laid out as the bucket is, and their norm is computed before they leave.

    Args:
        bucket: Whose they are.
        device: Where they arrive.
        host: Flat memory for a copy, None on the CPU.
        lane: Where copies run.
    """

    def __init__(
        self, bucket: Bucket, device: torch.device, host: Tensor | None, lane: CopyStream
    ) -> None:
        self.bucket = bucket
        self._device = device
        self._host = host
        self._lane = lane
        self._held: dict[Slot, Tensor] = {}
        self._copied: torch.Event | None = None
        self._norms: Tensor | None = None
        self._square: float | None = None
        self._is_sent = False
        self._is_on_host = False
        self.num_arrivals = 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The parameters that have a gradient."""
        return tuple(slot for slot in self.bucket.slots if slot in self._held)

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Take this rank's shard of a gradient; a second one of the same parameter is added."""
        self.num_arrivals += 1
        self._square = self._norms = None
        self._is_sent = False
        gradient = gradient.detach().reshape(-1)
        if self._is_on_host:
            gradient = gradient.cpu()  # as those that it joins
        before = self._held.get(slot)
        self._held[slot] = gradient if before is None else before.add_(gradient)

    def send(self) -> None:
        """Begin what has to happen on the device: the norm, and the copy to the host.

        Once for what has arrived: the worker may be reading what the first call has begun.
        """
        if self._device.type == "cpu" or not self._held or self._is_sent:
            return
        self._is_sent = True
        submitted = event_on_stream(self._device)
        with self._lane.after(submitted):
            norms = torch.stack([tensor_norm(each) for each in self.tensors()])
            self._norms = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
            self._norms.copy_(norms, non_blocking=True)
            if self._host is not None and any(c.place != "device" for c in self.bucket.chunks):
                num_bytes = sum(each.nbytes for each in self._held.values())
                with self._lane.meter.copy("write", num_bytes):
                    for slot, gradient in self._held.items():
                        into = self._host[slot.offset : slot.offset + slot.numel]
                        into.copy_(gradient, non_blocking=True)
            self._copied = event_on_stream(self._device)

    def wait(self) -> None:
        """Return when the copies to the host are done."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
            if all(chunk.place != "device" for chunk in self.bucket.chunks):
                self._held = {slot: self._on_host(slot) for slot in self._held}
                self._is_on_host = True

    def square(self) -> float:
        """The sum of squares of what this rank counts. It is computed where the gradients are."""
        if self._square is None:
            if self._norms is not None:
                self.wait()
                norms = self._norms
            else:
                norms = torch.stack([tensor_norm(each) for each in self.tensors()])
            self._square = float(norms.double().square().sum())
        return self._square

    def tensors(self) -> list[Tensor]:
        """What this rank counts of the gradients, flat, as few tensors as they lie in.

        Neighbours in one storage are one tensor: what is between them is zero.
        """
        merged: list[Tensor] = []
        expected = -1
        for slot in self.slots:
            gradient = self._held[slot]
            if not gradient.numel() or not slot.is_counted:
                continue
            here = int(gradient.storage_offset())
            if merged and _is_same_storage(merged[-1], gradient) and here == expected:
                start = int(merged[-1].storage_offset())
                numel = here + gradient.numel() - start
                merged[-1] = merged[-1].as_strided((numel,), (1,), start)
            else:
                merged.append(gradient)
            expected = here + slot.padded_numel
        return merged or [torch.zeros(1, device=self._device)]

    def held(self) -> list[Tensor]:
        """The tensors that hold them."""
        return list(self._held.values())

    def pieces(self, chunk: BucketChunk) -> list[PieceGradient]:
        """The gradients of a chunk, on the device of its state."""
        found = []
        for piece in chunk.pieces():
            slot = piece.slot
            if slot in self._held:
                on_host = chunk.place != "device" and self._host is not None
                whole = self._on_host(slot) if on_host else self._held[slot]
                part = whole[piece.start - slot.offset : piece.stop - slot.offset]
                found.append(PieceGradient(piece, part))
        return found

    def _on_host(self, slot: Slot) -> Tensor:
        assert self._host is not None
        return self._host[slot.offset : slot.offset + slot.numel]


def _is_same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()

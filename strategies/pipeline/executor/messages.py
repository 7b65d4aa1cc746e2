"""Messages between the ranks of a pipeline over the CPU, posted at the group's backend itself.

torch's functions pass its dispatcher, where telemetry looks on from a kernel in Python. A step of a
pipeline has two messages a chunk, and each would take longer there than all else that is recorded
of the chunk. So they go past it, and telemetry is told of them here.
"""

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from boltmesh.strategies.torch_compat import host_backend
from boltmesh.telemetry.recording.torch_compat import COLLECTIVES


class HostMessages:
    """Sends and receives between any two ranks of a group, matched by their order for each tag.

    Args:
        group: With a backend for the CPU.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._backend = host_backend(group)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send a contiguous tensor, of whatever type; returns at once.

        Args:
            tensor: Has to stay as it is until the work is waited for.
            peer: Within the group.
            tag: Told apart by it.
        """
        COLLECTIVES.note_message("send", self._group, tensor.nbytes, peer)
        return self._backend.send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Receive into a contiguous tensor; it is there once the work was waited for."""
        COLLECTIVES.note_message("recv", self._group, tensor.nbytes, peer)
        return self._backend.recv([tensor], peer, tag)

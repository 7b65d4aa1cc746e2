"""Messages between stages that a backend cannot carry are refused."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.runtime.p2p import StageTransport


def test_gloo_between_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take an address on the device for one in the host's memory."""
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    group = ProcessGroup(HashStore(), 0, 1)
    with pytest.raises(ConfigError, match=r"'gloo' cannot send tensors of cuda:0 .* Leave "):
        StageTransport(group, torch.device("cuda", 0))
    StageTransport(None, torch.device("cuda", 0))

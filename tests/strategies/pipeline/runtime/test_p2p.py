"""Messages between stages on GPUs: which communicator carries them, and which are refused."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from boltmesh.errors import ConfigError
from boltmesh.schedule_sim import Action
from boltmesh.strategies.pipeline.runtime import p2p
from boltmesh.strategies.pipeline.runtime.p2p import StageTransport, digest
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec


def test_gloo_between_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take an address on the device for one in the host's memory."""
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    group = ProcessGroup(HashStore(), 0, 1)
    with pytest.raises(ConfigError, match=r"'gloo' cannot send tensors of cuda:0 .* Leave "):
        StageTransport(group, torch.device("cuda", 0))
    StageTransport(None, torch.device("cuda", 0))


def test_between_gpus_values_and_gradients_have_communicators_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[Any] = []

    def post(messages: list[Any]) -> list[Any]:
        posted.extend(each.group for each in messages)
        return [Mock()]

    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist, "batch_isend_irecv", post)
    monkeypatch.setattr(p2p, "P2POp", lambda do, wire, group, **_: Mock(group=group))
    values, gradients = (ProcessGroup(HashStore(), 0, 1) for _ in range(2))
    transport = StageTransport(values, torch.device("meta"), gradients)
    spec = ValueSpec((2,), torch.float32, needs_grad=True, origin="value")
    for kind in ("RECV_F", "RECV_B"):
        transport.post_receive(Action(1, kind, 0), [spec], 0)
    for kind in ("SEND_F", "SEND_B"):
        transport.send(Action(1, kind, 0), [torch.empty(2, device="meta")], ["value"], 0)
    assert posted == [values, gradients, values, gradients]


def test_ranks_on_which_the_code_of_a_layer_lies_in_other_files_agree_on_a_boundary() -> None:
    """``Sequential`` of torch-geometric writes its forward to a file of each process."""

    def of(origin: str) -> int:
        return digest(((ValueSpec((2,), torch.float32, needs_grad=True, origin=origin),),))

    assert of("relu at /tmp/Sequential_qiw36v6n.py:18") == of("relu at /tmp/Sequential_rqln.py:18")
    assert of("relu at /tmp/Sequential_qiw36v6n.py:18") != of("view at /tmp/Sequential_qiw3.py:18")

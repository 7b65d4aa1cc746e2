"""Groups of trials are given back as far as nothing has to wait for it."""

from typing import Any

import pytest
import torch.distributed as dist

from boltmesh.strategies.torch_compat import communication
from boltmesh.strategies.torch_compat.communication import destroy_group


@pytest.mark.parametrize(
    ("backend", "is_idle", "done"),
    [
        ("nccl", True, ["destroyed"]),
        ("nccl", False, ["aborted"]),
        ("gloo", True, ["destroyed"]),
        ("gloo", False, []),  # its threads wait for messages that are under way
    ],
)
def test_a_group_with_messages_under_way_is_aborted_on_gpus_alone(
    backend: str, is_idle: bool, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = object()
    found: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda each: found.append("destroyed"))
    monkeypatch.setattr(communication, "_abort_process_group", lambda each: found.append("aborted"))
    destroy_group(group, is_idle=is_idle)
    assert found == done

"""Copies through two buffers give every byte, and fill no buffer that is not emptied yet."""

from typing import Any

import pytest
import torch

from boltmesh.strategies.checkpoint import async_save
from boltmesh.strategies.checkpoint.async_save import StagedCopies


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 16, 23, 40])
def test_every_byte_arrives(num_bytes: int) -> None:
    source = torch.arange(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    StagedCopies(8).copy_bytes(source, target)
    assert torch.equal(source, target)


def test_a_buffer_is_emptied_when_its_copy_has_passed_and_before_it_is_filled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []

    class FakeEvent:
        """Puts the bytes into the buffer when it is waited for, as a device would by then."""

        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            log.append(("awaited", self.number))

    def event(_: torch.device) -> FakeEvent:
        made = FakeEvent(sum(kind == "copied" for kind, _ in log))
        log.append(("copied", made.number))
        return made

    monkeypatch.setattr(async_save, "event_on_stream", event)
    source = torch.arange(32, dtype=torch.uint8)
    target = torch.zeros_like(source)
    StagedCopies(8).copy_bytes(source, target)
    assert torch.equal(source, target)
    order = [("copied", 0), ("copied", 1), ("awaited", 0), ("copied", 2), ("awaited", 1)]
    assert log == [*order, ("copied", 3), ("awaited", 2), ("awaited", 3)]

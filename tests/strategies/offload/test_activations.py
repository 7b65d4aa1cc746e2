"""Activation offload: what leaves the device, what comes back, and when memory is free."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from boltmesh.strategies.offload import activations

WIDTH = 32


class Block(nn.Module):
    """Draws dropout, so that an input that came back changed would show, and a repeated draw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.first(x)) * mask
        if context is not None:
            hidden = hidden + context
        return x + self.dropout(self.last(hidden))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.after: Any = None

    def forward(self, x: Tensor, mask: Tensor, *, has_context: bool = False) -> Tensor:
        x = self.start(x)
        context = torch.sin(x) if has_context else None
        for block in self.blocks:
            x = block(x, mask, context)
            if self.after is not None:
                self.after(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 1)


@pytest.fixture(params=["host", "disk"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> bool | Path:
    return True if request.param == "host" else tmp_path


def gradients(model: Stack, **options: bool) -> list[Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    model(torch.randn(8, 4, WIDTH), torch.ones(8, 4, 1), **options).backward()
    return [each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("has_context", [False, True])
def test_gradients_equal_those_without_offload_to_the_bit(
    offload: bool | Path, kind: Any, has_context: bool
) -> None:
    torch.manual_seed(0)
    model = Stack()
    expected = gradients(model, has_context=has_context)
    recomputed = ActivationCheckpointing(kind, offload)
    recomputed.put_on(model)
    for _ in range(3):
        found = gradients(model, has_context=has_context)
        assert all(map(torch.equal, found, expected))
    recomputed.take_off()
    assert all(map(torch.equal, gradients(model, has_context=has_context), expected))


def test_the_two_newest_inputs_stay_and_the_others_are_freed(offload: bool | Path) -> None:
    model = Stack()
    recomputed = ActivationCheckpointing("full", offload)
    recomputed.put_on(model)
    outputs: list[StorageWeakRef] = []
    model.after = lambda x: outputs.append(StorageWeakRef(x.untyped_storage()))
    loss = model(torch.randn(8, 4, WIDTH), torch.ones(8, 4, 1))
    # The output of block n is the input of the next one; the loss keeps the last.
    assert [each.expired() for each in outputs] == [True, True, True, False, False, False]
    loss.backward()


def test_memory_is_taken_once_and_given_back(offload: bool | Path) -> None:
    model = Stack()
    recomputed = ActivationCheckpointing("full", offload)
    recomputed.put_on(model)
    taken = set()
    for _ in range(3):
        gradients(model)
        space = recomputed.offload and recomputed.offload.space
        assert space is not None
        taken.add((space.host_bytes, space.disk_bytes))
    ((host_bytes, disk_bytes),) = taken
    num_bytes = 8 * 4 * WIDTH * 4  # one page
    assert disk_bytes == (0 if offload is True else 4 * num_bytes)
    assert host_bytes == 6 * num_bytes if offload is True else host_bytes <= 5 * num_bytes
    recomputed.take_off()
    assert recomputed.offload is None
    assert offload is True or not any(offload.iterdir())


def test_a_second_backward_pass_reads_again(offload: bool | Path) -> None:
    model = Stack()
    recomputed = ActivationCheckpointing("full", offload)
    recomputed.put_on(model)
    loss = model(torch.randn(8, 4, WIDTH), torch.ones(8, 4, 1))
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))


def test_graphs_of_two_microbatches_end_in_any_order(offload: bool | Path) -> None:
    torch.manual_seed(0)
    model = Stack()
    batches = [torch.randn(8, 4, WIDTH) for _ in range(3)]
    mask = torch.ones(8, 4, 1)
    model.eval()

    def train(order: list[int]) -> list[Tensor]:
        model.zero_grad()
        losses = [model(each, mask) for each in batches]
        for number in order:
            losses[number].backward()
        return [each.grad.clone() for each in model.parameters()]

    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        expected = train(order)
        recomputed = ActivationCheckpointing("full", offload)
        recomputed.put_on(model)
        assert all(map(torch.equal, train(order), expected))
        recomputed.take_off()


def test_an_input_that_is_written_to_is_refused(offload: bool | Path) -> None:
    model = Stack()
    recomputed = ActivationCheckpointing("full", offload)
    recomputed.put_on(model)
    inputs: list[Tensor] = []

    def write(output: Tensor) -> None:
        inputs.append(output)
        if len(inputs) > 1:
            inputs[-2].detach().add_(1.0)

    model.after = write
    with pytest.raises(UnsupportedError, match="modified in place"):
        model(torch.randn(8, 4, WIDTH), torch.ones(8, 4, 1)).backward()


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 1 << 20)
    model = Stack()
    recomputed = ActivationCheckpointing("full", True)
    recomputed.put_on(model)
    gradients(model)
    assert recomputed.offload is not None
    assert recomputed.offload.space is None


def test_offload_without_recomputation_and_a_folder_that_is_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="activation_checkpointing='full'"):
        ActivationCheckpointing(None, True)
    with pytest.raises(ConfigError, match="is no folder"):
        ActivationCheckpointing("full", "/no/such/folder")

"""Sequences are packed and padded on tensors without data as torch does it on others."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from boltmesh.strategies.torch_compat.tensors import (
    FakePackedSequences,
    _pack,
    _pad,
    fake_tensors,
    is_fake,
    make_fake,
)

LENGTHS = torch.tensor([2, 5, 1, 5])


@pytest.mark.parametrize("batch_first", [True, False])
def test_values_are_those_of_torch(batch_first: bool) -> None:
    padded = torch.randn(4, 6, 3) if batch_first else torch.randn(6, 4, 3)
    lengths = LENGTHS.sort(descending=True).values
    wanted = pack_padded_sequence(padded, lengths, batch_first=batch_first)
    packed, sizes = _pack(padded, lengths, batch_first)
    assert torch.equal(packed, wanted.data)
    assert torch.equal(sizes, wanted.batch_sizes)
    for total in (None, 7):
        whole, lengths_again = pad_packed_sequence(
            wanted, batch_first=batch_first, padding_value=0.5, total_length=total
        )
        found, found_lengths = _pad(packed, sizes, batch_first, 0.5, total or 5)
        assert torch.equal(found, whole)
        assert torch.equal(found_lengths, lengths_again)


@pytest.mark.parametrize("total", [None, 6])
def test_fake_tensors_are_packed_run_and_padded(total: int | None) -> None:
    mode = fake_tensors()
    layer = torch.nn.GRU(3, 4, batch_first=True).requires_grad_(False)
    whole = torch.randn(4, 6, 3)
    wanted, _ = pad_packed_sequence(
        layer(pack_padded_sequence(whole, LENGTHS, batch_first=True, enforce_sorted=False))[0],
        batch_first=True,
        total_length=total,
    )
    fake = make_fake(whole, mode)
    with FakePackedSequences():
        packed = pack_padded_sequence(fake, LENGTHS, batch_first=True, enforce_sorted=False)
        assert isinstance(packed, PackedSequence)
        given, lengths = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=total)
    assert is_fake(given)
    assert given.shape == wanted.shape
    assert torch.equal(lengths, LENGTHS)

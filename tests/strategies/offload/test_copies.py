"""Stepped parameters reach the stores that are gathered from, padding included."""

from unittest.mock import create_autospec

import torch
from torch.nn import Parameter

from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.memory_stores import ParameterCopies
from boltmesh.strategies.offload.store_api import ParameterStore
from boltmesh.strategies.offload.update_rule import PieceGradient


def test_a_shard_whose_padding_alone_reaches_into_the_next_chunk_is_put_whole() -> None:
    slot = Slot(0, "weight", Parameter(torch.zeros(())), (4, 3), (5, 3), torch.float32)
    bucket = Bucket("unit", [slot])
    bucket.cut(0, 12)
    first, second = bucket.chunks
    assert (first.stop, second.stop) == (12, 15)
    assert not list(second.pieces())
    store = create_autospec(ParameterStore, instance=True)
    copies = ParameterCopies()
    copies.stores[slot] = store
    values = torch.arange(12.0)
    copies.update(first, values, [PieceGradient(each, values) for each in first.pieces()])
    index, whole = store.put.call_args.args
    assert index == 0
    assert torch.equal(whole, torch.cat([values, torch.zeros(3)]))

"""Slots and chunks cover a bucket, whatever the sizes."""

import random

import torch
from torch.nn import Parameter

from boltmesh.strategies.offload.buckets import Bucket, Slot


def bucket_of(shapes: list[tuple[int, int]], columns: int = 3) -> Bucket:
    """A bucket of parameters with so many rows, of which the shard is padded to so many."""
    nothing = Parameter(torch.zeros(()))
    slots = [
        Slot(i, f"p{i}", nothing, (rows, columns), (padded, columns), torch.float32)
        for i, (rows, padded) in enumerate(shapes)
    ]
    return Bucket("unit", slots)


def random_buckets() -> list[Bucket]:
    generator = random.Random(0)
    buckets = []
    for _ in range(300):
        shapes = []
        for _ in range(generator.randint(1, 9)):
            padded = generator.randint(1, 40)
            shapes.append((generator.randint(0, padded), padded))
        bucket = bucket_of(shapes)
        bucket.cut(5, generator.randint(1, 90))
        buckets.append(bucket)
    return buckets


def test_chunks_cover_a_bucket_once_and_in_order() -> None:
    for bucket in random_buckets():
        assert bucket.chunks[0].start == 0
        assert bucket.chunks[-1].stop == bucket.numel
        for i, chunk in enumerate(bucket.chunks):
            assert chunk.number == 5 + i
            assert chunk.numel > 0
            if i:
                assert chunk.start == bucket.chunks[i - 1].stop


def test_chunks_are_no_larger_than_asked() -> None:
    bucket = bucket_of([(40, 40), (1, 1), (13, 14)])
    bucket.cut(0, 30)
    assert max(chunk.numel for chunk in bucket.chunks) <= 30


def test_a_parameter_that_fits_into_a_chunk_is_in_one() -> None:
    generator = random.Random(1)
    for _ in range(200):
        bucket = bucket_of([(n, n) for n in [generator.randint(1, 30) for _ in range(8)]])
        bucket.cut(0, 90)
        assert all(len(bucket.chunks_of(slot)) == 1 for slot in bucket.slots)


def test_pieces_are_each_element_of_each_parameter_once_and_no_padding() -> None:
    for bucket in random_buckets():
        seen = torch.zeros(bucket.numel, dtype=torch.int64)
        for chunk in bucket.chunks:
            for piece in chunk.pieces():
                assert chunk.start <= piece.start < piece.stop <= chunk.stop
                seen[piece.start : piece.stop] += 1
                assert chunk in bucket.chunks_of(piece.slot)
        wanted = torch.zeros(bucket.numel, dtype=torch.int64)
        for slot in bucket.slots:
            wanted[slot.offset : slot.offset + slot.numel] = 1
        assert torch.equal(seen, wanted)

"""The stand-in of a fused projection, against the whole projection's own answers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from boltmesh.strategies.tensor.plan import Section, ShardedParameter
from boltmesh.strategies.tensor.runtime.fused_output import FusedOutput, as_whole
from boltmesh.strategies.tensor.runtime.param_swap import shard_of
from tests.support.ranks import run_ranks
from tests.support.tensor_runs import world

pytestmark = pytest.mark.ranks

QKV = (Section(1, 4, 3), Section(1, 2, 3), Section(1, 2, 3))
EQUAL = (Section(1, 4, 3),) * 3
ROWS_OF_HEADS = (Section(3, 4, 2),)

ANSWERS: list[tuple[tuple[Section, ...], Callable[[Any], Any]]] = [
    (QKV, lambda x: x.split([12, 6, 6], dim=-1)),
    (QKV, lambda x: torch.split(x, [12, 6, 6], 2)),
    (QKV, lambda x: [x[..., :12], x[:, :, 12:18], x[..., 18:]]),
    (QKV, lambda x: x.split([12, 12], -1)[1].split(6, -1)),
    (QKV, lambda x: [x.narrow(-1, 12, 6)]),
    (QKV, lambda x: x.float().contiguous().clamp(-1, 1).to(torch.float64).split([12, 6, 6], -1)),
    (EQUAL, lambda x: x.chunk(3, -1)),
    (EQUAL, lambda x: torch.chunk(x, 3, dim=2)),
    (EQUAL, lambda x: x.split(12, 2)),
    (ROWS_OF_HEADS, lambda x: [x.view(2, 5, 3, 4, 2)]),
    (ROWS_OF_HEADS, lambda x: [x.reshape(10, 3, 4, 2)]),
    (ROWS_OF_HEADS, lambda x: [x.view((2, -1, 3, 4, 2))]),
    (ROWS_OF_HEADS, lambda x: [x.unflatten(-1, (3, 4, 2))]),
    (ROWS_OF_HEADS, lambda x: [torch.reshape(x, (2, 5, 3, 8))]),
    (ROWS_OF_HEADS, lambda x: x.view(2, 5, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)),
    ((Section(1, 4, 3),), lambda x: [x.view(2, 5, 4, 3)]),
]
REFUSALS: list[tuple[tuple[Section, ...], Callable[[Any], Any], str]] = [
    (QKV, lambda x: x.split(8, -1), "a piece from 0 to 8"),
    (QKV, lambda x: x[..., 3:12], "a piece from 3 to 12"),
    (QKV, lambda x: x[..., ::2], "the index"),
    (QKV, lambda x: x[0], "the index"),
    (QKV, lambda x: x.split(1, 0), "along dimension 0"),
    (QKV, lambda x: x.view(2, 5, 8, 3), "a view as"),
    (QKV, lambda x: x.sum(), "sum"),
    (QKV, lambda x: torch.relu(x), "'relu'"),
    (ROWS_OF_HEADS, lambda x: x.view(2, 5, 12, 2), "a view as"),
]


def _of(sections: tuple[Section, ...]) -> tuple[Tensor, Any]:
    length = sum(each.length for each in sections)
    whole = torch.randn(2, 5, length, generator=torch.Generator().manual_seed(0)).double()
    entry = ShardedParameter("x", ("x",), (2, 5, length), 2, sections, "column", 0)
    group = world()
    part = shard_of(whole, entry, size=group.size, rank=group.rank).requires_grad_()
    return whole.requires_grad_(), as_whole(part, sections, group)


def _answers(rank: int, world_size: int) -> int:
    for number, (sections, ask) in enumerate(ANSWERS):
        whole, stand_in = _of(sections)
        assert isinstance(stand_in, (FusedOutput, DTensor))
        assert stand_in.shape == whole.shape
        assert stand_in.size(-1) == whole.size(-1)
        assert (stand_in.ndim, stand_in.dim(), stand_in.dtype) == (3, 3, whole.dtype)
        for mine, expected in zip(ask(stand_in), ask(whole), strict=True):
            assert mine.shape == expected.shape, number
            assert torch.equal(mine.full_tensor(), expected), number
    for number, (sections, ask, words) in enumerate(REFUSALS):
        _, stand_in = _of(sections)
        with pytest.raises((NotImplementedError, AttributeError), match=words):
            ask(stand_in)
        assert number < len(REFUSALS)
    return len(ANSWERS)


def test_a_fused_projection_is_taken_apart_at_its_sections_and_nowhere_else() -> None:
    assert run_ranks(_answers, 2) == [len(ANSWERS)] * 2

"""A sequence of any length is divided and joined with the gradients of the whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.sequence import SequenceParts
from tests.support.ranks import run_ranks
from tests.support.vocabularies import counted_messages, tensor_group

pytestmark = pytest.mark.ranks

B, C = 2, 3


def _tokenwise(x: Tensor, scale: Tensor) -> Tensor:
    """A norm that has no gradient at zero: copies of a position keep it away from there."""
    return x / x.norm(dim=-1, keepdim=True) * scale


def _across(x: Tensor, heads: Tensor) -> Tensor:
    """Every position sees every other; a rank's part of a sum over heads."""
    return torch.stack([(x @ x.transpose(1, 2) * head).softmax(-1) @ x for head in heads]).sum(0)


def _planned(
    x: Tensor, scale: Tensor, heads: Tensor, parts: SequenceParts, group: TensorGroup
) -> Tensor:
    own = heads.chunk(group.size)[group.rank]
    part = parts.split(x)
    part = part + parts.scatter(_across(parts.gather(_tokenwise(part, scale)), own))
    part = part + parts.scatter(_across(parts.gather(_tokenwise(part, scale)), own))
    parts.forget()
    return parts.join(part)


def _whole(x: Tensor, scale: Tensor, heads: Tensor) -> Tensor:
    x = x + _across(_tokenwise(x, scale), heads)
    return x + _across(_tokenwise(x, scale), heads)


def _made(length: int) -> list[Tensor]:
    torch.manual_seed(length)
    values = [torch.randn(B, length, C), torch.randn(C), torch.randn(4)]
    return [each.requires_grad_() for each in values]


def _compare(length: int, parts: SequenceParts, group: TensorGroup) -> None:
    mine, theirs = _made(length), _made(length)
    weights = torch.linspace(1, 2, B * length * C).view(B, length, C)
    x, scale, heads = mine
    found, expected = _planned(x, scale, heads, parts, group), _whole(*theirs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    x_, scale_, heads_ = theirs
    assert x.grad is not None
    assert scale.grad is not None
    assert heads.grad is not None
    torch.testing.assert_close(x.grad, x_.grad, rtol=1e-4, atol=1e-5)
    # A norm's weight meets a part of the positions, heads are those of this rank: partial.
    for grad, grad_ in ((scale.grad, scale_.grad), (heads.grad, heads_.grad)):
        dist.all_reduce(grad, group=group.process_group)
        torch.testing.assert_close(grad, grad_, rtol=1e-4, atol=1e-5)


def _lengths(rank: int, size: int) -> None:
    group = tensor_group()
    parts = SequenceParts(group, 1)
    for length in (8, 7, 5, 4, 3, 2, 1, 13):
        _compare(length, parts, group)


@pytest.mark.sample("2")
@pytest.mark.parametrize("size", [2, 4])
def test_every_length_gives_the_numbers_of_the_whole(size: int) -> None:
    run_ranks(_lengths, size)


def _traffic(rank: int, size: int, length: int) -> list[tuple[str, int]]:
    x, scale, heads = _made(length)
    parts = SequenceParts(tensor_group(), 1)
    with counted_messages() as messages:
        part = parts.split(x)
        normed = _tokenwise(part, scale)
        whole = parts.gather(normed)
        assert parts.gather(normed) is whole  # what several take is gathered once
        part = part + parts.scatter(_across(whole, heads))
        parts.forget()
        parts.join(part).sum().backward()
    return messages.sent


@pytest.mark.full
@pytest.mark.parametrize("length", [8, 7])
def test_ranks_exchange_what_is_stated_and_no_more(length: int) -> None:
    whole = 4 * B * 8 * C
    names = ["gather", "scatter", "gather", "gather", "scatter", "gather"]
    for sent in run_ranks(_traffic, 2, length):
        assert [size for _, size in sent] == [whole] * 6
        assert ["gather" if "gather" in name else "scatter" for name, _ in sent] == names


def _again(rank: int, size: int, is_reentrant: bool) -> None:
    """Two sequences wait for their backward passes while blocks are computed again."""
    group = tensor_group()
    parts = SequenceParts(group, 1)

    def run(values: list[Tensor]) -> Any:
        x, scale, heads = values
        own = heads.chunk(size)[rank]

        def block(part: Tensor) -> Tensor:
            parts.begin()
            result = part + parts.scatter(_across(parts.gather(_tokenwise(part, scale)), own))
            parts.forget()
            return result

        return parts.join(checkpoint(block, parts.split(x), use_reentrant=is_reentrant)).sum()

    longer, shorter = _made(9), _made(6)
    total = run(longer) + run(shorter)
    total.backward()
    for length, values in ((9, longer), (6, shorter)):
        x, scale, heads = _made(length)
        (x + _across(_tokenwise(x, scale), heads)).sum().backward()
        torch.testing.assert_close(values[0].grad, x.grad, rtol=1e-4, atol=1e-5)
    # One after the other, with a backward pass between, each has its length to itself, also where
    # its loss is kept.
    kept = []
    for length in (8, 7, 8):
        kept.append(run(_made(length)))
        kept[-1].backward()
    first, second = run(_made(8)), run(_made(7))
    with pytest.raises(LayoutError, match=r"\[7, 8\] whose parts are equally long"):
        (first + second).backward()


@pytest.mark.sample("True")
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_blocks_computed_again_know_their_length_or_refuse(is_reentrant: bool) -> None:
    run_ranks(_again, 2, is_reentrant)


def _other_shape(rank: int, size: int) -> None:
    parts = SequenceParts(tensor_group(), 1)
    part = parts.split(torch.randn(B, 9, C))
    with pytest.raises(LayoutError, match="entered with sequences of"):
        parts.gather(part.flatten(0, 1)[None])


@pytest.mark.full
def test_an_activation_that_is_no_part_of_the_sequence_is_refused() -> None:
    run_ranks(_other_shape, 2)


def _subgroups(rank: int, size: int, rows: list[list[int]]) -> None:
    groups = [dist.new_group(row) for row in rows]
    own = next(i for i, row in enumerate(rows) if rank in row)
    group = TensorGroup(groups[own], torch.device("cpu"))
    # Replicas see different lengths: a message over the wrong ranks would not even fit.
    _compare([5, 8][own], SequenceParts(group, 1), group)


@pytest.mark.full
@pytest.mark.parametrize("rows", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_only_ranks_of_the_group_exchange_parts(rows: list[list[int]]) -> None:
    run_ranks(_subgroups, 4, rows)

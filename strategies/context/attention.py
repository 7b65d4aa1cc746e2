"""Attention over a cut sequence: fetch keys, swap heads for positions, or pass keys round.

Every rank has whole masks, so each can compute which keys the queries of every rank see, and the
bytes of each way. All ranks choose the one with the fewest bytes over all ranks. Shapes: queries
``(B, H, S, D)``, keys and values with perhaps fewer heads and other lengths; ``s`` of S on a rank.

Sources: gathered keys, Llama 3, Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783; heads,
DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509; ring attention, Liu et al.
2023, https://arxiv.org/abs/2310.01889
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.context.exchange import fetch, swap_to_heads, swap_to_positions
from boltmesh.strategies.context.positions import (
    Intervals,
    Positions,
    common,
    merged,
    num_positions,
    places,
)
from boltmesh.strategies.context.ring import ring_attention
from boltmesh.strategies.context.rules import cut_rule, named
from boltmesh.strategies.context.seq_shard import (
    ContextState,
    SeqShard,
    make_whole,
    taken_along,
)
from boltmesh.strategies.torch_compat.tensors import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    subclasses_asked,
    subclasses_unasked,
)

MOST_STRETCHES = 64
"""If a mask shows more pieces of keys, they are fetched from the first to the last one."""


@cut_rule("scaled_dot_product_attention")
def attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attend with cut queries; for whole queries with cut keys, the keys are gathered."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options: dict[str, Any] = {"enable_gqa": False, **named(names, args, kwargs)}
    query, key, value = (options.pop(each) for each in names[:3])
    mask = make_whole(options.pop("attn_mask", None), "a mask of attention")
    is_causal = bool(options.pop("is_causal", False))
    if mask is not None and type(mask) is not Tensor:
        raise UnsupportedError(
            f"attention with a mask of class {type(mask).__name__} cannot be divided over the "
            f"sequence. Use is_causal=True, or a mask that is a plain tensor."
        )
    if not isinstance(query, SeqShard) or not is_at_place(query):
        whole = [make_whole(each, "keys of attention") for each in (query, key, value)]
        return func(*whole, attn_mask=mask, is_causal=is_causal, **options)
    if is_causal and mask is not None:
        raise ValueError("attn_mask and is_causal=True cannot be given together")
    state = query.state
    draws = options.get("dropout_p", 0.0) > 0.0
    with state.draws.own(everywhere=True) if draws else nullcontext():
        local = _Attention(query, key, value, mask, is_causal, options).run()
    return query.like(local)


def is_at_place(value: Any) -> bool:
    """Whether an operand of attention is cut along S, its last dim but one."""
    return isinstance(value, SeqShard) and value.seq_dim == value.ndim - 2 and value.is_simple


def fetch_keys(key: SeqShard, value: SeqShard, wants: Sequence[Intervals]) -> tuple[Tensor, Tensor]:
    """Return the keys and values that this rank wants, ``(..., wanted, D)``. Collective.

    Args:
        key: Cut keys, ``(..., S, D)``.
        value: Cut values with the same positions.
        wants: Positions that each rank wants.
    """
    both = torch.cat([key.local, value.local], -1)
    fetched = fetch(both, both.ndim - 2, key.positions, wants, key.state.group, "keys")
    keys, values = fetched.split([key.shape[-1], value.shape[-1]], -1)  # type: ignore[no-untyped-call]
    return keys, values


class _Attention:
    """One call of attention."""

    def __init__(
        self,
        query: SeqShard,
        key: Any,
        value: Any,
        mask: Tensor | None,
        is_causal: bool,
        options: dict[str, Any],
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.mask, self.is_causal, self.options = mask, is_causal, options
        self.state: ContextState = query.state
        self.group = self.state.group

    def run(self) -> Tensor:
        """Return this rank's positions of the output, ``(..., s, D of values)``."""
        key, value = self.key, self.value
        if (
            not (is_at_place(key) and is_at_place(value))
            or key.positions.parts != value.positions.parts
            or key.shape[:-1] != value.shape[:-1]
        ):
            keys, values = make_whole(key, "keys of attention"), make_whole(value, "values")
            with subclasses_unasked():
                return self._rows(keys, values, merged([(0, keys.shape[-2])]))
        way, wants = self._way()
        with subclasses_unasked():
            if way == "heads":
                return self._by_heads()
            if way == "ring":
                return self._by_ring()
            return self._by_keys(wants)

    def _way(self) -> tuple[str, Sequence[Intervals]]:
        """Choose a way, and return the keys that each rank wants. The same on all ranks."""
        asked = self.state.attention
        wants = self._wants()
        ways = {"keys": self.bytes_of_keys(wants)}
        if self._can_swap:
            ways["heads"] = self.bytes_of_heads()
        if asked == "ring" and self._can_ring:
            return "ring", wants
        if asked in ways:
            return asked, wants
        return min(ways, key=lambda way: ways[way]), wants

    @property
    def _can_swap(self) -> bool:
        query, key = self.query, self.key
        return (
            query.ndim == 4
            and query.shape[1] >= self.group.size
            and query.shape[1] % key.shape[1] == 0
            and key.shape[0] == query.shape[0]
            and query.positions.parts == key.positions.parts
            and (
                self.mask is None or self.mask.ndim < 4 or self.mask.shape[1] in (1, query.shape[1])
            )
            and (self.mask is None or self.mask.ndim != 3)
        )

    @property
    def _can_ring(self) -> bool:
        query, key = self.query, self.key
        return (
            query.ndim == 4
            and query.shape[1] % key.shape[1] == 0
            and query.shape[-1] == self.value.shape[-1]
            and key.shape[0] == query.shape[0]
            and not self.options.get("dropout_p")
            and (self.mask is None or (self.mask.dtype == torch.bool and self.mask.ndim != 3))
        )

    def bytes_of_keys(self, wants: Sequence[Intervals]) -> int:
        """Return the bytes that all ranks send in the forward pass by fetching keys."""
        key, value = self.key, self.value
        row: int = key.shape[:-2].numel() * (key.shape[-1] + value.shape[-1]) * key.element_size()
        ranks = range(self.group.size)
        parts = key.positions.parts
        pairs = ((r, s) for r in ranks for s in ranks if r != s)
        return sum(num_positions(common(parts[r], wants[s])) for r, s in pairs) * row

    def bytes_of_heads(self) -> int:
        """Return the bytes that all ranks send in the forward pass by swapping heads."""
        query, key, value = self.query, self.key, self.value
        heads, key_heads = self._heads()
        batch, item = query.shape[0], query.element_size()
        ranks = range(self.group.size)
        sent = 0
        for r in ranks:
            own = query.positions.count(r)
            others = [s for s in ranks if s != r]
            sent += own * query.shape[-1] * sum(len(heads[s]) for s in others)
            channels = key.shape[-1] + value.shape[-1]
            sent += key.positions.count(r) * channels * sum(len(key_heads[s]) for s in others)
            sent += len(heads[r]) * value.shape[-1] * (query.positions.length - own)
        return sent * batch * item

    def _heads(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the heads of queries and of keys that each rank gets."""
        count, ranks = self.query.shape[1], self.group.size
        repeat = count // self.key.shape[1]
        heads = [list(range(count * r // ranks, count * (r + 1) // ranks)) for r in range(ranks)]
        return heads, [sorted({head // repeat for head in each}) for each in heads]

    def _wants(self) -> Sequence[Intervals]:
        """Return the keys that each rank's queries see."""
        length, parts = self.key.shape[-2], self.query.positions.parts
        everything = merged([(0, length)])
        if self.is_causal:
            ends = [min(own[-1][1], length) if own else 0 for own in parts]
            return [merged([(0, end)]) for end in ends]
        mask = self.mask
        if mask is None or mask.dtype != torch.bool or mask.shape[-2] == 1:
            return [everything if own else () for own in parts]
        return [self._seen_by(own) for own in parts]

    def _rows(self, keys: Tensor, values: Tensor, have: Intervals) -> Tensor:
        """Attend with this rank's queries to fetched keys, whose positions are ``have``."""
        query, own = self.query.local, self.query.positions.parts[self.group.rank]
        if not query.shape[-2]:
            shape = (*query.shape[:-1], values.shape[-1])
            used = [query, keys, values]
            if self.mask is not None and self.mask.requires_grad:  # all ranks have its gradient
                used.append(self.mask)
            return query.new_zeros(shape) + 0 * sum(each.sum() for each in used)
        if not self.is_causal and not self._has_rows:
            mask = self._part_of_mask(own, have)
            return _sdpa(query, keys, values, mask, self.options)
        outputs, at = [], 0
        for start, stop in own:
            rows_of_query = query.narrow(-2, at, stop - start)
            at += stop - start
            if self.is_causal:
                # Keys begin with the first one: an interval sees the first ``stop`` of them.
                count = min(stop, keys.shape[-2])
                seen = keys.narrow(-2, 0, count), values.narrow(-2, 0, count)
                outputs.append(causal_attention(rows_of_query, *seen, start, self.options))
                continue
            shown = common(have, self._seen_by(((start, stop),))) or ((have[0][0], have[0][0] + 1),)
            span = common(have, ((shown[0][0], shown[-1][1]),))
            first, last = places(span, have)[0][0], places(span, have)[-1][1]
            seen = keys.narrow(-2, first, last - first), values.narrow(-2, first, last - first)
            mask = self._part_of_mask(((start, stop),), span)
            outputs.append(_sdpa(rows_of_query, *seen, mask, self.options))
        return torch.cat(outputs, -2) if len(outputs) > 1 else outputs[0]

    @property
    def _has_rows(self) -> bool:
        """Whether a mask may show different keys to the intervals of this rank."""
        mask = self.mask
        return (
            mask is not None
            and mask.dtype == torch.bool
            and mask.shape[-2] > 1
            and mask.shape[-1] == self.key.shape[-2]
            and len(self.query.positions.parts[self.group.rank]) > 1
        )

    def _seen_by(self, rows: Intervals) -> Intervals:
        """Return the keys that the mask shows to some queries."""
        mask, length = self.mask, self.key.shape[-2]
        assert mask is not None
        return self.state.once(mask, ("seen", rows, length), partial(_seen, mask, rows, length))

    def _part_of_mask(self, own: Intervals, have: Intervals) -> Tensor | None:
        mask = self.mask
        if mask is None:
            return None

        def take() -> Tensor:
            taken = mask if mask.shape[-2] == 1 else taken_along(mask, mask.ndim - 2, own)
            return taken if mask.shape[-1] == 1 else taken_along(taken, mask.ndim - 1, have)

        return self.state.once(mask, ("mask", own, have), take)

    def _by_keys(self, wants: Sequence[Intervals]) -> Tensor:
        """Attend to fetched keys: of all heads, or of as many at a time as may be gathered.

        In the second case they are fetched again in the backward pass, so that a rank holds those
        of no other heads.
        """
        num_heads: int = self.key.shape[1] if self.key.ndim == 4 else 1
        together = self._num_heads_together(wants, num_heads)
        if together == num_heads:
            keys, values = fetch_keys(self.key, self.value, wants)
            return self._rows(keys, values, wants[self.group.rank])
        repeat = self.query.shape[1] // num_heads
        outputs = []
        for first in range(0, num_heads, together):
            own = slice(first, first + together)
            queries = slice(own.start * repeat, own.stop * repeat)
            mask = self.mask
            if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
                mask = mask[:, queries]
            outputs.append(
                checkpoint(
                    partial(self._of_heads, mask=mask, wants=wants),
                    self.query.local[:, queries],
                    self.key.local[:, own],
                    self.value.local[:, own],
                    use_reentrant=False,
                )
            )
        return torch.cat(outputs, 1)

    def _num_heads_together(self, wants: Sequence[Intervals], num_heads: int) -> int:
        """Return for how many heads keys are fetched at once; the same on all ranks."""
        most, key = self.state.max_gather_bytes, self.key
        if most is None or num_heads == 1 or self.query.shape[1] % num_heads:
            return num_heads
        channels = key.shape[-1] + self.value.shape[-1]
        length = max(map(num_positions, wants))
        num_bytes: int = key.shape[0] * length * channels * key.element_size()
        return min(max(most // max(num_bytes, 1), 1), num_heads)

    def _of_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        wants: Sequence[Intervals],
    ) -> Tensor:
        """Attend with this rank's queries of some heads."""
        cut = self.query.like(query), self.key.like(key), self.value.like(value)
        with subclasses_unasked():
            own = _Attention(*cut, mask, self.is_causal, self.options)
            keys, values = fetch_keys(own.key, own.value, wants)
            return own._rows(keys, values, wants[self.group.rank])

    def _by_heads(self) -> Tensor:
        query, key, value, group = self.query, self.key, self.value, self.group
        heads, key_heads = self._heads()
        positions: Positions = query.positions
        queries = swap_to_heads(query.local, positions, heads, group, "heads: queries")
        keys, values = (
            swap_to_heads(each.local, positions, key_heads, group, "heads: keys")
            for each in (key, value)
        )
        mine, repeat = heads[group.rank], query.shape[1] // key.shape[1]
        of_query = [key_heads[group.rank].index(head // repeat) for head in mine]
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, mine]
        options = {**self.options, "enable_gqa": False, "is_causal": self.is_causal}
        out = _sdpa(queries, keys[:, of_query], values[:, of_query], mask, options)
        return swap_to_positions(out, positions, heads, group, "heads: output")

    def _by_ring(self) -> Tensor:
        query, key, group = self.query, self.key, self.group
        own = query.positions.parts[group.rank]
        device = query.local.device
        allowed: list[Tensor | None] = []
        for theirs in key.positions.parts:
            if self.is_causal:
                seen = positions_of(own, device)[:, None] >= positions_of(theirs, device)[None, :]
                allowed.append(seen)
            else:
                allowed.append(self._part_of_mask(own, theirs))
        counts = [key.positions.count(rank) for rank in range(group.size)]
        scale = self.options.get("scale") or query.shape[-1] ** -0.5
        return ring_attention(
            query.local, key.local, self.value.local, scale, allowed, counts, group
        )


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalBias | None,
    options: dict[str, Any],
) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, start: int, options: dict[str, Any]
) -> Tensor:
    """Attend from positions ``start`` on, each query to the keys up to its own position.

    With the queries in reverse order, entry ``(i, key)`` of the mask depends on ``i + key`` alone:
    the mask is a view of one row, instead of a matrix of all queries and keys.

    Args:
        query: ``(..., queries, D)``.
        key: The first keys, ``(..., keys, D)``.
        value: Their values.
        start: Position of the first query.
        options: Further arguments of torch's function.
    """
    count, length = query.shape[-2], key.shape[-2]
    if not start and length == count:
        return _sdpa(query, key, value, None, {**options, "is_causal": True})
    if query.is_cuda and length == start + count:
        return attend_from_last(query, key, value, options)
    if count and length == start + count and _has_cpu_kernel(query, key, value, options):
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = (each.repeat_interleave(repeat, 1) for each in (key, value))
        output: Tensor = JoinedAttention.apply(query, key, value, start, options.get("scale"))  # type: ignore[no-untyped-call]
        return output
    row = torch.zeros(count + length, dtype=query.dtype, device=query.device)
    row[start + count :] = float("-inf")
    mask = row.as_strided((count, length), (1, 1))
    return _sdpa(query.flip(-2), key, value, mask, options).flip(-2)


def _has_cpu_kernel(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether torch would use the CPU's fused kernel for these operands without a mask."""
    return (
        query.device.type == "cpu"
        and query.ndim == 4
        and query.dtype in {torch.float32, torch.float64, torch.bfloat16}
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == value.shape[-1]
        and query.shape[0] == key.shape[0]
        and all(each.stride(-1) == 1 for each in (query, key, value))
        and not options.get("dropout_p")
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    )


class JoinedAttention(Function):
    """Attention of an interval to all earlier keys, and causally to itself, joined.

    Each part is a call of the CPU's fused kernel, which computes no scores that a mask would hide.
    They are joined by their sums of exponentials, as in ring attention; given the joint output and
    sums, the kernel's backward pass returns the gradients of each part.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None
    ) -> Tensor:
        parts = [
            CPU_ATTENTION(query, keys, values, 0.0, is_causal, scale=scale)
            for keys, values, is_causal in _parts(key, value, start)
        ]
        log_sum = torch.logaddexp(*(sums for _, sums in parts))
        before, own = (part * (sums - log_sum).exp().unsqueeze(-1) for part, sums in parts)
        out: Tensor = (before + own).to(query.dtype)
        ctx.start, ctx.scale = start, scale
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *both = ctx.saved_tensors
        before, own = (
            CPU_ATTENTION_BACKWARD(
                gradient, query, keys, values, *both, 0.0, is_causal, scale=ctx.scale
            )
            for keys, values, is_causal in _parts(key, value, ctx.start)
        )
        of_keys, of_values = (torch.cat(each, -2) for each in zip(before[1:], own[1:], strict=True))
        return before[0] + own[0], of_keys, of_values, None, None


def _parts(key: Tensor, value: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield keys and values before an interval, and those of the interval; True if causal."""
    yield key[..., :start, :], value[..., :start, :], False
    yield key[..., start:, :], value[..., start:, :], True


def attend_from_last(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend with the last positions ``(..., n, D)``, each to keys up to its own, on a GPU."""
    mask = causal_lower_right(query.shape[-2], key.shape[-2])
    with subclasses_asked():  # torch handles the mask by its class, not by its values
        return _sdpa(query, key, value, mask, options)


def positions_of(intervals: Intervals, device: torch.device) -> Tensor:
    """Return the positions of intervals, ascending: int64, ``(positions,)``."""
    ranges = [torch.arange(start, stop, device=device) for start, stop in intervals]
    return torch.cat(ranges) if ranges else torch.arange(0, device=device)


def _seen(mask: Tensor, own: Intervals, length: int) -> Intervals:
    """Return the keys that a boolean mask shows to some queries; one if it shows none."""
    if not own:
        return ()
    if mask.shape[-1] != length:
        return merged([(0, length)])
    rows = taken_along(mask, mask.ndim - 2, own)
    shown = rows.reshape(-1, length).any(0).nonzero().flatten().tolist()
    if not shown:
        return ((0, 1),)
    found = merged((each, each + 1) for each in shown)
    return found if len(found) <= MOST_STRETCHES else ((found[0][0], found[-1][1]),)

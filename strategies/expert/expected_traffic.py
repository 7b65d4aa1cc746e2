"""Bytes of row exchanges in an optimizer step, if all experts are equally likely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from boltmesh.strategies.expert.find import ExpertCall, Experts, arguments
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from torch import Tensor

_COUNT_BYTES = 8
_CHOICE_BYTES = 4
"""Bytes of the number of a choice's expert, sent beside the row."""


def expected_rows(num_rows: float, num_experts: int, num_choices: int, size: int) -> float:
    """Return the rows that a rank sends in a forward pass, to itself too; each once per rank.

    Args:
        num_rows: Rows of this rank's batch.
        num_experts: Experts of the layer.
        num_choices: Different experts of a row.
        size: Ranks that have all experts together.
    """
    others = num_experts - num_experts // size
    none_there = math.comb(others, num_choices) / math.comb(num_experts, num_choices)
    return num_rows * size * (1 - none_there)


class ExchangeBytes(NamedTuple):
    """Calls and payload bytes for one batch of one module."""

    calls: int
    payload: float


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes of one module's exchanges, from a recorded call."""

    num_experts: int
    num_rows: float
    """Rows of this rank; the mean over ranks if each has a part."""
    num_choices: int
    width: int
    """Elements of a row."""
    output_width: int
    row_bytes: int
    """Bytes of an element of rows."""
    weight_bytes: int
    """Bytes of a choice's weight."""
    is_weighted: bool
    """Whether weights get gradients if rows do."""
    has_gradients: bool = True
    """Whether rows get gradients: not below the first trained layer."""
    capacity: int | None = None
    """Fixed number of rows that a rank sends to each expert; None: the rows that choose it."""

    @classmethod
    def of(cls, experts: Experts, call: ExpertCall) -> "ExchangeShape":
        """Return the sizes of a call."""
        given = arguments(call.args, call.kwargs)
        rows: Tensor = given[experts.slots["rows"]] if call.rows is None else call.rows
        output: Tensor = call.output if call.results is None else call.results
        weights: Tensor | None = given.get(experts.slots.get("weights", ""))
        is_routed = experts.kind == "routed"
        return cls(
            experts.num_experts,
            rows.numel() // rows.shape[-1],
            given[experts.slots["experts"]].shape[-1] if is_routed else 1,
            rows.shape[-1],
            output.shape[-1],
            rows.itemsize,
            rows.itemsize if weights is None else weights.itemsize,
            weights is not None,
            call.has_gradients,
        )

    def part(self, num_ranks: int) -> "ExchangeShape":
        """Return the sizes for one of several ranks that have the same rows."""
        return replace(self, num_rows=self.num_rows / num_ranks)

    def joined(self, num_ranks: int, *, is_recomputed: bool) -> ExchangeBytes:
        """Return the traffic by which such ranks gather their parts in a batch.

        Args:
            num_ranks: Ranks that have the same rows.
            is_recomputed: Whether the forward pass runs again in the backward pass.
        """
        num_rows = num_ranks * math.ceil(self.num_rows / num_ranks)
        forward = num_rows * self.output_width * self.row_bytes
        weights = self.is_weighted * num_rows * self.num_choices * self.weight_bytes
        backward = num_rows * self.width * self.row_bytes + weights
        passes = 1 + is_recomputed
        return ExchangeBytes(
            passes + self.has_gradients * (1 + self.is_weighted),
            passes * forward + self.has_gradients * backward,
        )

    def expected(self, size: int, *, is_recomputed: bool) -> ExchangeBytes:
        """Return the traffic of a batch, forward and backward.

        Args:
            size: Ranks that have all experts together.
            is_recomputed: Whether the forward pass runs again in the backward pass.
        """
        passes = 1 + is_recomputed
        rows: float
        choices: float
        if self.capacity is not None:
            rows = choices = self.num_experts * self.capacity
            calls, beside = 2, 0.0
        else:
            rows = expected_rows(self.num_rows, self.num_experts, self.num_choices, size)
            choices = rows * self.num_choices  # each row has room for all
            calls, beside = 3, choices * _CHOICE_BYTES + 3 * size * _COUNT_BYTES
        there, back = (rows * each * self.row_bytes for each in (self.width, self.output_width))
        weights = choices * self.weight_bytes
        gradients = self.has_gradients * (there + self.is_weighted * weights)
        return ExchangeBytes(
            calls * passes + 1 + self.has_gradients,
            passes * (there + back + weights + beside) + back + gradients,
        )


def exchange_traffic(
    shapes: Sequence[tuple[ExchangeShape, bool]],
    size: int,
    num_batches: int,
    *,
    sharing: int,
    gathers_parts: bool,
    why: str,
) -> list[ExpectedTraffic]:
    """Return the traffic of several modules in an optimizer step.

    Args:
        shapes: Sizes of each module, and whether its forward pass runs again in the backward pass.
        size: Ranks that have all experts together.
        num_batches: Batches of a rank, or microbatches.
        sharing: Ranks that have the same rows, and send a part of them each.
        gathers_parts: Whether to state how these ranks gather their parts.
        why: The formula of exchanges in words.
    """

    def in_step(
        axis: str, operator: str, batch: list[ExchangeBytes], why: str, *, is_mean: bool = False
    ) -> ExpectedTraffic:
        payload = num_batches * sum(each.payload for each in batch)
        calls = num_batches * sum(each.calls for each in batch)
        return ExpectedTraffic(axis, operator, payload, calls, why, is_mean=is_mean)

    sent = [shape.part(sharing).expected(size, is_recomputed=again) for shape, again in shapes]
    found = [in_step("expert", "alltoall_base", sent, why, is_mean=True)]
    if gathers_parts:
        joined = [shape.joined(sharing, is_recomputed=again) for shape, again in shapes]
        of_parts = "results of experts, and gradients of their rows and weights, of all parts"
        found.append(in_step("tensor", "_allgather_base", joined, of_parts))
    return found

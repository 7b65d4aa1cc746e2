"""Which tokens of a vocabulary each rank has, also where their number does not divide.

The first ``size % ranks`` ranks have one token more than the others. Nothing is padded in a
parameter; only a message that needs equal parts is, while it is on its way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.plan import LossParallel, balanced_share
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup, gather_parts, take_part


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one table or head, divided over the ranks of a group."""

    group: TensorGroup
    size: int
    """Tokens, on all ranks together."""
    loss_parallel: LossParallel = "auto"
    tell: Callable[[str], None] = lambda _: None
    """Hears once of each function that had whole logits gathered."""
    gathered_for: dict[str, int] = field(default_factory=dict)
    """By function, how often a tensor was gathered because it had no rule of its own."""

    @property
    def start(self) -> int:
        """First token of this rank."""
        return balanced_share(self.size, self.group.size, self.group.rank)[0]

    @property
    def length(self) -> int:
        """Tokens of this rank."""
        return self.length_of(self.group.rank)

    def length_of(self, rank: int) -> int:
        """Tokens of a rank."""
        return balanced_share(self.size, self.group.size, rank)[1]

    def is_divided_like(self, other: "Vocabulary") -> bool:
        """Whether each rank has the same tokens of both."""
        return self.size == other.size and self.group is other.group

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Return a view of this rank's tokens of a tensor that is alike on all ranks."""
        return whole.narrow(dim, self.start, self.length)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Join the tokens of all ranks along ``dim``. Collective; its gradient is `own`'s."""
        if self._is_even:
            return gather_parts(local, self.group, dim)
        missing = self.length_of(0) - self.length
        joined = gather_parts(_lengthened(local, missing, dim), self.group, dim)
        parts = joined.chunk(self.group.size, dim)
        return torch.cat(
            [part.narrow(dim, 0, self.length_of(rank)) for rank, part in enumerate(parts)], dim
        )

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Keep this rank's tokens of a tensor that is alike on all ranks.

        Its gradient is alike on all ranks: the backward pass gathers it. Collective there.
        """
        if not whole.requires_grad:
            return self.own(whole, dim)
        if self._is_even:
            return take_part(whole, self.group, dim)
        lengths = [self.length_of(rank) for rank in range(self.group.size)]
        parts = [
            _lengthened(part, lengths[0] - part.shape[dim], dim)
            for part in torch.split(whole, lengths, dim)
        ]
        return take_part(torch.cat(parts, dim), self.group, dim).narrow(dim, 0, self.length)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return where tokens stand in this rank's part, 0 for others, and which are others'.

        Raises:
            IndexError: A token is not of the vocabulary. On an accelerator an assertion fails
                there, as for a table that is not divided.
        """
        # Others' tokens read row 0, so nothing else would notice one that no rank has.
        torch.zeros((), device=tokens.device).expand(self.size).index_select(0, tokens.reshape(-1))
        places = tokens - self.start
        is_others = (places < 0) | (places >= self.length)
        return places.masked_fill(is_others, 0), is_others

    def note_gather(self, function: str) -> None:
        """Count a function that had a tensor gathered, and tell of the first time.

        Raises:
            ConfigError: The loss was to be computed on divided logits.
        """
        if self.loss_parallel is True:
            raise ConfigError(
                f"loss_parallel=True, but '{function}' needs the logits of all {self.size} "
                "tokens. Set strategy.loss_parallel=auto to have them gathered there."
            )
        if function not in self.gathered_for:
            self.tell(f"logits are gathered for '{function}', which has no rule for divided ones")
        self.gathered_for[function] = self.gathered_for.get(function, 0) + 1

    @property
    def _is_even(self) -> bool:
        return self.size % self.group.size == 0

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


def _lengthened(tensor: Tensor, missing: int, dim: int) -> Tensor:
    """``tensor`` with zeros after its end."""
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)

"""Says in words how ranks have parted: plain functions over what each of them said."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MOST_RANKS_NAMED = 8

_ADVICE = (
    "With sharded parameters all ranks run the same modules in the same order. Let one rank decide "
    "and broadcast, or run the module on every rank and multiply by zero what is not wanted."
)


class Said(NamedTuple):
    """What one rank does at the place where they part."""

    rank: int
    text: str


def describe_parting(said: Iterable[Said]) -> str:
    """Return who does what where the others do something else; those that are most come last."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(set(said)):
        by_text.setdefault(text, []).append(rank)
    # Of parties of one size the one with the first rank is what the others are measured by.
    parties = sorted(by_text.items(), key=lambda party: (len(party[1]), -party[1][0]))
    words = [f"{_name_ranks(ranks)} {text}" for text, ranks in parties]
    return f"The ranks have parted: {' where '.join(words)}. {_ADVICE}"


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    more = len(ranks) - _MOST_RANKS_NAMED
    return f"each of ranks {named}" + (f" and {more} more" if more > 0 else "")

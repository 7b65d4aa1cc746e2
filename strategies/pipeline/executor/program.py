"""What one rank has to do in a step, read from the actions of a schedule.

Actions are written as torch writes them: ``0F3`` is the forward pass of microbatch 3 in stage 0,
``B`` a whole backward pass, ``I`` and ``W`` its halves (of the inputs, of the weights), and
``0SEND_F3``, ``1RECV_F3``, ``1SEND_B3``, ``0RECV_B3`` hand over values and gradients.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from typing_extensions import override

SENDS: Final = frozenset({"SEND_F", "SEND_B"})
RECEIVES: Final = frozenset({"RECV_F", "RECV_B"})
BACKWARD: Final = frozenset({"B", "I", "W"})

_ACTION: Final = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_OVERLAPPED: Final = re.compile(r"\(([^()]+)\)OVERLAP_F_B")
_OF_FORWARD: Final = frozenset({"F", "SEND_F", "RECV_F"})


class Action(NamedTuple):
    """One thing to do with one microbatch in one stage."""

    stage: int
    kind: str
    microbatch: int

    @override
    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_actions(texts: Sequence[str]) -> tuple[Action, ...]:
    """Read a list of actions; an overlapped pair, ``(0F3;1B0)OVERLAP_F_B``, is its parts in order.

    Raises:
        ValueError: One of them is none that the executor can do.
    """
    actions = []
    for text in texts:
        pair = _OVERLAPPED.fullmatch(text)
        for part in pair[1].split(";") if pair else (text,):
            match = _ACTION.fullmatch(part.strip())
            if match is None:
                raise ValueError(
                    f"cannot run the action {text!r}: it is none of F, B, I, W, SEND_F, RECV_F, "
                    "SEND_B, RECV_B and OVERLAP_F_B with a stage before and a microbatch behind"
                )
            actions.append(Action(int(match[1]), match[2], int(match[3])))
    return tuple(actions)


@dataclass(frozen=True)
class Program:
    """The actions of one rank, and where the stages are.

    Ranks count within the group of the pipeline axis. The order in which a rank posts its messages
    is that of its actions, so lists in which sends and receives of any two ranks come in orders
    that fit each other, as torch's do, cannot lock up however messages are carried.
    """

    rank: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[Action, ...]
    num_before: int = 0
    """Microbatches of the batch before, where backward passes of it are done in this step; they
    count from its end, -1 being the last."""
    carries: bool = False
    """Whether backward passes of this step's batch are left to the next one, on some rank."""

    @classmethod
    def parse(cls, texts: Sequence[str], *, rank: int, rank_of_stage: Sequence[int]) -> "Program":
        """Read the list of one rank.

        Raises:
            ValueError: An action is unknown, or of a stage that another rank has.
        """
        program = cls(rank, tuple(rank_of_stage), parse_actions(texts))
        for action in program.actions:
            if action.stage not in program.stages:
                raise ValueError(
                    f"cannot run the action {action} on rank {rank} of the pipeline: its stages "
                    f"are {', '.join(map(str, program.stages)) or 'none'}"
                )
        return program

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.rank)

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """The numbers of the step's microbatches, without those of the batch before."""
        return tuple(sorted({each.microbatch for each in self.actions if each.microbatch >= 0}))

    @cached_property
    def has_backward(self) -> bool:
        """Whether anything is differentiated, now or in the next step."""
        return self.carries or any(action.kind in BACKWARD for action in self.actions)

    @cached_property
    def forward_only(self) -> "Program":
        """The same without backward passes: for validation and prediction."""
        kept = tuple(action for action in self.actions if action.kind in _OF_FORWARD)
        return Program(self.rank, self.rank_of_stage, kept)

    def number(self, action: Action) -> int:
        """Return the number of an action's microbatch in its own batch."""
        return action.microbatch % self.num_before if action.microbatch < 0 else action.microbatch

    def is_local(self, stage: int) -> bool:
        """Whether this rank has the stage, so that handing it a value takes no message."""
        return 0 <= stage < len(self.rank_of_stage) and self.rank_of_stage[stage] == self.rank

    def peer(self, action: Action) -> int:
        """Return the rank at the other end of a send or a receive."""
        to_next = action.kind in {"SEND_F", "RECV_B"}
        return self.rank_of_stage[action.stage + (1 if to_next else -1)]

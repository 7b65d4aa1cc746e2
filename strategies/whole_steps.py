"""Steps of optimizers that need whole matrices, such as Muon, where ranks hold shards.

[Note: Whole parameters at one owner]
Each parameter has one owner among the ranks that share it. For a step, every rank sends its shards
of gradients and parameters to their owners in one all-to-all; the owner runs the user's optimizer
on the whole parameters that it owns, and a second all-to-all returns the shards. State stays
whole, at the owner. Owners are chosen once, the most expensive parameter first, each time the rank
with the least work: no matrix is stepped twice.

Most optimizers may step some parameters after others. A step is then made in rounds: while the
owners step the parameters of one, those of the next are gathered, and those of the one before are
sent back. A rank sends its shards of gradients and parameters and receives the latter back; beside
them it holds gradient and value of what it owns in two rounds, without rounds of all that it owns.

Where a tensor axis divides parameters and the data axis shards the parts, the shards of a part go
to one data rank, whose tensor ranks join their parts; the owner is one of these. With offload the
owner steps on the host, with its state.

Source: Liu et al. 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982,
section 2.3
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.strategies.optimizer_probe import steps_in_rounds
from boltmesh.strategies.owner_exchange import Exchange
from boltmesh.strategies.torch_compat.optimizers import (
    keep_plain_settings,
    patch_optimizer,
    step_without_hooks,
)
from boltmesh.strategies.torch_compat.tensors import tree_map_only
from boltmesh.telemetry.traffic import ExpectedTraffic, added_up

STAND_IN_SIZE = 2

ROUND_BYTES = 32 << 20
"""Bytes of whole values that a rank gathers at once."""

_Owned = list[list[Parameter]]
"""The parameters that each rank owns, one entry for each rank."""


class WholeSteps:
    """Runs one optimizer on whole parameters, each at its owner.

    See [Note: Whole parameters at one owner]. Create it on all ranks of the exchange.

    Args:
        optimizer: The user's optimizer. It keeps its groups and state.
        exchange: Moves parameters between the ranks that share them and their owners.
        record: Called before each collective step.
        device: Where it steps and keeps state; None: on the device of the parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        exchange: Exchange,
        record: Callable[[str], None] = lambda _: None,
        device: torch.device | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._exchange, self._record, self._device = exchange, record, device
        self._run = step_without_hooks(optimizer)
        self._shared: list[Parameter] = []
        self._owner: dict[int, int] = {}
        self._costs = [0] * exchange.size
        """The cost of the parameters that each rank owns."""
        self._wholes: dict[int, Parameter] = {}
        """The whole of each owned parameter, by ``id`` of its shard; the same object each step."""
        self._stand_ins: dict[tuple[int, int], Parameter] = {}
        """By numbers of a group and of a round in which this rank owns nothing of it: counters of
        the group advance here, too."""
        self._stand_in_state: dict[tuple[int, int], Any] = {}
        self._restore: Callable[[], None] | None = None
        self._find_owners()
        self._has_rounds = True
        self._has_rounds = len(self._rounds(self._shared)) > 1 and steps_in_rounds(optimizer)

    def _find_owners(self) -> None:
        """Choose owners of new parameters: the largest cost first, the rank with the least work."""
        given = (each for group in self.optimizer.param_groups for each in group["params"])
        new = [e for e in given if self._exchange.is_shared(e) and id(e) not in self._owner]
        new.sort(key=self._cost, reverse=True)
        for each in new:
            owner = self._costs.index(min(self._costs))
            self._owner[id(each)] = owner
            self._costs[owner] += self._cost(each)
        self._shared += new

    def _cost(self, parameter: Parameter) -> int:
        """Return the relative cost of a step of a parameter: that of matrix products."""
        shape = self._exchange.whole_shape(parameter)
        return shape.numel() * (min(shape) if len(shape) > 1 else 1)

    def patch(self) -> None:
        """Replace the optimizer's own ``step`` by this one, until ``release``."""
        self._restore = patch_optimizer(
            self.optimizer, step=self.step, discard=lambda *_: None, absorb=lambda _: None
        )

    def release(self) -> None:
        """Restore the optimizer's own ``step``."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def owns(self, parameter: Tensor) -> bool | None:
        """Whether this rank holds all state of a parameter; None: each rank has its own state."""
        owner = self._owner.get(id(parameter))
        return None if owner is None else owner == self._exchange.rank

    def traffic(self) -> list[ExpectedTraffic]:
        """Return what this rank sends in a step that steps all parameters."""
        rounds = self._rounds(self._shared)
        return [each for owned in rounds for each in self._exchange.traffic(owned)]

    # A step.

    def step(self, optimizer: Optimizer) -> None:
        """Step whole parameters. Collective over the ranks of the exchange."""
        self._find_owners()  # of groups that were added
        trained = [each for each in self._shared if each.grad is not None]
        self._record("stepped whole parameters")
        rounds = self._rounds(trained)
        try:
            if self._has_rounds:
                self._step_in_rounds(optimizer, rounds)
            else:
                for _ in self._gather(rounds):
                    pass
                with self._swapped(optimizer, trained):
                    self._run(optimizer)
                for _ in self._give_back(rounds):
                    pass
        finally:
            self._release(self._wholes.values())

    def _step_in_rounds(self, optimizer: Optimizer, rounds: Sequence[_Owned]) -> None:
        """Step one round after the other, as if they were stepped at once."""
        restore = keep_plain_settings(optimizer)
        sending = self._give_back(rounds)
        for number, owned in enumerate(self._gather(rounds)):
            if number > 0:
                restore()
            stepped = [each for some in owned for each in some]
            with self._swapped(optimizer, stepped, number, has_others=owned is rounds[-1]):
                self._run(optimizer)
            next(sending)
            self._release(self._wholes[id(each)] for each in owned[self._exchange.rank])
        next(sending, None)

    def _rounds(self, parameters: Sequence[Parameter]) -> list[_Owned]:
        """Return the parameters that are gathered at once.

        A round has at most ``ROUND_BYTES`` of each owner, or as much as the largest parameter has:
        the work of the owners is then about equal in each. A step on a device that is not made in
        rounds gathers everything at once.
        """
        sizes = [
            self._exchange.whole_shape(each).numel() * each.element_size() for each in parameters
        ]
        limit = max([ROUND_BYTES, *sizes])
        if self._device is None and not self._has_rounds:
            limit = sum(sizes)
        rounds: list[_Owned] = [self._of_no_rank()]
        at = [(0, 0)] * self._exchange.size
        for each, size in zip(parameters, sizes, strict=True):
            owner = self._owner[id(each)]
            number, total = at[owner]
            if total and total + size > limit:
                number, total = number + 1, 0
            if number == len(rounds):
                rounds.append(self._of_no_rank())
            rounds[number][owner].append(each)
            at[owner] = number, total + size
        return rounds

    def _of_no_rank(self) -> _Owned:
        return [[] for _ in range(self._exchange.size)]

    def _gather(self, rounds: Sequence[_Owned]) -> Iterator[_Owned]:
        """Yield each round when this rank has the whole values and gradients that it owns of it.

        The next round is gathered meanwhile. Collective over the ranks of the exchange.
        """
        wait = self._start_gather(rounds[0])
        for number, owned in enumerate(rounds):
            with torch.no_grad():
                for each, pair in zip(owned[self._exchange.rank], wait(), strict=True):
                    whole = self._whole(each)
                    whole.data, whole.grad = (tensor.to(whole.device) for tensor in pair)
            if number + 1 < len(rounds):
                wait = self._start_gather(rounds[number + 1])
            yield owned

    @torch.no_grad()
    def _start_gather(self, owned: _Owned) -> Callable[[], Sequence[tuple[Tensor, Tensor]]]:
        return self._exchange.gather(owned)

    def _give_back(self, rounds: Sequence[_Owned]) -> Iterator[None]:
        """Start to send a round that this rank has stepped to all ranks, at each ``next``.

        The round before is written then; the last one at the end. Collective over the ranks of the
        exchange.
        """
        write: Callable[[], None] | None = None
        for owned in rounds:
            with torch.no_grad():
                own = owned[self._exchange.rank]
                wholes = [self._wholes[id(each)].detach().to(each.device) for each in own]
                started = self._exchange.give_back(owned, wholes)
                if write is not None:
                    write()
            write = started
            yield
        if write is not None:
            with torch.no_grad():
                write()

    def _release(self, wholes: Iterable[Parameter]) -> None:
        for whole in wholes:
            whole.grad, whole.data = None, whole.data.new_empty(0)

    def _whole(self, parameter: Parameter) -> Parameter:
        """Return the whole parameter for a shard, with the attributes that the user gave that."""
        known = self._wholes.get(id(parameter))
        if known is None:
            like: Any = {"dtype": parameter.dtype, "device": self._device or parameter.device}
            known = Parameter(torch.empty(0, **like), requires_grad=parameter.requires_grad)
            self._wholes[id(parameter)] = known
        vars(known).update(vars(parameter))
        return known

    @contextmanager
    def _swapped(
        self,
        optimizer: Optimizer,
        stepped: Sequence[Parameter],
        round_number: int = 0,
        *,
        has_others: bool = True,
    ) -> Iterator[None]:
        """For the duration of the block, let the optimizer's groups hold whole parameters.

        They hold those of ``stepped`` that this rank owns, with their state, instead of its shards;
        also the parameters without an owner if ``has_others``.
        """
        by_id = {id(each): each for each in stepped if self.owns(each)}
        before = [settings["params"] for settings in optimizer.param_groups]
        state = optimizer.state
        for number, settings in enumerate(optimizer.param_groups):
            known = before[number]
            settings["params"] = [
                self._wholes[id(each)] if id(each) in by_id else each
                for each in known
                if id(each) in by_id or (has_others and id(each) not in self._owner)
            ] or self._stand_in((number, round_number), known)
        for key, each in by_id.items():
            if each in state:
                own = state.pop(each)
                if self._device is not None and each.device != self._device:  # was just loaded
                    own = tree_map_only(Tensor, self._on_host, own)
                state[self._wholes[key]] = own
        stand_ins = {k: each for k, each in self._stand_ins.items() if k[1] == round_number}
        for place, stand_in in stand_ins.items():
            if place in self._stand_in_state:
                state[stand_in] = self._stand_in_state[place]
        try:
            yield
        finally:
            for settings, parameters in zip(optimizer.param_groups, before, strict=True):
                settings["params"] = parameters
            for key, each in by_id.items():
                if self._wholes[key] in state:
                    state[each] = state.pop(self._wholes[key])
            for place, stand_in in stand_ins.items():
                self._stand_in_state[place] = state.pop(stand_in, {})

    def _on_host(self, value: Tensor) -> Tensor:
        return value.to(self._device)

    def _stand_in(self, key: tuple[int, int], parameters: Sequence[Parameter]) -> list[Parameter]:
        """Return what a group steps of which this rank owns nothing: one parameter, or none.

        Args:
            key: Numbers of the group and of the round.
            parameters: Those of the group.
        """
        trained = [e for e in parameters if id(e) in self._owner and e.grad is not None]
        if not trained:
            return []
        stand_in = self._stand_ins.get(key)
        if stand_in is None:
            like: Any = {"dtype": trained[0].dtype, "device": self._device or trained[0].device}
            stand_in = Parameter(torch.zeros([STAND_IN_SIZE] * trained[0].dim(), **like))
            vars(stand_in).update(vars(trained[0]))
            self._stand_ins[key] = stand_in
        stand_in.grad = torch.zeros_like(stand_in)
        return [stand_in]


def add_whole_steps(
    expected: Sequence[ExpectedTraffic], steps: Sequence[WholeSteps], axis: str
) -> list[ExpectedTraffic]:
    """Add what steps of whole parameters send over an axis to the expected traffic of a step.

    Entries of one axis and operator are merged.
    """
    sent = [moved for each in steps for moved in each.traffic() if moved.axis == axis]
    return added_up([*expected, *sent])


def is_owned(parameter: Tensor, steps: Iterable[WholeSteps]) -> bool | None:
    """Whether this rank holds all state of a parameter; None: no ``WholeSteps`` steps it."""
    known = (each.owns(parameter) for each in steps)
    return next((owns for owns in known if owns is not None), None)

"""Steps of optimizers that need whole matrices, such as Muon, where ranks hold shards.

[Note: Whole parameters at one owner]
Each parameter has one owner among the ranks that share it. For a step, every rank sends its shards
of gradients and parameters to their owners in one all-to-all; the owner runs the user's optimizer
on the whole parameters that it owns, and a second all-to-all returns the shards. State stays
whole, at the owner. Owners are chosen once, the most expensive parameter first, each time the rank
with the least work: no matrix is stepped twice.

Most optimizers may step some parameters after others. The step of a large model is then made in
rounds: while the owners step the parameters of one, those of the next are gathered, and those of
the one before are sent back. A rank sends its shards of gradients and parameters and receives the
latter back; beside them it holds gradient and value of what it owns in about three rounds, without
rounds of all that it owns.

Where a tensor axis divides parameters and the data axis shards the parts, the shards of a part go
to one data rank, whose tensor ranks join their parts; the owner is one of these. With offload the
owner steps on the host, with its state.

Source: Liu et al. 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982,
section 2.3
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.optimizer_probe import steps_in_rounds
from boltmesh.strategies.owner_exchange import Exchange
from boltmesh.strategies.torch_compat.optimizers import (
    patch_optimizer,
    plain_settings,
    restore_plain_settings,
    step_without_hooks,
)
from boltmesh.strategies.torch_compat.tensors import tree_map_only
from boltmesh.telemetry.traffic import ExpectedTraffic, added_up

STAND_IN_SIZE = 2

ROUND_BYTES = 16 << 20
"""About as many bytes of whole values has a rank in a round."""

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
        self._stand_ins: dict[int, Parameter] = {}
        """By number of a group of which this rank owns nothing: its counters advance here too."""
        self._stand_in_state: dict[int, Any] = {}
        self._restore: Callable[[], None] | None = None
        self._find_owners()
        has_rounds = exchange.size > 1 and len(self._divided(self._shared)) > 1
        self._steps_in_rounds = has_rounds and exchange.agrees(steps_in_rounds(optimizer))

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
            if self._steps_in_rounds:
                self._step_in_rounds(optimizer, rounds)
            else:
                for owned in rounds:
                    self._take(owned, self._gather(owned))
                mine = [each for each in trained if self.owns(each)]
                with self._swapped(optimizer, mine, self._by_group(optimizer, mine)):
                    self._run(optimizer)
                for owned in rounds:
                    self._send(owned)()
        finally:
            self._release(self._wholes.values())

    def _step_in_rounds(self, optimizer: Optimizer, rounds: Sequence[_Owned]) -> None:
        """Step one round after the other, as if they were stepped at once."""
        groups = optimizer.param_groups
        at_start = list(map(plain_settings, groups))
        stepped: set[int] = set()
        write: Callable[[], None] = noop
        wait = self._gather(rounds[0])
        for number, owned in enumerate(rounds):
            self._take(owned, wait)
            is_last = number + 1 == len(rounds)
            wait = list if is_last else self._gather(rounds[number + 1])  # frees what has come
            mine = owned[self._exchange.rank]
            parameters = self._by_group(optimizer, mine, stepped, is_last=is_last)
            kept = []
            for at, own in enumerate(parameters):
                if own:
                    restore_plain_settings(groups[at], at_start[at])
                    stepped.add(at)
                else:
                    kept.append((groups[at], plain_settings(groups[at])))
            with self._swapped(optimizer, mine, parameters):
                self._run(optimizer)
            for group, settings in kept:
                restore_plain_settings(group, settings)
            started = self._send(owned)
            self._release(self._wholes[id(each)] for each in mine)
            write()
            write = started
        write()

    def _rounds(self, parameters: Sequence[Parameter]) -> list[_Owned]:
        """Return the parameters that are gathered at once, of each rank those that it owns."""
        is_divided = self._steps_in_rounds or self._device is not None
        return self._divided(parameters) if is_divided else [self._by_owner(parameters)]

    def _divided(self, parameters: Sequence[Parameter]) -> list[_Owned]:
        """Divide parameters into rounds of about ``ROUND_BYTES`` of each owner.

        On a device, rounds are at most so many that the largest parameter takes no longer than one,
        and each has the same share of an owner's work: owners then need not wait for each other. A
        rank may own nothing of a round.
        """
        owned = self._by_owner(parameters)
        num_rounds = -(-max(sum(map(self._num_bytes, own)) for own in owned) // ROUND_BYTES)
        weight = self._num_bytes
        if self._device is None:
            weight = self._cost
            most = max(sum(map(weight, own)) for own in owned)
            num_rounds = min(num_rounds, most // max([1, *map(weight, parameters)]))
        rounds: list[_Owned] = [[[] for _ in owned] for _ in range(max(1, num_rounds))]
        for owner, own in enumerate(owned):
            done, total = 0, max(1, sum(map(weight, own)))
            for each in own:
                middle = (2 * done + weight(each)) * len(rounds) // (2 * total)
                rounds[min(middle, len(rounds) - 1)][owner].append(each)
                done += weight(each)
        return rounds

    def _by_owner(self, parameters: Sequence[Parameter]) -> _Owned:
        owned: _Owned = [[] for _ in range(self._exchange.size)]
        for each in parameters:
            owned[self._owner[id(each)]].append(each)
        return owned

    def _num_bytes(self, parameter: Parameter) -> int:
        return self._exchange.whole_shape(parameter).numel() * parameter.element_size()

    @torch.no_grad()
    def _gather(self, owned: _Owned) -> Callable[[], list[tuple[Tensor, Tensor]]]:
        """Start to gather a round. Collective over the ranks of the exchange."""
        return self._exchange.gather(owned)

    @torch.no_grad()
    def _take(self, owned: _Owned, wait: Callable[[], list[tuple[Tensor, Tensor]]]) -> None:
        """Wait for whole values and gradients of what this rank owns of a round. Collective."""
        for each, pair in zip(owned[self._exchange.rank], wait(), strict=True):
            whole = self._whole(each)
            whole.data, whole.grad = (tensor.to(whole.device) for tensor in pair)

    @torch.no_grad()
    def _send(self, owned: _Owned) -> Callable[[], None]:
        """Start to send a round that this rank has stepped; returns what writes it. Collective."""
        own = owned[self._exchange.rank]
        wholes = [self._wholes[id(each)].detach().to(each.device) for each in own]
        return torch.no_grad()(self._exchange.give_back(owned, wholes))

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
        mine: Sequence[Parameter],
        by_group: Sequence[list[Parameter]],
    ) -> Iterator[None]:
        """For the duration of the block, let the optimizer's groups hold other parameters.

        Args:
            optimizer: The optimizer.
            mine: Shards whose state the whole parameters have meanwhile.
            by_group: See ``_by_group``.
        """
        before = [settings["params"] for settings in optimizer.param_groups]
        state = optimizer.state
        for settings, parameters in zip(optimizer.param_groups, by_group, strict=True):
            settings["params"] = parameters
        for each in mine:
            if each in state:
                own = state.pop(each)
                if self._device is not None and each.device != self._device:  # was just loaded
                    own = tree_map_only(Tensor, self._on_host, own)
                state[self._wholes[id(each)]] = own
        for number, stand_in in self._stand_ins.items():
            if number in self._stand_in_state:
                state[stand_in] = self._stand_in_state[number]
        try:
            yield
        finally:
            for settings, parameters in zip(optimizer.param_groups, before, strict=True):
                settings["params"] = parameters
            for each in mine:
                if self._wholes[id(each)] in state:
                    state[each] = state.pop(self._wholes[id(each)])
            for number, stand_in in self._stand_ins.items():
                self._stand_in_state[number] = state.pop(stand_in, {})

    def _on_host(self, value: Tensor) -> Tensor:
        return value.to(self._device)

    def _by_group(
        self,
        optimizer: Optimizer,
        mine: Sequence[Parameter],
        stepped: Collection[int] = (),
        *,
        is_last: bool = True,
    ) -> list[list[Parameter]]:
        """Return what each group steps on this rank.

        These are wholes of ``mine``; in the last round of a step also parameters without an owner,
        and a stand-in for each trained group, not in ``stepped``, of which the rank owns nothing.
        """
        known = set(map(id, mine))
        by_group = []
        for number, settings in enumerate(optimizer.param_groups):
            parameters = [
                self._wholes[id(each)] if id(each) in known else each
                for each in settings["params"]
                if id(each) in known or (is_last and id(each) not in self._owner)
            ]
            if is_last and not parameters and number not in stepped:
                parameters = self._stand_in(number, settings["params"])
            by_group.append(parameters)
        return by_group

    def _stand_in(self, number: int, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Return a small parameter for a group, or none if nothing of it is trained."""
        trained = [e for e in parameters if id(e) in self._owner and e.grad is not None]
        if not trained:
            return []
        stand_in = self._stand_ins.get(number)
        if stand_in is None:
            like: Any = {"dtype": trained[0].dtype, "device": self._device or trained[0].device}
            stand_in = Parameter(torch.zeros([STAND_IN_SIZE] * trained[0].dim(), **like))
            vars(stand_in).update(vars(trained[0]))
            self._stand_ins[number] = stand_in
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

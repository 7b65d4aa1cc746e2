"""Steps of optimizers that need whole matrices, such as Muon, where ranks hold shards.

[Note: Whole parameters at one owner]
Each parameter has one owner among the ranks that share it. For a step, every rank sends its shards
of gradients and parameters to their owners in one all-to-all; the owner runs the user's optimizer
on the whole parameters that it owns, and a second all-to-all returns the shards. State stays
whole, at the owner. Owners are chosen once, the most expensive parameter first, each time the rank
with the least work: no matrix is stepped twice.

A rank sends its shards of gradients and parameters and receives the latter back; beside them it
holds gradient and value of what it owns during the step. Where a tensor axis divides parameters and
the data axis shards the parts, the shards of a part go to one data rank, whose tensor ranks join
their parts; the owner is one of these. With offload the owner steps on the host, with its state.

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

from boltmesh.strategies.owner_exchange import Exchange
from boltmesh.strategies.torch_compat.optimizers import patch_optimizer, step_without_hooks
from boltmesh.strategies.torch_compat.tensors import tree_map_only
from boltmesh.telemetry.traffic import ExpectedTraffic, added_up

STAND_IN_SIZE = 2

ROUND_BYTES = 256 << 20
"""Bytes of whole values that all ranks together gather at once for a step on the host."""


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

    def _find_owners(self) -> None:
        """Choose owners of new parameters: the largest cost first, the rank with the least work."""
        given = (each for group in self.optimizer.param_groups for each in group["params"])
        new = [e for e in given if self._exchange.is_shared(e) and id(e) not in self._owner]
        for each in sorted(new, key=lambda each: -self._cost(each)):
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
        rounds = map(self._by_owner, self._rounds(self._shared))
        return [each for owned in rounds for each in self._exchange.traffic(owned)]

    # A step.

    def step(self, optimizer: Optimizer) -> None:
        """Step whole parameters. Collective over the ranks of the exchange."""
        self._find_owners()  # of groups that were added
        trained = [each for each in self._shared if each.grad is not None]
        self._record("stepped whole parameters")
        mine = [each for each in trained if self.owns(each)]
        with torch.no_grad():
            for some in self._rounds(trained):
                self._take(self._by_owner(some))
        try:
            with self._swapped(optimizer, mine):
                self._run(optimizer)
            with torch.no_grad():
                for some in self._rounds(trained):
                    self._give_back(self._by_owner(some))
        finally:
            for whole in self._wholes.values():
                whole.grad, whole.data = None, whole.data.new_empty(0)

    def _rounds(self, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
        """Return the parameters that are gathered at once: few, for a step on the host."""
        rounds: list[list[Parameter]] = [[]]
        size = 0
        for each in parameters:
            own = self._exchange.whole_shape(each).numel() * each.element_size()
            if self._device is not None and rounds[-1] and size + own > ROUND_BYTES:
                rounds.append([])
                size = 0
            rounds[-1].append(each)
            size += own
        return rounds

    def _take(self, owned: Sequence[Sequence[Parameter]]) -> None:
        """Gather what this rank owns, with gradients. Collective over the ranks of the exchange."""
        pairs = self._exchange.gather(owned)
        for each, pair in zip(owned[self._exchange.rank], pairs, strict=True):
            whole = self._whole(each)
            whole.data, whole.grad = (tensor.to(whole.device) for tensor in pair)

    def _give_back(self, owned: Sequence[Sequence[Parameter]]) -> None:
        """Send what this rank has stepped to all ranks. Collective over those of the exchange."""
        own = owned[self._exchange.rank]
        wholes = [self._wholes[id(each)].detach().to(each.device) for each in own]
        self._exchange.give_back(owned, wholes)

    def _by_owner(self, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
        return [
            [each for each in parameters if self._owner[id(each)] == rank]
            for rank in range(self._exchange.size)
        ]

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
    def _swapped(self, optimizer: Optimizer, mine: Sequence[Parameter]) -> Iterator[None]:
        """For the duration of the block, let the optimizer's groups hold whole parameters.

        They hold those that this rank owns, with their state, instead of its shards.
        """
        by_id = {id(each): each for each in mine}
        before = [settings["params"] for settings in optimizer.param_groups]
        state = optimizer.state
        for number, settings in enumerate(optimizer.param_groups):
            settings["params"] = self._stepped(number, before[number], by_id)
        for key, each in by_id.items():
            if each in state:
                own = state.pop(each)
                if self._device is not None and each.device != self._device:  # was just loaded
                    own = tree_map_only(Tensor, self._on_host, own)
                state[self._wholes[key]] = own
        for number, stand_in in self._stand_ins.items():
            if number in self._stand_in_state:
                state[stand_in] = self._stand_in_state[number]
        try:
            yield
        finally:
            for settings, parameters in zip(optimizer.param_groups, before, strict=True):
                settings["params"] = parameters
            for key, each in by_id.items():
                if self._wholes[key] in state:
                    state[each] = state.pop(self._wholes[key])
            for number, stand_in in self._stand_ins.items():
                self._stand_in_state[number] = state.pop(stand_in, {})

    def _on_host(self, value: Tensor) -> Tensor:
        return value.to(self._device)

    def _stepped(
        self, number: int, parameters: Sequence[Parameter], mine: Collection[int]
    ) -> list[Parameter]:
        """Return what a group steps on this rank; a stand-in if the rank owns nothing of it."""
        stepped = [
            self._wholes[id(each)] if id(each) in mine else each
            for each in parameters
            if id(each) in mine or id(each) not in self._owner
        ]
        shared = [each for each in parameters if id(each) in self._owner and each.grad is not None]
        if stepped or not shared:
            return stepped
        stand_in = self._stand_ins.get(number)
        if stand_in is None:
            like: Any = {"dtype": shared[0].dtype, "device": self._device or shared[0].device}
            stand_in = Parameter(torch.zeros([STAND_IN_SIZE] * shared[0].dim(), **like))
            vars(stand_in).update(vars(shared[0]))
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

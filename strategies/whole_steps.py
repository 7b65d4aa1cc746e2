"""Steps of optimizers that need whole matrices, such as Muon, where ranks hold shards.

[Note: Whole parameters at one owner]
Each parameter has one owner among the ranks that share it. For a step, every rank sends its shards
of gradients and parameters to their owners in one all-to-all; the owner runs the author's optimizer
on the whole parameters that it owns, and a second all-to-all brings the shards back. State stays
whole, at the owner. The owners are chosen once, the most expensive parameter first, each for the
rank with the least to do: no matrix is stepped twice.

A rank sends two times its shards and receives its shards back; beside them it holds gradient and
value of what it owns during the step. With parts of a tensor axis, whose shards the data axis has,
the shards of a part go to one data rank and its tensor ranks join their parts; the owner is one of
these. With offload the owner steps on the host, where its state is.

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

from boltmesh.strategies.owner_exchange import AxisTraffic, Exchange
from boltmesh.strategies.torch_compat.optimizers import patch_optimizer, step_without_hooks
from boltmesh.strategies.torch_compat.tensors import tree_map_only
from boltmesh.telemetry.traffic import ExpectedTraffic

STAND_IN_SIZE = 2

ROUND_BYTES = 256 << 20
"""Whole values that a step on the host gathers at once, from all ranks."""


class WholeSteps:
    """Runs one optimizer on whole parameters, each at its owner.

    See [Note: Whole parameters at one owner]. Made on all ranks of the exchange together.

    Args:
        optimizer: The author's. Its groups and state stay its own.
        exchange: Moves parameters between the ranks that share them and their owners.
        record: Called before each collective step.
        device: Where it steps, and keeps state; None: where parameters are.
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
        """Stand for owned parameters while the optimizer steps; the same object in each step."""
        self._stand_ins: dict[int, Parameter] = {}
        """By group, of which this rank owns nothing: counters of the group go on there too."""
        self._stand_in_state: dict[int, Any] = {}
        self._restore: Callable[[], None] | None = None
        self._find_owners()

    def _find_owners(self) -> None:
        """Give new parameters their owners: the largest cost first, where least is to be done."""
        given = (each for group in self.optimizer.param_groups for each in group["params"])
        new = [e for e in given if self._exchange.is_shared(e) and id(e) not in self._owner]
        for each in sorted(new, key=lambda each: -self._cost(each)):
            owner = self._costs.index(min(self._costs))
            self._owner[id(each)] = owner
            self._costs[owner] += self._cost(each)
        self._shared += new

    def _cost(self, parameter: Parameter) -> int:
        """Return what a step takes, relative to others: products of matrices take most."""
        shape = self._exchange.whole_shape(parameter)
        return shape.numel() * (min(shape) if len(shape) > 1 else 1)

    def patch(self) -> None:
        """Let the optimizer's own ``step`` be this one, until ``release``."""
        self._restore = patch_optimizer(
            self.optimizer, step=self.step, discard=lambda *_: None, absorb=lambda _: None
        )

    def release(self) -> None:
        """Give the optimizer its own ``step`` back."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def owns(self, parameter: Tensor) -> bool | None:
        """Whether this rank holds the state of a parameter, whole; None: each rank its own."""
        owner = self._owner.get(id(parameter))
        return None if owner is None else owner == self._exchange.rank

    def traffic(self) -> list[AxisTraffic]:
        """Return what this rank sends in a step of all parameters."""
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
        """Return what is gathered at once: beside an accelerator, little, to spare its memory."""
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
        """Let this rank have what it owns, whole. Collective."""
        pairs = self._exchange.gather(owned)
        for each, pair in zip(owned[self._exchange.rank], pairs, strict=True):
            whole = self._whole(each)
            whole.data, whole.grad = (tensor.to(whole.device) for tensor in pair)

    def _give_back(self, owned: Sequence[Sequence[Parameter]]) -> None:
        """Let all ranks have what this rank has stepped. Collective."""
        own = owned[self._exchange.rank]
        wholes = [self._wholes[id(each)].detach().to(each.device) for each in own]
        self._exchange.give_back(owned, wholes)

    def _by_owner(self, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
        return [
            [each for each in parameters if self._owner[id(each)] == rank]
            for rank in range(self._exchange.size)
        ]

    def _whole(self, parameter: Parameter) -> Parameter:
        """Return what stands for a parameter, with the attributes that the author gave it."""
        known = self._wholes.get(id(parameter))
        if known is None:
            like: Any = {"dtype": parameter.dtype, "device": self._device or parameter.device}
            known = Parameter(torch.empty(0, **like), requires_grad=parameter.requires_grad)
            self._wholes[id(parameter)] = known
        vars(known).update(vars(parameter))
        return known

    @contextmanager
    def _swapped(self, optimizer: Optimizer, mine: Sequence[Parameter]) -> Iterator[None]:
        """Within, the optimizer has whole parameters in its groups, those that this rank owns."""
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
        """Return what a group steps on this rank; a stand-in where it owns nothing of it."""
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
    """Add what this rank sends over an axis in an optimizer step of whole parameters."""
    why = "gradients and parameters to the rank that steps them whole, and parameters back"
    found = list(expected)
    sent = [traffic for each in steps for traffic in each.traffic() if traffic.axis == axis]
    for _, operator, num_bytes, calls in sent:
        known = next((each for each in found if each.operator == operator), None)
        if known is None:
            found.append(ExpectedTraffic(axis, operator, float(num_bytes), float(calls), why))
            continue
        found[found.index(known)] = ExpectedTraffic(
            known.axis,
            operator,
            known.payload_bytes + num_bytes,
            None if known.calls is None else known.calls + calls,
            known.why if why in known.why else f"{known.why}; {why}",
        )
    return found


def is_owned(parameter: Tensor, steps: Iterable[WholeSteps]) -> bool | None:
    """Whether this rank holds the state of a parameter, whole; None: it is stepped by none."""
    known = (each.owns(parameter) for each in steps)
    return next((owns for owns in known if owns is not None), None)

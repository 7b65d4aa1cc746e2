"""Steps of optimizers that need whole matrices, such as Muon, where ranks hold shards.

[Note: Whole parameters at one owner]
Each parameter has one owner among the ranks that share it. For a step, every rank sends its shards
of gradients and parameters to their owners in one all-to-all; the owner runs the author's optimizer
on the whole parameters that it owns, and a second all-to-all brings the shards back. State stays
whole, at the owner. The owners are chosen once, the most expensive parameter first, each for the
rank with the least to do: no matrix is stepped twice.

A rank sends two times its shards and receives its shards back; beside them it holds gradient and
value of what it owns during the step.

Source: Liu et al. 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982,
section 2.3
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.strategies.checkpoint.chunks import DimDivision, ElementStretch, TensorPart
from boltmesh.strategies.offload.optimizer_patch import patch_optimizer
from boltmesh.strategies.torch_compat.optimizers import step_without_hooks
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.telemetry.traffic import ExpectedTraffic

STAND_IN_SIZE = 2


class WholeSteps:
    """Runs one optimizer on whole parameters, each at its owner.

    See [Note: Whole parameters at one owner]. Made on all ranks of ``group`` together.

    Args:
        optimizer: The author's. Its ``step`` is replaced, its groups and state stay its own.
        group: Ranks that hold the shards of one copy of the model.
        record: Called before each collective step.
    """

    def __init__(
        self, optimizer: Optimizer, group: ProcessGroup, record: Callable[[str], None]
    ) -> None:
        self.optimizer = optimizer
        self._group, self._rank, self._record = group, group.rank(), record
        self._run = step_without_hooks(optimizer)
        parameters = [each for settings in optimizer.param_groups for each in settings["params"]]
        self._sharded = [each for each in parameters if _is_in_rows(each)]
        self._owner = dict(zip(map(id, self._sharded), self._owners(), strict=True))
        self._wholes: dict[int, Parameter] = {}
        """Stand for owned shards while the optimizer steps; the same object in each step."""
        self._stand_ins: dict[int, Parameter] = {}
        """By group, of which this rank owns nothing: counters of the group go on there too."""
        self._stand_in_state: dict[int, Any] = {}
        self._restore: Callable[[], None] | None = patch_optimizer(
            optimizer, step=self._step, discard=lambda *_: None, absorb=lambda _: None
        )

    def _owners(self) -> list[int]:
        """Return the owner of each parameter: the largest cost first, where least is to be done."""
        busy = [0] * self._group.size()
        owners = [0] * len(self._sharded)
        costs = [_cost(each) for each in self._sharded]
        for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
            owners[number] = busy.index(min(busy))
            busy[owners[number]] += costs[number]
        return owners

    def release(self) -> None:
        """Give the optimizer its own ``step`` back."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def owns(self, parameter: Tensor) -> bool | None:
        """Whether this rank holds the state of a parameter, whole; None: each rank its own."""
        owner = self._owner.get(id(parameter))
        return None if owner is None else owner == self._rank

    # A step.

    def _step(self, optimizer: Optimizer) -> None:
        """Step whole parameters. Collective over the group."""
        trained = [each for each in self._sharded if each.grad is not None]
        self._record("stepped whole parameters")
        with torch.no_grad():
            self._gather(trained)
        try:
            with self._swapped(optimizer, trained):
                self._run(optimizer)
            with torch.no_grad():
                self._return(trained)
        finally:
            for whole in self._wholes.values():
                whole.grad, whole.data = None, whole.data.new_empty(0)

    def _gather(self, trained: Sequence[Parameter]) -> None:
        """Make whole values and gradients of what this rank owns. Collective over the group."""
        for like, parameters in _by_type(trained).items():
            sent = [
                [piece for each in self._of(rank, parameters) for piece in _local_pair(each)]
                for rank in range(self._group.size())
            ]
            mine = self._of(self._rank, parameters)
            received = self._exchange(
                sent,
                [2 * sum(_numel(each, rank, self._group.size()) for each in mine)
                 for rank in range(self._group.size())],
                like,
            )  # fmt: skip
            rows: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
            for rank, flat in enumerate(received):
                sizes = [_numel(each, rank, self._group.size()) for each in mine for _ in range(2)]
                pieces = torch.split(flat, sizes)
                for number, each in enumerate(mine):
                    values, grads = rows.setdefault(id(each), ([], []))
                    values.append(pieces[2 * number])
                    grads.append(pieces[2 * number + 1])
            for each in mine:
                values, grads = rows[id(each)]
                whole = self._whole(each)
                whole.data = torch.cat(values).view(each.shape)
                whole.grad = torch.cat(grads).view(each.shape)

    def _return(self, trained: Sequence[Parameter]) -> None:
        """Send the rows of what this rank owns to the ranks that hold them. Collective."""
        size = self._group.size()
        for like, parameters in _by_type(trained).items():
            mine = self._of(self._rank, parameters)
            wholes = [self._wholes[id(each)].detach().flatten() for each in mine]
            splits = [
                torch.split(whole, [_numel(each, rank, size) for rank in range(size)])
                for whole, each in zip(wholes, mine, strict=True)
            ]
            sent = [[pieces[rank] for pieces in splits] for rank in range(size)]
            owned = [self._of(rank, parameters) for rank in range(size)]
            counts = [sum(_local(each).numel() for each in some) for some in owned]
            for some, flat in zip(owned, self._exchange(sent, counts, like), strict=True):
                pieces = torch.split(flat, [_local(each).numel() for each in some])
                for each, piece in zip(some, pieces, strict=True):
                    _local(each).copy_(piece.view(_local(each).shape))

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], counts: Sequence[int], like: tuple[Any, Any]
    ) -> list[Tensor]:
        """Send to each rank its tensors; return what each rank sent, flat. Collective."""
        dtype, device = like
        flat = [torch.cat([each.flatten() for each in some]) if some else None for some in sent]
        sizes = [0 if each is None else each.numel() for each in flat]
        given = [each for each in flat if each is not None]
        packed = torch.cat(given) if given else torch.empty(0, dtype=dtype, device=device)
        received = torch.empty(sum(counts), dtype=dtype, device=device)
        dist.all_to_all_single(received, packed, list(counts), sizes, group=self._group)
        return list(torch.split(received, list(counts)))

    def _of(self, rank: int, parameters: Sequence[Parameter]) -> list[Parameter]:
        return [each for each in parameters if self._owner[id(each)] == rank]

    def _whole(self, parameter: Parameter) -> Parameter:
        """Return what stands for a shard, with the attributes that the author gave it."""
        known = self._wholes.get(id(parameter))
        if known is None:
            local = _local(parameter)
            known = Parameter(local.new_empty(0), requires_grad=parameter.requires_grad)
            self._wholes[id(parameter)] = known
        vars(known).update(vars(parameter))
        return known

    @contextmanager
    def _swapped(self, optimizer: Optimizer, trained: Sequence[Parameter]) -> Iterator[None]:
        """Within, the optimizer has whole parameters in its groups, those that this rank owns."""
        mine = {id(each): each for each in self._of(self._rank, trained)}
        before = [settings["params"] for settings in optimizer.param_groups]
        state = optimizer.state
        for number, settings in enumerate(optimizer.param_groups):
            settings["params"] = self._stepped(number, before[number], mine)
        for key, each in mine.items():
            if each in state:
                state[self._wholes[key]] = state.pop(each)
        for number, stand_in in self._stand_ins.items():
            if number in self._stand_in_state:
                state[stand_in] = self._stand_in_state[number]
        try:
            yield
        finally:
            for settings, parameters in zip(optimizer.param_groups, before, strict=True):
                settings["params"] = parameters
            for key, each in mine.items():
                if self._wholes[key] in state:
                    state[each] = state.pop(self._wholes[key])
            for number, stand_in in self._stand_ins.items():
                self._stand_in_state[number] = state.pop(stand_in, {})

    def _stepped(
        self, number: int, parameters: Sequence[Parameter], mine: Mapping[int, Parameter]
    ) -> list[Parameter]:
        """Return what a group steps on this rank; a stand-in where it owns nothing of it."""
        stepped = [
            self._wholes[id(each)] if id(each) in mine else each
            for each in parameters
            if id(each) in mine or id(each) not in self._owner
        ]
        sharded = [each for each in parameters if id(each) in self._owner and each.grad is not None]
        if stepped or not sharded:
            return stepped
        stand_in = self._stand_ins.get(number)
        if stand_in is None:
            local = _local(sharded[0])
            stand_in = Parameter(local.new_zeros([STAND_IN_SIZE] * sharded[0].dim()))
            vars(stand_in).update(vars(sharded[0]))
            self._stand_ins[number] = stand_in
        stand_in.grad = torch.zeros_like(stand_in)
        return [stand_in]

    # Traffic.

    def bytes_per_step(self) -> int:
        """Return what this rank sends in a step in which all parameters have gradients."""
        sent = sum(_bytes(each, _local(each).numel()) for each in self._sharded)
        owned = (each for each in self._sharded if self._owner[id(each)] == self._rank)
        return 2 * sent + sum(_bytes(each, each.numel()) for each in owned)

    def calls_per_step(self) -> int:
        """Return the number of collectives in such a step."""
        return 2 * len(_by_type(self._sharded))


def as_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter that this rank owns, as checkpoints take it.

    Args:
        state: By key.
    """
    return {
        key: _as_part(value) if isinstance(value, Tensor) and value.dim() > 0 else value
        for key, value in state.items()
    }


def add_whole_steps(
    expected: Sequence[ExpectedTraffic], steps: Sequence[WholeSteps]
) -> list[ExpectedTraffic]:
    """Add what this rank sends in an optimizer step of whole parameters."""
    if not steps:
        return list(expected)
    return [
        *expected,
        ExpectedTraffic(
            "data",
            "alltoall_base",
            float(sum(each.bytes_per_step() for each in steps)),
            float(sum(each.calls_per_step() for each in steps)),
            "gradients and parameters to the rank that steps them whole, and parameters back",
        ),
    ]


def _is_in_rows(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements[-1].is_shard(0)


def _local(parameter: Tensor) -> Tensor:
    return local_tensor(parameter.detach())


def _local_pair(parameter: Parameter) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a parameter and of its gradient."""
    grad = parameter.grad
    assert isinstance(grad, DTensor)
    value = _local(parameter)
    return value, grad.to_local().to(value.dtype)


def _numel(parameter: Parameter, rank: int, num_ranks: int) -> int:
    """Return the elements of a parameter on one rank; ranks have rows as ``torch.chunk`` cuts."""
    num_rows = parameter.shape[0]
    per_rank = -(-num_rows // num_ranks)
    rows = max(0, min(num_rows, (rank + 1) * per_rank) - rank * per_rank)
    return rows * (parameter.numel() // max(num_rows, 1))


def _cost(parameter: Parameter) -> int:
    """Return what a step takes, relative to others: products of matrices take most."""
    return parameter.numel() * (min(parameter.shape) if parameter.dim() > 1 else 1)


def _by_type(parameters: Sequence[Parameter]) -> dict[tuple[Any, Any], list[Parameter]]:
    found: dict[tuple[Any, Any], list[Parameter]] = defaultdict(list)
    for each in parameters:
        found[each.dtype, each.device].append(each)
    return found


def _bytes(parameter: Parameter, numel: int) -> int:
    return numel * parameter.element_size()


def _as_part(value: Tensor) -> TensorPart:
    """Return a whole tensor that one rank alone has."""
    rows = (ElementStretch(0, 0, value.shape[0]),)
    return TensorPart.of(value, DimDivision(value.shape, 0, rows))
